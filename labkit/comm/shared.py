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

FEWEST_BYTES = 2 << 10
"""Below, MPI's own call is as fast, unless ranks have to wait for a core at each of its steps."""
MOST_RANKS = 16
"""Everybody reads everybody's array: more ranks would rather share the work."""


def suits(group: Communicator, buffer: Buffer) -> bool:
    """Whether this is the fastest way. The same on all ranks that reduce arrays of one size."""
    board = group.ballot
    if not isinstance(board, Board) or not board.carries_data or not 1 < group.size <= MOST_RANKS:
        return False
    return (1 if board.crowded else FEWEST_BYTES) <= buffer.nbytes <= SLOT_BYTES


def all_reduce(group: Communicator, call: Call, buffer: Buffer, combine: Any, timeout: float | None) -> None:
    """Combine all ranks' `buffer` in rank order, into every rank's: the result is the same to the bit everywhere."""
    if call.slots is None:
        board = group.ballot
        assert isinstance(board, Board)
        call.slots = [
            [np.frombuffer(slot, buffer.kind.numpy, buffer.count) for slot in board.slots(parity)] for parity in (0, 1)
        ]
    slots = call.slots[group.log[-1][0] + 1 & 1]
    x = np.frombuffer(buffer.spec[0], buffer.kind.numpy, buffer.count)
    if group.abandoned is None:  # else others may still read
        slots[group.rank][...] = x
    collective(group, call, timeout, _fold, (slots, combine, x), local=True)


def _fold(slots: list[Any], combine: Any, out: Any) -> None:
    combine(slots[0], slots[1], out=out)
    for other in slots[2:]:
        combine(out, other, out=out)
