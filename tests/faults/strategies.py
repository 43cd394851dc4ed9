"""Random programs for hypothesis: right ones, with a fault or two put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.faults.model import FOR_ANY, Begin, Call, Exchange, Finish, Op, Program, Receive, Send

TAGS = (0, 1, 2, 3)

Ranks = list[list[Op]]


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any], *, mismatches: bool = True, most: int = 5) -> Program:
    """Programs of two to four ranks; without `mismatches`, all ranks make the same collectives where they make any.

    A right program is a list of events, each of which adds what it needs to every rank that takes part: ranks that
    work through the same list never wait for each other in a circle. Then faults are put in.
    """
    size = draw(st.integers(2, 4))
    ranks: Ranks = [[] for _ in range(size)]
    pair = draw(st.permutations(range(size)).map(lambda order: tuple(sorted(order[:2]))))
    handles = iter(range(100))
    for _ in range(draw(st.integers(1, most))):
        _event(draw, ranks, pair, handles, mismatches)
    for _ in range(draw(st.sampled_from([0, 1, 1]))):
        _fault(draw, ranks, mismatches)
    uses_pair = any(isinstance(op, Call) and op.on == "pair" for ops in ranks for op in ops)
    return Program(tuple(map(tuple, ranks)), pair if uses_pair else ())


def _event(draw: Any, ranks: Ranks, pair: tuple[int, int], handles: Any, mismatches: bool, deeper: bool = True) -> None:
    a, b = draw(st.permutations(range(len(ranks))))[:2]
    tag = draw(st.sampled_from(TAGS))
    kinds = ["message", "call", "exchange", "ring", "collect", "cross", "call"]
    kinds += (["begun"] if deeper else []) + (["different calls"] if mismatches else [])
    match draw(st.sampled_from(kinds)):
        case "message":
            ranks[a].append(Send(b, tag))
            ranks[b].append(Receive(a, tag))
        case "call":
            on = draw(st.sampled_from(["world", "pair"]))
            name = draw(st.sampled_from(["barrier", "all_reduce", "broadcast"]))
            members = pair if on == "pair" else range(len(ranks))
            root = draw(st.integers(0, len(members) - 1)) if name == "broadcast" else 0
            for rank in members:
                ranks[rank].append(Call(name, on, root))
        case "different calls":
            usual, other = draw(
                st.permutations(
                    [
                        Call("barrier", "world"),
                        Call("all_reduce", "world"),
                        *(Call("broadcast", "world", root) for root in (0, 1)),
                    ]
                )
            )[:2]
            for rank, ops in enumerate(ranks):
                ops.append(other if rank == a else usual)
        case "exchange":
            ranks[a].append(Exchange(Send(b, tag), Receive(b, tag)))
            ranks[b].append(Exchange(Send(a, tag), Receive(a, tag)))
        case "ring":
            for rank, ops in enumerate(ranks):
                ops.append(Exchange(Send((rank + 1) % len(ranks), tag), Receive((rank - 1) % len(ranks), tag)))
        case "collect":
            for rank, ops in enumerate(ranks):
                if rank != a:
                    ops.append(Send(a, FOR_ANY))
            ranks[a] += [Receive(None, FOR_ANY)] * (len(ranks) - 1)
        case "cross":  # right for small messages if both send first, and never otherwise
            first_receives = draw(st.sampled_from([False, False, False, True]))
            for me, other in ((a, b), (b, a)):
                both: list[Op] = [Send(other, tag), Receive(other, tag)]
                ranks[me] += reversed(both) if first_receives else both
        case "begun":
            handle, sends = next(handles), draw(st.booleans())
            operation = Send(b, tag) if sends else Receive(a, tag)
            who = a if sends else b
            ranks[who].append(Begin(operation, handle))
            _event(draw, ranks, pair, handles, mismatches, deeper=False)
            if sends:
                ranks[b].append(Receive(a, tag))
            else:
                ranks[a].append(Send(b, tag))
            ranks[who].append(Finish(handle))


def _fault(draw: Any, ranks: Ranks, mismatches: bool) -> None:
    """Put one fault in, where there is something to spoil; it may turn out harmless."""
    places = [(rank, index) for rank, ops in enumerate(ranks) for index in range(len(ops))]
    if not places:
        return
    rank, index = draw(st.sampled_from(places))
    ops = ranks[rank]
    op = ops[index]
    match draw(st.sampled_from(["drop", "swap", "tag", "peer", "call", "twice"])):
        case "drop":
            gone = _handle(op)
            ops[:] = [each for at, each in enumerate(ops) if at != index and (gone is None or _handle(each) != gone)]
        case "swap" if index + 1 < len(ops) and (_handle(op) is None or _handle(op) != _handle(ops[index + 1])):
            ops[index], ops[index + 1] = ops[index + 1], op
        case "tag" if not isinstance(op, Finish | Call):
            ops[index] = _changed(op, tag=draw(st.sampled_from(TAGS)))
        case "peer" if len(ranks) > 2 and not isinstance(op, Finish | Call):
            ops[index] = _changed(op, peer=draw(st.sampled_from([each for each in range(len(ranks)) if each != rank])))
        case "call" if isinstance(op, Call):
            ops[index] = Call(draw(st.sampled_from(["barrier", "all_reduce"])), op.on)
        case "twice" if _handle(op) is None:
            ops.insert(index, op)
    if not mismatches:
        _agree(ranks)


def _changed(op: Any, tag: int | None = None, peer: int | None = None) -> Any:
    """`op` with another tag or peer. What is received from any source stays so."""
    if isinstance(op, Begin):
        return op._replace(operation=_changed(op.operation, tag, peer))
    if isinstance(op, Exchange):
        return op._replace(receive=_changed(op.receive, tag, peer))
    if op.tag == FOR_ANY:
        return op._replace(dst=peer) if isinstance(op, Send) and peer is not None else op
    changes: dict[str, int] = {} if tag is None else {"tag": tag}
    if peer is not None:
        changes["dst" if isinstance(op, Send) else "src"] = peer
    return op._replace(**changes)


def _agree(ranks: Ranks) -> None:
    """Let the n-th collective of each rank on a communicator be that of the first rank that has one."""
    for on in ("world", "pair"):
        first: list[Call] = []
        for ops in ranks:
            count = 0
            for index, op in enumerate(ops):
                if isinstance(op, Call) and op.on == on:
                    if count == len(first):
                        first.append(op)
                    ops[index] = first[count]
                    count += 1


def _handle(op: Op) -> int | None:
    return op.handle if isinstance(op, Begin | Finish) else None
