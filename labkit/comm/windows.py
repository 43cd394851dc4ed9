"""Arrays in memory that all ranks of a host share, so that a reduction can work on everybody's where they lie.

`shared_zeros` gives every rank an array, its *part* of a window: one piece of memory that holds all ranks' parts.
`all_reduce` finds by its address that an array lies there. Whether it does so at the same place on every rank is asked
anew at each call: a rank writes the place down before it says that it is in the call, so that whoever knows that all
are there also knows where everybody's array lies.
"""

from __future__ import annotations

import math
import mmap
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.comm.agreement import collective
from labkit.comm.board import SLOT_BYTES, Board
from labkit.comm.buffers import KINDS, Array, Buffer, Kind, writing
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError
from labkit.comm.hosts import arrange
from labkit.comm.memory import MARK_BYTES, MemoryMaking
from labkit.comm.waiting import until

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "Window", "find", "serial", "shared_zeros"]

PAGE = 4096
BLOCK_BYTES = 256 << 10
"""So much of each rank's part is combined at a time: it stays in the processor's cache until it is written back."""
_CUTS_KEPT = 256
_WORD = 8
_SERIAL_AT = 40
"""A call's serial number: the world's generation above so many bits, its number on the communicator below."""


class Window:
    """Memory that holds one part for each rank of a host, and words by which the ranks tell where they are.

    Attributes
    ----------
    start, nbytes
        Address and length of this rank's part.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, nbytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        self._rank, self._size = rank, size
        self.nbytes = nbytes
        words = memoryview(memory)[MARK_BYTES : MARK_BYTES + 3 * _WORD * size].cast("Q")
        self._claims, self._done = words[: 2 * size], words[2 * size :]
        self.parts = [np.frombuffer(memory, np.uint8, nbytes, _part_at(size, nbytes, each)) for each in range(size)]
        """Every rank's memory."""
        self._cuts: dict[Any, list[list[np.ndarray[Any, Any]]]] = {}
        self.start = int(self.parts[rank].ctypes.data)

    def own(self) -> np.ndarray[Any, Any]:
        """This rank's part, as what the caller keeps: the window goes when nothing refers to that any more."""
        assert self._memory is not None
        part = np.frombuffer(self._memory, np.uint8, self.nbytes, _part_at(self._size, self.nbytes, self._rank))
        weakref.finalize(part, self._drop).atexit = False
        return part

    def suits(self, rank: int, size: int) -> bool:
        """Whether it can go on in a world in which this rank has that number, out of so many."""
        return self._memory is not None and (rank, size) == (self._rank, self._size)

    def blocks(self, offset: int, count: int, kind: Kind, share: int, shares: int) -> list[list[np.ndarray[Any, Any]]]:
        """One share, out of so many, of the array at `offset`, in pieces: of each piece every rank's part."""
        key = offset, count, kind, share, shares
        blocks = self._cuts.get(key)
        if blocks is None:
            parts = [part[offset : offset + count * kind.itemsize].view(kind.numpy) for part in self.parts]
            start, stop, length = count * share // shares, count * (share + 1) // shares, BLOCK_BYTES // kind.itemsize
            bounds = [(at, min(at + length, stop)) for at in range(start, stop, length)]
            blocks = [[part[low:high] for part in parts] for low, high in bounds]
            if len(self._cuts) >= _CUTS_KEPT:
                self._cuts.clear()
            self._cuts[key] = blocks
        return blocks

    def claim(self, serial: int, offset: int) -> None:
        """Write down that this rank's array of call number `serial` begins `offset` bytes into its part."""
        self._claims[2 * self._rank] = serial
        self._claims[2 * self._rank + 1] = offset

    def agreed(self, serial: int, offset: int) -> bool:
        """Whether all ranks have written the same."""
        return self._claims.tolist() == [serial, offset] * self._size

    def finish(self, serial: int) -> None:
        """Write down that this rank has done its share of call number `serial`."""
        self._done[self._rank] = serial

    def finished(self, serial: int) -> bool:
        """Whether all ranks have."""
        return self._done.tolist() == [serial] * self._size

    def _drop(self) -> None:
        self._memory, self.parts, self.start, self.nbytes = None, [], 0, -1
        self._cuts.clear()
        self._claims = self._done = memoryview(b"")


class Place(NamedTuple):
    """Where an array lies: so many bytes into this rank's part of a window."""

    window: Window
    offset: int
    buffer: Buffer


def find(group: Communicator, x: Array) -> Place | None:
    """Where `x` lies, if it is contiguous, in a window of `group`, and larger than a board's slot when it is combined.

    Its buffer names the element type that lies there, float16 and bfloat16 too.
    """
    if 2 * getattr(x, "nbytes", 0) <= SLOT_BYTES:
        return None
    buffer = writing(x, "all_reduce")
    kind, memory = buffer.kind, buffer.spec[0]
    wide = 2 * buffer.nbytes if kind.family == "half" else buffer.nbytes
    if buffer.holder is not x or kind.family == "opaque" or wide <= SLOT_BYTES:
        return None
    address = int(memory.ctypes.data) if isinstance(memory, np.ndarray) else memory.address
    for window in group.windows:
        offset = address - window.start
        if offset >= 0 and offset + buffer.nbytes <= window.nbytes:
            return Place(window, offset, buffer)
    return None


def shared_zeros(
    shape: int | tuple[int, ...],
    dtype: torch.dtype | np.dtype[Any] | type | str = "float32",
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Array:
    """A new array of zeros in memory that the ranks of a host share: `all_reduce` is fastest there. Collective.

    Every rank has an array of its own, to be used like any other; parameters, gradients and buckets of them may be
    slices of it. `all_reduce` of it, or of a contiguous slice that is the same on all ranks, moves nothing: each rank
    combines its share of all ranks' arrays where they lie. Nobody may write into the array while any rank is in that
    call.

    The memory is given back when nothing refers to the array any more. After `comm.renew` the world's arrays are used
    as before; those of other communicators, and those that a rank has no more, are then reduced as ordinary ones are.
    Where ranks cannot share memory the array is an ordinary one.

    Parameters
    ----------
    shape
        The same on all ranks.
    dtype
        A torch dtype gives a tensor, a numpy dtype or its name an array.
    group, timeout
        See `labkit.comm`.

    Raises
    ------
    MismatchError
        When shapes or dtypes differ between the ranks.
    ArgumentError
        When the dtype has no MPI counterpart.

    >>> import torch
    >>> from labkit import comm
    >>> bucket = comm.shared_zeros(1_000_000, torch.float32)
    >>> comm.all_reduce(bucket, "mean")
    """
    communicator = current(group)
    who = communicator.who("shared_zeros")
    sizes = (shape,) if isinstance(shape, int) else tuple(int(each) for each in shape)
    name = _name(dtype)
    kind = _KINDS.get(name)
    tensor = type(dtype).__module__ == "torch"
    if kind is None or any(length < 0 for length in sizes) or (name == "bfloat16" and not tensor):
        known = ", ".join(each for each in _KINDS if tensor or each != "bfloat16")
        raise ArgumentError(f"{who}: shape {sizes}, dtype {name}: give lengths ≥ 0 and one of the dtypes {known}.")
    nbytes = math.prod(sizes) * kind.itemsize
    part = _part(communicator, f"{name}, shape {sizes}", nbytes, timeout)
    if tensor:
        import torch

        return torch.from_numpy(part).view(getattr(torch, name)).reshape(sizes)
    return part.view(kind.name).reshape(sizes)


def _part(group: Communicator, text: str, nbytes: int, timeout: float | None) -> np.ndarray[Any, Any]:
    """Zeros, in a window of the ranks of this host if they can have one."""
    if not group.arranged:
        arrange(group)
    inside = group if group.hosts is None else group.hosts.inside
    call = group.call("shared_zeros", text)
    size, board = inside.size, inside.ballot
    if nbytes == 0 or group.size == 1 or not isinstance(board, Board) or not board.carries_data:
        collective(group, call, timeout)
        return np.zeros(nbytes, np.uint8)
    own = _part_at(size, nbytes, inside.rank), nbytes
    making = MemoryMaking(inside.private, "labkit-window", _part_at(size, nbytes, size), own)

    def finish() -> None:
        group.kept.append(making)  # stays there after an interrupt
        until(making.over, call.about, timeout, lambda: group.ballot.look(call, group.sequence))
        group.kept.remove(making)

    collective(group, call, timeout, finish, atomic=False)
    group.windows = [window for window in group.windows if window.nbytes >= 0]
    if making.memory is None:
        return np.zeros(nbytes, np.uint8)
    window = Window(making.memory, inside.rank, size, nbytes)
    group.windows.append(window)
    return window.own()


def serial(group: Communicator, sequence: int) -> int:
    """A number for a collective that no other has, whatever was renewed meanwhile."""
    return group.generation << _SERIAL_AT | sequence


def _part_at(size: int, nbytes: int, rank: int) -> int:
    """Where the part of `rank` begins; of rank `size`: where the window ends."""
    pages = -(-(MARK_BYTES + 3 * _WORD * size) // PAGE)
    return (pages + rank * -(-nbytes // PAGE)) * PAGE


def _name(dtype: Any) -> str:
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)


_KINDS = {kind.name: kind for kind in KINDS.values() if kind.family != "opaque"}
