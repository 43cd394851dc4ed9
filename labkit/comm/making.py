"""The making of a communicator, step by step, by calls that do not block: an interrupt between two does no harm.

What a step begins is remembered by the same call of a C function that begins it, and no interrupt can come within one.
So a making can be taken up again where it was, and no rank ever begins a step more often than the others do.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING

from labkit.comm.board import Board, length
from labkit.comm.mpi import MPI
from labkit.comm.vote import Votes

if TYPE_CHECKING:
    from labkit.comm.agreement import Ballot

__all__ = ["Copies", "Making"]

_TOKEN = struct.Struct("=qq16s?")
_NAME = "/memfd:labkit-board"
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
    """The making of a board. Collective on `mpi`.

    Rank 0 makes memory that has no name anywhere, the others reach it through rank 0's open file. Nothing can
    therefore be left behind, whoever is killed when. Where one of them cannot reach it, no rank has a board.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        self._token = bytearray(_TOKEN.size)
        self._works = bytearray(1)
        self._file = -1
        self._memory: mmap.mmap | None = None
        self._begun: list[MPI.Request] = []
        self._over = False
        self.board: Board | None = None

    def over(self) -> bool:
        """Take the next step; whether that was the last."""
        if self._over:
            return True
        mpi, begun = self._mpi, self._begun
        if not begun:
            if mpi.rank == 0 and self._memory is None:
                self._make()
            begun.extend(starmap(mpi.Ibcast, [([self._token, MPI.BYTE], 0)]))
        if len(begun) == 1:
            if not begun[0].Test():
                return False
            if mpi.rank != 0:
                self._open()
            self._works[0] = self._memory is not None
            begun.extend(starmap(mpi.Iallreduce, [(MPI.IN_PLACE, [self._works, MPI.UINT8_T], MPI.MIN)]))
        if not begun[1].Test():
            return False
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        if self._works[0] and self._memory is not None:
            self.board = Board(self._memory, mpi.rank, mpi.size, _TOKEN.unpack(self._token)[3], _turn(mpi))
        self._over = True
        return True

    def _make(self) -> None:
        size = self._mpi.size
        number, process, memory = secrets.token_bytes(16), -1, None
        if os.environ.get("LABKIT_BOARD", "1") != "0":
            try:
                if self._file < 0:
                    self._file = os.memfd_create(_NAME.removeprefix("/memfd:"))
                os.posix_fallocate(self._file, 0, length(size))
                memory = mmap.mmap(self._file, length(size))
                memory[:16] = number
                process = os.getpid()
            except (AttributeError, OSError):  # no such call on this system, or no memory
                memory = None
        crowded = size > len(os.sched_getaffinity(0))
        _TOKEN.pack_into(self._token, 0, process, self._file, number, crowded)
        self._memory = memory

    def _open(self) -> None:
        process, file, number, _ = _TOKEN.unpack(self._token)
        if process < 0:
            return
        path = f"/proc/{process}/fd/{file}"
        try:
            if not os.readlink(path).startswith(_NAME):  # on another host it may be any file, or none
                return
            with open(path, "r+b") as opened:
                memory = mmap.mmap(opened.fileno(), length(self._mpi.size))
        except (OSError, ValueError):
            return
        if memory[:16] == number:
            self._memory = memory


def _turn(mpi: MPI.Intracomm) -> Callable[[], None]:
    """Lets MPI move what is under way, and raises its error when a rank was lost."""

    def turn() -> None:
        mpi.Iprobe(MPI.ANY_SOURCE, _TAG)

    return turn
