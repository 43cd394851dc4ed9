"""Receives that are matched by labkit before MPI sees them.

A receive posted with a buffer that is too small for its message is not safe: Open MPI 5 (shared memory with cross
memory attach, and TCP) reports the truncation, but a long message has by then been written over whatever lies behind
the buffer. So labkit posts a receive only when its message is there and is known to fit. Until then it waits here, in
the order in which the receives were made, which is the order in which MPI would match them. The cure costs one probe
a message, and gives more: a receive that is given up needs no cancelling, and a message that does not fit is not lost.
"""

from __future__ import annotations

from typing import Protocol

from labkit.comm.mpi import MPI
from labkit.comm.waiting import progress

__all__ = ["Inbox"]


class _Receive(Protocol):
    source: int
    """MPI's number, or ANY_SOURCE."""
    wire_tag: int
    """MPI's number, or ANY_TAG."""

    def take(self, status: MPI.Status) -> None:
        """Receive the message that `status` tells of, or fail if it does not fit."""


class Inbox:
    """A communicator's receives that have no message yet."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        self.waiting: list[_Receive] = []
        """In the order in which they were made."""
        self._status = MPI.Status()

    def add(self, receive: _Receive) -> None:
        """Queue a receive behind those made before; take its message at once if it is there."""
        self.waiting.append(receive)
        if len(self.waiting) == 1:
            progress.append(self.drive)
        self.advance()

    def remove(self, receive: _Receive) -> None:
        """Forget a receive that has found no message."""
        if receive in self.waiting:
            self.waiting.remove(receive)
            if not self.waiting and self.drive in progress:
                progress.remove(self.drive)

    def drive(self) -> None:
        """The same as `advance`, for waits that have nothing to do with this communicator: its faults are not theirs.

        Whoever waits for one of these receives finds the fault by `advance`.
        """
        try:
            self.advance()
        except MPI.Exception:  # revoked, or a rank is lost
            progress.remove(self.drive)

    def advance(self) -> None:
        """Give the messages that have come to the receives that want them."""
        waiting, status, probe = self.waiting, self._status, self._mpi.Iprobe
        if len(waiting) > 1 and not probe(MPI.ANY_SOURCE, MPI.ANY_TAG):
            return
        for receive in tuple(waiting):
            while receive in waiting and probe(receive.source, receive.wire_tag, status):
                # A message that came a moment ago may belong to a receive that was made earlier.
                source, tag = status.Get_source(), status.Get_tag()
                first = next(each for each in waiting if _accepts(each, source, tag))
                self.remove(first)
                first.take(status)


def _accepts(receive: _Receive, source: int, tag: int) -> bool:
    return receive.source in (source, MPI.ANY_SOURCE) and receive.wire_tag in (tag, MPI.ANY_TAG)
