"""Memory that the ranks of one host share, made step by step, by calls that do not block.

It has no name anywhere: rank 0 makes it, the others reach it through rank 0's open file. Nothing can therefore be left
behind, whoever is killed when. (MPI's own shared windows leave files in /dev/shm when their ranks are killed.)
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from itertools import starmap

from labkit.comm.mpi import MPI

__all__ = ["MARK_BYTES", "MemoryMaking"]

MARK_BYTES = 16
"""The memory begins with so many random bytes, by which the ranks know that they have all reached the same."""

_TOKEN = struct.Struct("=qq16s?")
_PREFIX = "/memfd:"


class MemoryMaking:
    """The making of memory of `length` bytes. Collective on `mpi`; where one rank cannot reach it, none has it.

    What a step begins is remembered by the same call of a C function that begins it, so that a making that was
    interrupted can be taken up again where it was.

    Attributes
    ----------
    memory
        Once `over` is true: the memory, zeros but for the mark at its start; or None.
    crowded
        Once `over` is true: whether the ranks outnumber the cores of rank 0.
    """

    def __init__(
        self, mpi: MPI.Intracomm, name: str, length: int, own: tuple[int, int] = (0, 0), *, wanted: bool = True
    ) -> None:
        """Prepare.

        Parameters
        ----------
        mpi, name, length
            Among whom, what /proc/PID/maps calls it, and how many bytes. The same on all ranks.
        own
            Start and length of what this rank will use most: it allocates that, near the core it runs on. Rank 0
            allocates everything where this is left out.
        wanted
            False at rank 0: there shall be none.
        """
        self._mpi = mpi
        self._name = name
        self._length = length
        self._own = own
        self._wanted = wanted
        self._token = bytearray(_TOKEN.size)
        self._works = bytearray(1)
        self._file = -1
        self._mapped: mmap.mmap | None = None
        self._begun: list[MPI.Request] = []
        self._over = False
        self.memory: mmap.mmap | None = None
        self.crowded = False

    def over(self) -> bool:
        """Take the next step; whether that was the last."""
        if self._over:
            return True
        mpi, begun = self._mpi, self._begun
        if not begun:
            if mpi.rank == 0 and self._mapped is None:
                self._make()
            begun.extend(starmap(mpi.Ibcast, [([self._token, MPI.BYTE], 0)]))
        if len(begun) == 1:
            if not begun[0].Test():
                return False
            if mpi.rank != 0:
                self._open()
            self._works[0] = self._mapped is not None
            begun.extend(starmap(mpi.Iallreduce, [(MPI.IN_PLACE, [self._works, MPI.UINT8_T], MPI.MIN)]))
        if not begun[1].Test():
            return False
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        if not self._works[0]:
            self._mapped = None
        self.memory = self._mapped
        self.crowded = _TOKEN.unpack(self._token)[3]
        self._over = True
        return True

    def _make(self) -> None:
        number, process, mapped = secrets.token_bytes(MARK_BYTES), -1, None
        if self._wanted:
            try:
                if self._file < 0:
                    self._file = os.memfd_create(self._name)
                os.ftruncate(self._file, self._length)
                start, nbytes = self._own if self._own[1] else (0, self._length)
                os.posix_fallocate(self._file, 0, start + nbytes)
                mapped = mmap.mmap(self._file, self._length)
                mapped[:MARK_BYTES] = number
                process = os.getpid()
            except (AttributeError, OSError):  # no such call on this system, or no memory
                mapped = None
        crowded = self._mpi.size > len(os.sched_getaffinity(0))
        _TOKEN.pack_into(self._token, 0, process, self._file, number, crowded)
        self._mapped = mapped

    def _open(self) -> None:
        process, file, number, _ = _TOKEN.unpack(self._token)
        if process < 0:
            return
        path = f"/proc/{process}/fd/{file}"
        try:
            if not os.readlink(path).startswith(_PREFIX + self._name):  # on another host it may be any file, or none
                return
            with open(path, "r+b") as opened:
                if self._own[1]:  # a shortage shows here, and not by a signal when the memory is used
                    os.posix_fallocate(opened.fileno(), *self._own)
                memory = mmap.mmap(opened.fileno(), self._length)
        except (OSError, ValueError):
            return
        if memory[:MARK_BYTES] == number:
            self._mapped = memory
