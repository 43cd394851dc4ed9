"""A model's ranks as the notebook would see them: random order of steps, ranks asked one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Literal

from labkit.cluster.deadlock import Seen
from labkit.cluster.seen import Condition
from labkit.telemetry.states import RankState, Wait
from tests.faults.model import Begin, Call, Exchange, Machine, Program, Request, Send

Style = Literal["labkit", "mpi4py"]

NAMES = {"labkit": {"world": "world", "pair": "pair"}, "mpi4py": {"world": "MPI.COMM_WORLD", "pair": "MPI.pair"}}
RAW_NAMES = {"barrier": "Barrier", "all_reduce": "Allreduce", "broadcast": "Bcast"}


class Simulation:
    """A program stepped in random order by a clock that counts steps.

    A rank's processor time grows by each of its own steps; a step that finds nothing has at least looked.
    """

    def __init__(self, program: Program, style: Style, seed: int) -> None:
        self.machine = Machine(program, transit=True)
        self.style: Style = style
        self.time = 1
        self._random = random.Random(seed)
        size = program.size
        self._cpu, self._since, self._serial = [0] * size, [0] * size, [0] * size

    @property
    def ranks(self) -> range:
        return range(self.machine.program.size)

    def step(self, rank: int) -> bool:
        """Let one rank look, and go on if it can."""
        before = (self.machine.position[rank], rank in self.machine.begun, set(self.machine.failed))
        self.time += 1
        self._cpu[rank] += 1
        moved = self.machine.step(rank)
        if moved:
            self._since[rank] = self._serial[rank] = self.time
        for other in self.machine.failed - before[2]:
            self._since[other] = self.time
        return moved

    def wander(self, steps: int) -> None:
        """Some steps of random ranks; large messages arrive at random times."""
        for _ in range(steps):
            under_way = list(self.machine.in_transit())
            if under_way and self._random.random() < 0.2:
                self.machine.arrive(self._random.choice(under_way))
            self.step(self._random.choice(self.ranks))

    def settle(self) -> None:
        """Let everything happen that still can."""
        moved = True
        while moved:
            for request in list(self.machine.in_transit()):
                self.machine.arrive(request)
            moved = any([self.step(rank) for rank in self.ranks])

    def look(self, most_steps: int = 3) -> dict[int, Seen]:
        """Ask every rank, in random order, while the ranks go on."""
        at = self.time
        self.time += 1
        conditions = {rank: self._condition(rank) for rank in self.ranks}
        seen = {}
        for rank in self._random.sample(self.ranks, len(self.ranks)):
            self.wander(self._random.randrange(most_steps + 1))
            seen[rank] = Seen(conditions[rank], self._state(rank), at)
        return seen

    def _condition(self, rank: int) -> Condition:
        if rank in self.machine.failed:
            return "failed"
        return "finished" if self.machine.operation(rank) is None else "running"

    def _state(self, rank: int) -> RankState:
        machine = self.machine
        waits = {id(request) for request in machine.waiting_in(rank)}
        wait, under_way = self._wait(rank)
        under_way += [
            self._message(request)
            for request in machine.requests[rank].values()
            if id(request) not in waits and not request.over
        ]
        idle = machine.operation(rank) is None
        entered = {self._name(on): machine.entered(on, rank) for on, of in machine.calls if of == rank}
        history = {self._name(on): tuple(map(_text, calls)) for (on, of), calls in machine.calls.items() if of == rank}
        return RankState(
            rank=rank,
            pid=rank + 1,
            doing="idle" if idle else "waiting" if wait else "computing",
            serial=self._serial[rank] if wait else 0,
            cpu_s=self._cpu[rank],
            since=self._since[rank],
            wait=wait,
            under_way=tuple(under_way),
            entered=entered,
            history=history,
        )

    def _wait(self, rank: int) -> tuple[Wait | None, list[Wait]]:
        """What the rank waits for, and what its operation has begun besides."""
        machine, op = self.machine, self.machine.operation(rank)
        if op is None or rank not in machine.begun or isinstance(op, Begin):
            return None, []
        if isinstance(op, Call):
            return self._collective(rank, op), []
        requests = machine.waiting_in(rank)
        if not isinstance(op, Exchange):
            return self._message(requests[0]), []
        if self.style == "mpi4py":
            parts = tuple(self._message(request) for request in requests)
            return Wait("Sendrecv", rank, "any", parts=parts, since=self._since[rank], text="Sendrecv()"), []
        left = [self._message(request) for request in requests if not request.over]
        return (left[0], left[1:]) if left else (self._message(requests[1]), [])

    def _message(self, request: Request) -> Wait:
        op, members = request.operation, tuple(self.ranks)
        sends = isinstance(op, Send)
        peer = op.dst if isinstance(op, Send) else op.src
        return Wait(
            "send" if sends else "recv",
            request.rank,
            "send" if sends else "receive",
            self._name("world"),
            members,
            peer,
            peer,
            op.tag,
            count=0,
            since=self._since[request.rank],
            text=f"{'send' if sends else 'recv'}({peer}, tag={op.tag})",
        )

    def _collective(self, rank: int, op: Call) -> Wait:
        members = self.machine.program.members(op.on)
        return Wait(
            op.name if self.style == "labkit" else RAW_NAMES[op.name],
            members.index(rank),
            "collective",
            self._name(op.on),
            members,
            sequence=self.machine.entered(op.on, rank),
            signature=_text(op),
            since=self._since[rank],
            text=_text(op),
        )

    def _name(self, on: str) -> str:
        return NAMES[self.style][on]


def _text(call: Call) -> str:
    return f"{call.name}(root={call.root})" if call.name == "broadcast" else f"{call.name}()"


def pairs(
    simulation: Simulation, looks: int, most_steps: int
) -> Iterator[tuple[Mapping[int, Seen], Mapping[int, Seen]]]:
    """Two looks in a row, again and again, while the program runs."""
    before = simulation.look(most_steps)
    for _ in range(looks):
        simulation.wander(most_steps)
        now = simulation.look(most_steps)
        yield before, now
        before = now
