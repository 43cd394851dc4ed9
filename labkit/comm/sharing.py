"""All-reduce where the arrays lie: each rank combines its share of all ranks' arrays and writes it into all of them.

Every element is combined by one rank alone, in rank order, so the result is the same to the bit everywhere. It costs
about what a copy of the array does: a share of everybody's array is read, and as much is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

from labkit.comm.agreement import Call, collective
from labkit.comm.algorithms import ring
from labkit.comm.board import SLOT_BYTES
from labkit.comm.buffers import Buffer, reducing
from labkit.comm.communicator import Communicator
from labkit.comm.halves import narrow, widen
from labkit.comm.link import PrivateLink
from labkit.comm.mpi import MPI
from labkit.comm.waiting import until
from labkit.comm.windows import Place, serial

__all__ = ["Reduction", "suits"]

_Vector = np.ndarray[Any, Any]
_Combine = Callable[..., object]
_TAG = 2
"""Nobody sends under it."""


def suits(group: Communicator, buffer: Buffer) -> bool:
    """Whether a buffer that lies in no window is to go this way: where ranks are on several hosts.

    The same on all ranks, for one size.
    """
    return group.hosts is not None and buffer.nbytes > SLOT_BYTES


@dataclass
class Reduction:
    """One all-reduce of this kind.

    Attributes
    ----------
    group, call, buffer, timeout
        See `labkit.comm.agreement.collective`.
    place
        Where the buffer lies, if that is in a window. The ranks need not all have one.
    combine, mpi
        Such as `numpy.add` and MPI's operator for the same.
    divisor
        What the result is divided by; 1 for not at all.
    """

    group: Communicator
    call: Call
    buffer: Buffer
    place: Place | None
    combine: _Combine
    mpi: MPI.Op
    divisor: int
    timeout: float | None

    def __post_init__(self) -> None:
        self.number = serial(self.group, self.group.sequence + 1)
        self.todo = iter([()])
        """Used up by the call of a C function that begins MPI's."""

    def start(self) -> None:
        """Combine all ranks' buffers into every rank's."""
        group, place = self.group, self.place
        if place is not None and group.abandoned is None:  # else others may still read
            place.window.claim(self.number, place.offset)
        with np.errstate(all="ignore"):  # like MPI's own: an overflow shows in the result
            collective(group, self.call, self.timeout, self._move, atomic=False)

    def _move(self) -> None:
        """Move the data."""
        try:
            self._run()
        except MPI.Exception:
            raise
        except BaseException:  # an interrupt: others may block in MPI's call already, and rely on this rank
            if not self._all_there() and self._by_mpi():
                self._reduce_by_mpi(self._plain())
            raise

    def _all_there(self) -> bool:
        place = self.place
        return place is not None and place.window.agreed(self.number, place.offset)

    def _run(self) -> None:
        place, hosts = self.place, self.group.hosts
        there = self._all_there()
        if hosts is not None:
            there = self._all_say(there)
        if not there:
            self._elsewhere()
            return
        assert place is not None
        window = place.window
        if hosts is None:
            rank, owners = self.group.rank, self.group.size
        else:
            rank, owners = hosts.inside.rank, hosts.owners
        if rank < owners:
            self._combine(window.blocks(place.offset, self.buffer.count, self.buffer.kind, rank, owners))
        window.finish(self.number)
        self._wait(partial(window.finished, self.number))

    def _combine(self, blocks: Sequence[Sequence[_Vector]]) -> None:
        """Combine the ranks' parts of this rank's share, block by block, and write the result into all of them."""
        half = self.buffer.kind.name if self.buffer.kind.family == "half" else None
        hosts = self.group.hosts
        longest = max((len(block[0]) for block in blocks), default=0)
        other = np.empty(longest if half else 0, np.float32)
        if hosts is None:
            room = np.empty(longest, np.float32) if half else None
            for block in blocks:
                into = block[0] if room is None else room[: len(block[0])]
                self._fold(block, into, other, half)
                self._spread(into, block, half)
            return
        ends = np.cumsum([len(block[0]) for block in blocks])
        sums = np.empty(ends[-1], np.float32 if half else self.buffer.kind.numpy)
        pieces = [sums[end - len(block[0]) : end] for end, block in zip(ends, blocks, strict=True)]
        for into, block in zip(pieces, blocks, strict=True):
            self._fold(block, into, other, half)
        assert hosts.across is not None
        ring(sums, self.combine, PrivateLink(hosts.across, self.call, self.timeout))
        for into, block in zip(pieces, blocks, strict=True):
            self._spread(into, block, half)

    def _fold(self, block: Sequence[_Vector], into: _Vector, other: _Vector, half: str | None) -> None:
        if half is not None:
            widen(block[0], into, half)
            for part in block[1:]:
                wide = other[: len(part)]
                widen(part, wide, half)
                self.combine(into, wide, out=into)
            return
        if len(block) == 1:
            np.copyto(into, block[0])
            return
        self.combine(block[0], block[1], out=into)
        for part in block[2:]:
            self.combine(into, part, out=into)

    def _spread(self, result: _Vector, block: Sequence[_Vector], half: str | None) -> None:
        if self.divisor != 1:
            np.divide(result, self.divisor, out=result)
        first = block[0]
        if half is not None:
            narrow(result, first, half)
        elif result is not first:
            np.copyto(first, result)
        for part in block[1:]:
            np.copyto(part, first)

    def _plain(self) -> Buffer:
        """The buffer as one that lies in no window."""
        return self.buffer if self.place is None else reducing(self.buffer.x, "all_reduce")

    def _by_mpi(self) -> bool:
        """Whether it is a call of MPI's that reduces what lies elsewhere, and not the ring."""
        return self.group.hosts is None and self.call.plan.algorithm is None

    def _reduce_by_mpi(self, buffer: Buffer) -> None:
        for _ in starmap(partial(self.group.mpi.Allreduce, MPI.IN_PLACE, buffer.spec, self.mpi), self.todo):
            pass

    def _elsewhere(self) -> None:
        """As arrays are reduced that lie in no window: every rank does so, whether its own lies in one or not."""
        buffer, divisor = self._plain(), self.divisor
        x = buffer.array()
        if self._by_mpi():
            self._reduce_by_mpi(buffer)
        else:
            ring(x, self.combine, PrivateLink(self.group, self.call, self.timeout))
        if divisor != 1:
            np.divide(x, divisor, out=x)
        buffer.restore()

    def _all_say(self, there: bool) -> bool:
        """Whether all ranks of all hosts say so."""
        group = self.group
        answer = np.array([there], np.uint8)
        requests: list[MPI.Request] = []
        kept = answer, requests
        group.kept.append(kept)  # stays there after an interrupt
        requests.append(group.private.Iallreduce(MPI.IN_PLACE, answer, MPI.MIN))
        self._wait(requests[0].Test)
        group.kept.remove(kept)
        return bool(answer[0])

    def _wait(self, test: Callable[[], object]) -> None:
        """Until ``test()``; ends when a rank gave up or died."""
        group = self.group
        crowded = getattr(group.ballot, "crowded", False)
        for _ in range(200):
            if test():
                return
            if crowded:
                os.sched_yield()

        def look() -> None:
            group.private.Iprobe(MPI.ANY_SOURCE, _TAG)  # MPI tells here that a rank was lost
            group.ballot.look(self.call, group.sequence)

        until(test, self.call.about, self.timeout, look)
