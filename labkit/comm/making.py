"""The making of a communicator, step by step, by calls that do not block: an interrupt between two does no harm.

What a step begins is remembered by the same call of a C function that begins it, and no interrupt can come within one.
So a making can be taken up again where it was, and no rank ever begins a step more often than the others do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING

from labkit.comm.board import Board, length
from labkit.comm.memory import MemoryMaking
from labkit.comm.mpi import MPI
from labkit.comm.vote import Votes

if TYPE_CHECKING:
    from labkit.comm.agreement import Ballot

__all__ = ["Copies", "Making"]

_TAG = 2
"""Nobody sends under it on the private communicator."""


class Copies:
    """Duplicates of a communicator, one after the other. Collective on `source`."""

    def __init__(self, source: MPI.Intracomm, number: int) -> None:
        self._source = source
        self._number = number
        self._begun: list[tuple[MPI.Intracomm, MPI.Request]] = []

    def over(self) -> bool:
        """Take the next step; whether that was the last."""
        begun = self._begun
        while not begun or begun[-1][1].Test():
            if len(begun) == self._number:
                return True
            begun.extend(starmap(self._source.Idup, ((),)))
        return False

    def made(self) -> list[MPI.Intracomm]:
        """The copies, once all is over."""
        return [copy for copy, _ in self._begun]


class Making:
    """The communicators that carry data and what is private to labkit, and the means by which their ranks agree.

    Parameters
    ----------
    source
        Is duplicated. Collective on it.
    data
        What is to carry the data; default another duplicate.
    generation
        To know it by.
    others
        How many further duplicates are wanted.
    """

    def __init__(
        self, source: MPI.Intracomm, data: MPI.Intracomm | None = None, generation: int = 0, others: int = 0
    ) -> None:
        self.generation = generation
        self._given = [] if data is None else [data]
        self._copies = Copies(source, 2 - len(self._given) + others)
        self._ballot: _BoardMaking | None = None
        self._votes: Votes | None = None

    def over(self) -> bool:
        """Take the next step; whether that was the last."""
        if not self._copies.over():
            return False
        if self._ballot is None:
            self._ballot = _BoardMaking(self.made()[1])
        if not self._ballot.over():
            return False
        if self._ballot.board is None:
            if self._votes is None:
                self._votes = Votes(self.made()[1])
            self._votes.open()
        return True

    def made(self) -> list[MPI.Intracomm]:
        """The communicator for data, the private one, and the others."""
        return self._given + self._copies.made()

    def ballot(self) -> Ballot:
        """How their ranks agree."""
        assert self._ballot is not None
        ballot: Ballot | None = self._ballot.board or self._votes
        assert ballot is not None
        return ballot


class _BoardMaking:
    """The making of a board. Collective on `mpi`; no rank has one where some rank cannot reach its memory."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        wanted = os.environ.get("LABKIT_BOARD", "1") != "0"
        self._memory = MemoryMaking(mpi, "labkit-board", length(mpi.size), wanted=wanted)
        self.board: Board | None = None

    def over(self) -> bool:
        """Take the next step; whether that was the last."""
        if not self._memory.over():
            return False
        mpi, memory = self._mpi, self._memory.memory
        if memory is not None and self.board is None:
            self.board = Board(memory, mpi.rank, mpi.size, self._memory.crowded, _turn(mpi))
        return True


def _turn(mpi: MPI.Intracomm) -> Callable[[], None]:
    """Lets MPI move what is under way, and raises its error when a rank was lost."""

    def turn() -> None:
        mpi.Iprobe(MPI.ANY_SOURCE, _TAG)

    return turn
