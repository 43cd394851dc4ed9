"""How ranks agree where they share no memory: by a tiny all-reduce that can be waited for.

It carries the largest and the smallest mark of all ranks' calls; where both are this rank's own, all are in the same
call.

Giving up must not leave another rank in the blocking call that follows. A rank gives up no sooner than `HOLD_NS` after
it entered. Ranks therefore know from the spread of their entry times (carried by the same all-reduce) whether one of
them may have given up meanwhile; only then do they confirm once more that all are still there.
"""

from __future__ import annotations

import struct
import time
from itertools import starmap
from typing import TYPE_CHECKING

from labkit.comm.mpi import MPI
from labkit.comm.waiting import until

if TYPE_CHECKING:
    from labkit.comm.agreement import Call

__all__ = ["Votes"]

HOLD_NS = 50_000_000
"""A rank stays in a call at least this long before it gives up."""
LATE_NS = HOLD_NS // 2
"""Entry times further apart than this are confirmed; half of the above leaves a stalled rank 25 ms."""
GRACE_NS = 1_000_000_000
"""How long an interrupted rank waits for the others' confirmations."""

_FEW_TESTS = range(20)
"""Where all ranks come at once, the agreement is over before this: no clock is asked."""

_four = struct.Struct("4q")
_pack, _unpack = _four.pack_into, _four.unpack_from


class _Vote:
    """A persistent all-reduce (MPI 4) of four integers by maximum. Starting it again costs less than a new one."""

    __slots__ = ("_mpi", "_request", "mine", "outcome", "start", "test")

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self.mine = bytearray(_four.size)
        self.outcome = bytearray(_four.size)
        self._mpi = mpi
        self._request: list[MPI.Prequest] = []

    def open(self) -> None:
        """Make MPI's request, unless that is done. On every rank equally often: it takes a number that must agree."""
        if not self._request:
            buffers = [self.mine, 4, MPI.INT64_T], [self.outcome, 4, MPI.INT64_T], MPI.MAX
            self._request.extend(starmap(self._mpi.Allreduce_init, (buffers,)))
        self.start, self.test = self._request[0].Start, self._request[0].Test

    def prepare(self, a: int, b: int, c: int, d: int) -> None:
        """Set this rank's numbers, and clear the outcome: it stays zero until the vote is over."""
        _pack(self.outcome, 0, 0, 0, 0, 0)
        _pack(self.mine, 0, a, b, c, d)

    def over(self) -> bool:
        """Whether the vote was started and is over."""
        return bool(self.test()) and any(self.outcome)

    def free(self) -> None:
        """Give MPI's request back."""
        self._request[0].Free()


class Votes:
    """The two votes of a communicator: one that all are there, and one that all still are."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._entry = _Vote(mpi)
        self._confirmation = _Vote(mpi)
        self._begun = 0

    def open(self) -> None:
        """Make them ready. May be repeated when it was interrupted. Collective."""
        self._entry.open()
        self._confirmation.open()

    def enter(self, call: Call, sequence: int, entered: int) -> None:
        """Tell the others that this rank is in the call since `entered`, in nanoseconds."""
        vote, signature = self._entry, call.signature
        _pack(vote.outcome, 0, 0, 0, 0, 0)
        _pack(vote.mine, 0, signature, -signature, entered, -entered)
        self._begun = sequence
        vote.start()

    def entered(self, sequence: int) -> bool:
        """Whether this rank has told the others so."""
        return self._begun == sequence and (not self._entry.test() or any(self._entry.outcome))

    def agree(self, call: Call, _: int, timeout: float | None) -> bool:
        """Wait until all are in the call. False if they are in different ones."""
        vote, signature = self._entry, call.signature
        test = vote.test
        for _ in _FEW_TESTS:
            if test():
                break
        else:
            until(test, call.about, timeout)
        highest, lowest, last, first = _unpack(vote.outcome)
        if highest != signature or lowest != -signature:
            return False
        if last + first > LATE_NS:
            self._confirm()
            until(self._confirmation.over, call.about, timeout)
        return True

    def look(self, call: Call, sequence: int) -> None:
        """Nothing tells here whether another rank has given up."""

    def leave(self, call: Call, _: int, entered: int) -> bool:
        """Give up. True if that is too late: all are in the call, and this rank must go through with it."""
        vote = self._entry
        while not vote.test():
            if time.perf_counter_ns() - entered > HOLD_NS:
                return False
            time.sleep(50e-6)
        highest, lowest, last, first = _unpack(vote.outcome)
        if highest != call.signature or lowest != -call.signature:
            return False
        if last + first > LATE_NS:
            self._confirm()
            until_ns = time.perf_counter_ns() + GRACE_NS
            while not self._confirmation.over():
                if time.perf_counter_ns() > until_ns:
                    return False
                time.sleep(50e-6)
        return True

    def mark_left(self, sequence: int) -> None:
        """Nothing tells the others here that this rank has given up."""

    def drop(self) -> bool:
        """Nothing: an abandoned vote may still use its memory."""
        return False

    def free(self) -> None:
        """Give MPI's requests back."""
        self._entry.free()
        self._confirmation.free()

    def _confirm(self) -> None:
        """Start the second vote of this call, unless that was done already and an interrupt came between."""
        vote, serial = self._confirmation, _unpack(self._entry.outcome)[2]  # the latest entry time marks the call
        if _unpack(vote.mine)[0] != serial:
            vote.prepare(serial, 0, 0, 0)
            vote.start()
