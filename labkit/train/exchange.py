"""What a master and its workers say to each other: a push goes up, an answer comes down.

Each is a header of a few numbers and then the tensors, one message a flat buffer. They have a communicator to
themselves: a message that an interrupted run left behind cannot reach the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labkit import comm

__all__ = ["ASK", "DONE", "LOST", "TALLY", "UPDATE", "Answer", "Channel", "Push"]

UPDATE, TALLY, LOST, ASK, DONE = range(5)
"""Kinds of a push: with tensors, and answered; figures alone; how many samples are not used; a question for the next
piece of the data; nothing at all, after which nothing comes."""

_PUSH, _ANSWER, _DATA, _PIECE = 1, 2, 3, 4  # tags
_NONE_LEFT = -1


class Push(NamedTuple):
    """The header of what a worker sends.

    Attributes
    ----------
    kind
        `UPDATE`, `TALLY`, `LOST`, `ASK` or `DONE`.
    version
        Updates that the weights had seen which the worker computed with.
    epoch
        Of the figures that follow, from 0.
    loss
        Sum over the samples since the last push.
    right
        Right answers among them.
    samples
        How many.
    batches
        In how many batches.
    """

    kind: float = UPDATE
    version: float = 0
    epoch: float = 0
    loss: float = 0.0
    right: float = 0
    samples: float = 0
    batches: float = 0

    def plus(self, other: Push) -> Push:
        """Return the figures of both, of the same epoch."""
        sums = (mine + theirs for mine, theirs in zip(self[3:], other[3:], strict=True))
        return Push(self.kind, self.version, self.epoch, *sums)


class Answer(NamedTuple):
    """The header of what the master sends back, ahead of its weights.

    Attributes
    ----------
    version
        Updates that these weights have seen.
    staleness
        Updates by others between the worker's reading its weights and the use of what it pushed.
    stop
        1: make no further step.
    rate
        Learning rate that is asked for, or NaN.
    """

    version: float = 0
    staleness: float = 0
    stop: float = 0
    rate: float = math.nan


class Channel:
    """Carries pushes and answers within a communicator.

    Parameters
    ----------
    group
        Used for nothing else while the run lasts.
    """

    def __init__(self, group: comm.Communicator) -> None:
        self.group = group
        self._push = torch.zeros(len(Push()), dtype=torch.float64)
        self._answer = torch.zeros(len(Answer()), dtype=torch.float64)
        self._piece = torch.zeros(1, dtype=torch.int64)

    def push(self, master: int, header: Push, tensors: Sequence[Tensor] = ()) -> None:
        """Send to `master`."""
        comm.send(torch.tensor(header, dtype=torch.float64), master, _PUSH, group=self.group)
        self._send(tensors, master)

    def next_push(self, into: Sequence[Tensor]) -> tuple[int, Push]:
        """Wait for whichever rank comes first; return it and its header. An update's tensors are in `into` then."""
        source = comm.recv(self._push, None, _PUSH, group=self.group).src
        header = Push(*self._push.tolist())
        if header.kind == UPDATE:
            self._recv(into, source)
        return source, header

    def answer(self, worker: int, header: Answer, tensors: Sequence[Tensor]) -> None:
        """Send to `worker`."""
        comm.send(torch.tensor(header, dtype=torch.float64), worker, _ANSWER, group=self.group)
        self._send(tensors, worker)

    def next_answer(self, master: int, into: Sequence[Tensor]) -> Answer:
        """Wait for `master`; its tensors are in `into` then."""
        comm.recv(self._answer, master, _ANSWER, group=self.group)
        self._recv(into, master)
        return Answer(*self._answer.tolist())

    def ask(self, master: int, question: Push) -> int | None:
        """Ask `master` for a piece of the data, and return its number; None when none is left."""
        self.push(master, question)
        comm.recv(self._piece, master, _PIECE, group=self.group)
        piece = int(self._piece)
        return None if piece == _NONE_LEFT else piece

    def hand_out(self, worker: int, piece: int | None) -> None:
        """Answer what `ask` asked."""
        answer = torch.tensor([_NONE_LEFT if piece is None else piece])
        comm.send(answer, worker, _PIECE, group=self.group)

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        for tensor in tensors:
            comm.send(tensor.cpu(), rank, _DATA, group=self.group)

    def _recv(self, tensors: Sequence[Tensor], rank: int) -> None:
        for tensor in tensors:
            # Through host memory where it is on a GPU, so that it works with every MPI.
            host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
            comm.recv(host, rank, _DATA, group=self.group)
            if host is not tensor:
                tensor.copy_(host)
