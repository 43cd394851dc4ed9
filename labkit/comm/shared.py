"""All-reduce in shared memory: every rank lays its array open, all agree, and each adds up everybody's for itself.

For small arrays that is less work than any exchange of messages. The agreement that a collective begins with is also
what tells that the data is there, and by the next agreement but one everybody has read it (see `labkit.comm.board`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.comm.agreement import Call, collective
from labkit.comm.board import SLOT_BYTES, Board
from labkit.comm.buffers import Buffer
from labkit.comm.communicator import Communicator

__all__ = ["all_reduce", "suits"]

MOST_RANKS = 16
"""Everybody reads everybody's array: more ranks would rather share the work."""


def suits(group: Communicator, buffer: Buffer) -> bool:
    """Whether this is the fastest way. The same on all ranks that reduce arrays of one size."""
    board = group.ballot
    if not isinstance(board, Board) or not board.carries_data or not 1 < group.size <= MOST_RANKS:
        return False
    return 0 < buffer.nbytes <= SLOT_BYTES


def all_reduce(group: Communicator, call: Call, buffer: Buffer, combine: Any, timeout: float | None) -> None:
    """Combine all ranks' `buffer` in rank order, into every rank's: the result is the same to the bit everywhere."""
    if call.slots is None:
        board = group.ballot
        assert isinstance(board, Board)
        call.slots = [_slots(board, parity, buffer) for parity in (0, 1)]
    slots = call.slots[group.log[-1][0] + 1 & 1]
    x = _laid_open(buffer)
    if group.abandoned is None:  # else others may still read
        slots[group.rank][...] = x
    collective(group, call, timeout, _fold, (combine, x, *slots), local=True)


def _slots(board: Board, parity: int, buffer: Buffer) -> list[Any]:
    """The ranks' room, in rank order, seen as arrays like this one."""
    x = _laid_open(buffer)
    return [np.frombuffer(slot, x.dtype, buffer.count).reshape(x.shape) for slot in board.slots(parity)]


def _laid_open(buffer: Buffer) -> Any:
    """The array itself; of a tensor its memory."""
    if type(buffer.holder) is np.ndarray:
        return buffer.holder
    return np.frombuffer(buffer.spec[0], buffer.kind.numpy, buffer.count)


def _fold(combine: Any, out: Any, first: Any, second: Any, *others: Any) -> None:
    combine(first, second, out=out)
    for other in others:
        combine(out, other, out=out)
