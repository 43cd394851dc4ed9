"""Small message-passing programs, and what becomes of them: the reference that the real ranks are compared with.

No program's outcome depends on timing. Messages between two ranks under one tag stay in order; a receive from any
source takes only messages of a tag of its own, which are small, so that their senders never wait; nothing that was
begun is left without its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

LARGE = (2, 3)
"""Tags of large messages, whose send ends only once it is received. All others are small: they leave at once."""
FOR_ANY = 4
"""Tag of the messages that are received from any source; nothing else receives them."""

On = Literal["world", "pair"]


class Send(NamedTuple):
    dst: int
    tag: int


class Receive(NamedTuple):
    src: int | None
    tag: int


class Exchange(NamedTuple):
    """A send and a receive at once."""

    send: Send
    receive: Receive


class Begin(NamedTuple):
    """A send or receive that is begun; `Finish` with the same handle waits for it."""

    operation: Send | Receive
    handle: int


class Finish(NamedTuple):
    handle: int


class Call(NamedTuple):
    """A collective."""

    name: Literal["barrier", "all_reduce", "broadcast"]
    on: On
    root: int = 0


Op = Send | Receive | Exchange | Begin | Finish | Call


@dataclass(frozen=True)
class Program:
    """What each rank does, in order. `pair`: the two ranks of the sub-communicator, or nothing."""

    ranks: tuple[tuple[Op, ...], ...]
    pair: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def members(self, on: On) -> tuple[int, ...]:
        return tuple(range(self.size)) if on == "world" else self.pair


@dataclass(eq=False)
class Request:
    """A send or receive under way on a rank."""

    rank: int
    operation: Send | Receive
    value: int = 0
    """What a send carries, or what a receive has got."""
    partner: Request | None = None
    in_transit: bool = False

    @property
    def over(self) -> bool:
        if isinstance(self.operation, Send) and self.operation.tag not in LARGE:
            return True
        return self.partner is not None and not self.in_transit


@dataclass(frozen=True)
class Outcome:
    """How a program ends.

    Attributes
    ----------
    kind
        "runs through", "deadlock" or "mismatch".
    blocked
        Ranks that never finish.
    awaits
        For each of them the ranks that it waits for.
    mismatched
        Ranks that were in different collectives, which all of them learn.
    got
        What each receive got, by rank and position in its program; without those from any source.
    """

    kind: Literal["runs through", "deadlock", "mismatch"]
    blocked: frozenset[int] = frozenset()
    awaits: dict[int, frozenset[int]] = field(default_factory=dict)
    mismatched: frozenset[int] = frozenset()
    got: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def has_cycle(self) -> bool:
        """Whether some blocked ranks wait for each other in a circle."""
        left = set(self.blocked)
        while ends := {rank for rank in left if not self.awaits[rank] & left}:
            left -= ends
        return bool(left)


class Machine:
    """A program under way. The same calls in any order lead to the same end.

    Parameters
    ----------
    program
        What to run.
    transit
        Whether a large message, once both sides are there, stays under way until `arrive` is called.
    """

    def __init__(self, program: Program, *, transit: bool = False) -> None:
        self.program = program
        self.position = [0] * program.size
        self.requests: list[dict[int | str, Request]] = [{} for _ in range(program.size)]
        """Of each rank: what it has begun, by handle; "send" and "receive" are those of the operation it is in."""
        self.begun: set[int] = set()
        """Ranks that have entered their present operation."""
        self.calls: dict[tuple[On, int], list[Call]] = {
            (on, rank): [] for on in ("world", "pair") for rank in program.members(on)
        }
        self.failed: set[int] = set()
        self.got: dict[tuple[int, int], int] = {}
        self._transit = transit
        self._unmatched: list[Request] = []

    def operation(self, rank: int) -> Op | None:
        """Where `rank` is; None when it is at its end or has failed."""
        ops = self.program.ranks[rank]
        return None if rank in self.failed or self.position[rank] == len(ops) else ops[self.position[rank]]

    def step(self, rank: int) -> bool:
        """Let `rank` enter its operation, or leave it if it is over; False when it must wait or has no more to do."""
        op = self.operation(rank)
        if op is None:
            return False
        if rank not in self.begun:
            self.begun.add(rank)
            self._enter(rank, op)
            return True
        if not self._over(rank, op):
            return False
        self._leave(rank, op)
        return True

    def waiting_in(self, rank: int) -> list[Request]:
        """The requests that keep `rank` in its operation, over or not."""
        op = self.operation(rank)
        if op is None or rank not in self.begun:
            return []
        keys: list[int | str] = ["receive", "send"] if not isinstance(op, Finish) else [op.handle]
        return [self.requests[rank][key] for key in keys if key in self.requests[rank]]

    def in_transit(self) -> Iterator[Request]:
        """Receives whose message is under way."""
        for requests in self.requests:
            for request in requests.values():
                if request.in_transit and isinstance(request.operation, Receive):
                    yield request

    def arrive(self, request: Request) -> None:
        """Let the message of a receive come to its end."""
        for side in (request, request.partner):
            if side is not None:
                side.in_transit = False

    def entered(self, on: On, rank: int) -> int:
        """How many collectives `rank` has entered on a communicator."""
        return len(self.calls.get((on, rank), ()))

    def _enter(self, rank: int, op: Op) -> None:
        value = 100 * rank + self.position[rank] + 1
        mine = self.requests[rank]
        if isinstance(op, Exchange):
            mine["receive"] = self._post(Request(rank, op.receive))
            mine["send"] = self._post(Request(rank, op.send, value))
        elif isinstance(op, Send):
            mine["send"] = self._post(Request(rank, op, value))
        elif isinstance(op, Receive):
            mine["receive"] = self._post(Request(rank, op))
        elif isinstance(op, Begin):
            mine[op.handle] = self._post(Request(rank, op.operation, value))
        elif isinstance(op, Call):
            self.calls[op.on, rank].append(op)
            self._compare(op.on, self.entered(op.on, rank))

    def _compare(self, on: On, number: int) -> None:
        members = self.program.members(on)
        all_in = all(self.entered(on, rank) >= number for rank in members)
        if all_in and len({self.calls[on, rank][number - 1] for rank in members}) > 1:
            self.failed |= set(members)

    def _post(self, request: Request) -> Request:
        for other in self._unmatched:
            if _meet(request, other):
                self._unmatched.remove(other)
                request.partner, other.partner = other, request
                send, receive = (request, other) if isinstance(request.operation, Send) else (other, request)
                receive.value = send.value
                send.in_transit = receive.in_transit = self._transit and send.operation.tag in LARGE
                return request
        self._unmatched.append(request)
        return request

    def _over(self, rank: int, op: Op) -> bool:
        if isinstance(op, Call):
            number = self.entered(op.on, rank)
            return all(self.entered(op.on, other) >= number for other in self.program.members(op.on))
        return isinstance(op, Begin) or all(request.over for request in self.waiting_in(rank))

    def _leave(self, rank: int, op: Op) -> None:
        for request in self.waiting_in(rank):
            if isinstance(request.operation, Receive) and request.operation.src is not None:
                self.got[rank, self.position[rank]] = request.value
        for key in ("send", "receive", op.handle if isinstance(op, Finish) else ""):
            self.requests[rank].pop(key, None)
        self.begun.discard(rank)
        self.position[rank] += 1

    def awaited(self, rank: int) -> set[int]:
        """Whom `rank` waits for."""
        op = self.operation(rank)
        if isinstance(op, Call):
            number = self.entered(op.on, rank)
            return {other for other in self.program.members(op.on) if self.entered(op.on, other) < number}
        found: set[int] = set()
        for request in self.waiting_in(rank):
            if not request.over:
                peer = request.operation.dst if isinstance(request.operation, Send) else request.operation.src
                found |= {other for other in range(self.program.size) if other != rank} if peer is None else {peer}
        return found


def _meet(one: Request, other: Request) -> bool:
    send, receive = (one, other) if isinstance(one.operation, Send) else (other, one)
    to, of = send.operation, receive.operation
    if not isinstance(to, Send) or not isinstance(of, Receive):
        return False
    return to.dst == receive.rank and of.src in (None, send.rank) and to.tag == of.tag


def at_its_end(program: Program) -> Machine:
    """`program` when no rank can go on any more."""
    machine = Machine(program)
    while any([machine.step(rank) for rank in range(program.size)]):
        pass
    return machine


def outcome(program: Program) -> Outcome:
    """How `program` ends, whatever the timing."""
    machine = at_its_end(program)
    blocked = frozenset(rank for rank in range(program.size) if machine.operation(rank) is not None)
    return Outcome(
        "mismatch" if machine.failed else "deadlock" if blocked else "runs through",
        blocked,
        {rank: frozenset(machine.awaited(rank)) for rank in blocked},
        frozenset(machine.failed),
        machine.got,
    )
