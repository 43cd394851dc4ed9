"""What to change so that stuck ranks go on: one sentence or two that fit the case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from labkit.cluster.seen import Seen, leaves, missing, peer_of, rank_list
from labkit.telemetry.states import Wait

__all__ = ["Mismatch", "cure_for"]

Edge = tuple[int, int, Wait]

_LEFT = {"finished": "finished the cell", "failed": "failed", "gone": "died"}


@dataclass(frozen=True)
class Mismatch:
    """Ranks that made different collectives where all should make the same.

    Attributes
    ----------
    communicator, sequence
        Where: the how many-th collective on which communicator.
    calls
        Each rank's own, by world rank.
    blocked
        The ranks that wait in it.
    """

    communicator: str
    sequence: int
    calls: Mapping[int, str]
    blocked: set[int] = field(default_factory=set)

    def is_of(self, wait: Wait) -> bool:
        """Whether `wait` is of this place."""
        return (wait.kind, wait.communicator, wait.sequence) == ("collective", self.communicator, self.sequence)


def cure_for(
    stuck: Sequence[int],
    cycle: Sequence[int],
    edges: Iterable[Edge],
    mismatch: Mismatch | None,
    now: Mapping[int, Seen],
) -> str:
    """The cure as text, without the cycle itself.

    Parameters
    ----------
    stuck
        World ranks that cannot go on.
    cycle
        Ranks each of which waits for the next, or empty.
    edges
        Who waits for whom, with the operation in which it does.
    mismatch
        Where ranks made different collectives, if they did.
    now
        All ranks.
    """
    edges = list(edges)
    if mismatch is not None:
        return _for_mismatch(mismatch)
    pairs = list(zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))
    relevant = [edge for edge in edges if edge[:2] in pairs] if cycle else edges
    near_miss = _for_near_miss(relevant, now)
    if near_miss:
        return near_miss
    if cycle:
        return _for_cycle(relevant, now)
    return _for_those_who_left(edges, now)


def _for_mismatch(mismatch: Mismatch) -> str:
    together: dict[str, list[int]] = {}
    for rank, call in sorted(mismatch.calls.items()):
        together.setdefault(call, []).append(rank)
    sides = [f"{rank_list(ranks)} {_verb(ranks, 'call')} {call}" for call, ranks in together.items()]
    names = {call.partition("(")[0] for call in together}
    if len(names) > 1:
        advice = "Let every rank make the same collectives in the same order."
    elif len({_root(call) for call in together}) > 1:
        advice = "Give the same root on every rank."
    else:
        advice = "Give the same arguments (dtype, count, operation) on every rank."
    return f"Collective number {mismatch.sequence} on '{mismatch.communicator}' differs: {', '.join(sides)}. {advice}"


def _root(call: str) -> str:
    inside = call.partition("(")[2].rstrip(")").split(", ")
    return next((part for part in inside if part.startswith(("root=", "src=", "dst="))), "")


def _for_near_miss(edges: list[Edge], now: Mapping[int, Seen]) -> str:
    """A send and a receive between the same ranks that would meet but for the tag or the communicator."""
    for rank, other, leaf in edges:
        if leaf.kind not in ("send", "receive"):
            continue
        for offer in _begun(now.get(other)):
            aims = peer_of(offer)
            if {leaf.kind, offer.kind} != {"send", "receive"} or (aims is not None and aims != rank):
                continue
            mine, theirs = f"rank {rank} {_does(leaf)}", f"rank {other} {_does(offer)}"
            if leaf.communicator != offer.communicator:
                return (
                    f"{_capital(mine)} on '{leaf.communicator}', {theirs} on '{offer.communicator}': "
                    "use one communicator on both sides."
                )
            if leaf.tag is not None and offer.tag is not None and leaf.tag != offer.tag:
                return f"{_capital(mine)} tag {leaf.tag}, {theirs} tag {offer.tag}: use one tag on both sides."
    return ""


def _for_cycle(edges: list[Edge], now: Mapping[int, Seen]) -> str:
    kinds = {leaf.kind for _, _, leaf in edges}
    exchange = "Sendrecv()" if edges and edges[0][2].operation[:1].isupper() else "sendrecv()"
    one = "one side" if len({rank for rank, _, _ in edges}) == 2 else "one of them"
    if kinds == {"receive"}:
        return f"Let {one} send first, or use {exchange}."
    if kinds == {"send"}:
        return (
            "Small messages leave at once, but large ones wait for their receiver: "
            f"let {one} receive first, or use {exchange}."
        )
    calls = [edge for edge in edges if edge[2].kind == "collective"]
    if calls:
        return _for_absent(calls[0], now)
    return "Order the calls so that each send meets its receive, or begin them with isend() and irecv()."


def _for_those_who_left(edges: list[Edge], now: Mapping[int, Seen]) -> str:
    gone = sorted({other for _, other, _ in edges if other in now and now[other].condition == "gone"})
    if gone:
        return f"{_capital(rank_list(gone))} died: start it again with lab.heal(), or go on without it by lab.shrink()."
    absent = sorted({other for _, other, _ in edges if other in now and now[other].condition == "absent"})
    if absent:
        return (
            f"{_capital(rank_list(absent))} {_verb(absent, 'has')} no part in the cell: run it on every rank it needs."
        )
    for rank, other, leaf in edges:
        if other not in now or now[other].condition not in _LEFT:
            continue
        if leaf.kind == "collective":
            return _for_absent((rank, other, leaf), now)
        under = "" if leaf.tag is None else f" under tag {leaf.tag}"
        left = sorted({o for r, o, w in edges if r == rank and w is leaf and now[o].condition in _LEFT})
        who, them = _capital(rank_list(left)), "it" if len(left) == 1 else "one of them"
        if leaf.kind == "receive":
            without, advice = f"a send to rank {rank}{under}", f"let {them} send, or leave the receive out."
        else:
            without, advice = f"a receive from rank {rank}{under}", f"let {them} receive, or leave the send out."
        return f"{who} {_LEFT[now[other].condition]} without {without}: {advice}"
    return "Let every send meet its receive."


def _for_absent(edge: Edge, now: Mapping[int, Seen]) -> str:
    """Some ranks are in a collective that others have not entered and never will."""
    leaf = edge[2]
    absent = [rank for rank in missing(leaf, now) if rank in now]
    how: dict[str, list[int]] = {}
    for rank in absent:
        one = now[rank]
        if one.condition in _LEFT:
            how.setdefault(f"{_LEFT[one.condition]} without it", []).append(rank)
        elif one.wait is not None:
            how.setdefault(f"{{is}} in {one.wait.text or one.wait.operation} instead", []).append(rank)
        else:
            how.setdefault("{has} not come yet", []).append(rank)
    sides = [
        f"{rank_list(ranks)} " + manner.replace("{is}", _verb(ranks, "is")).replace("{has}", _verb(ranks, "has"))
        for manner, ranks in how.items()
    ]
    call = leaf.text or leaf.operation
    return f"Every rank of '{leaf.communicator}' must make the call {call}: {', '.join(sides)}."


def _begun(one: Seen | None) -> list[Wait]:
    if one is None or one.state is None:
        return []
    return [*(leaves(one.wait) if one.wait else ()), *one.state.under_way]


def _does(wait: Wait) -> str:
    return "receives" if wait.kind == "receive" else "sends"


def _verb(ranks: Sequence[int], verb: str) -> str:
    if len(ranks) == 1:
        return {"call": "calls"}.get(verb, verb)
    return {"is": "are", "has": "have"}.get(verb, verb)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
