"""A model cut into stages, one a rank, through which the micro-batches of a step go forward and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from labkit import comm
from labkit.data import share

from .pieces import Piece
from .ranks import Ranks
from .replicas import TrainError
from .schedules import Schedule
from .transport import Alone

__all__ = ["PipelineStage", "broadcast_stages", "cut_evenly", "stages_of"]


def cut_evenly(costs: Sequence[int], parts: int) -> list[int]:
    """Cut a row of things into `parts` runs such that the dearest run costs as little as can be.

    Returns
    -------
    list of int
        Where the second run begins, the third, …; no run is empty.

    Examples
    --------
    >>> cut_evenly([5, 1, 1, 1, 4], parts=3)
    [1, 4]
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # least[n]: the dearest run's cost when the first n things make so many runs, and where the last run begins.
    least: list[dict[int, tuple[int, int]]] = [{n: (sums[n], 0) for n in range(1, len(costs) + 1)}]
    for runs in range(2, parts + 1):
        before = least[-1]
        least.append(
            {
                n: min((max(before[first][0], sums[n] - sums[first]), first) for first in range(runs - 1, n))
                for n in range(runs, len(costs) + 1)
            }
        )
    begins: list[int] = []
    end = len(costs)
    for table in reversed(least[1:]):
        end = table[end][1]
        begins.insert(0, end)
    return begins


def stages_of(pieces: Sequence[Piece], stages: int, begins: Sequence[int] | None = None) -> list[list[Piece]]:
    """Return the pieces of each stage.

    Parameters
    ----------
    pieces
        The model's, in order.
    stages
        How many.
    begins
        With which pieces the second stage begins, the third, …; default: such that all stages have about as much to
        multiply (`cut_evenly`).

    Raises
    ------
    TrainError
        If there are more stages than pieces, or two stages need the same parameter.
    """
    if stages > len(pieces):
        raise TrainError(
            f"{stages} ranks cannot have a stage each: the model can be cut into {len(pieces)} pieces at most. "
            "Train on fewer ranks, or write the model with more layers"
        )
    if begins is None:
        begins = cut_evenly([piece.cost for piece in pieces], stages)
    bounds = [0, *begins, len(pieces)]
    if len(bounds) != stages + 1 or sorted(set(bounds)) != bounds:
        raise TrainError(
            f"{list(begins)} does not cut {len(pieces)} pieces into {stages} stages: give {stages - 1} numbers from "
            f"1 to {len(pieces) - 1}, each larger than the one before"
        )
    cut = [list(pieces[a:b]) for a, b in itertools.pairwise(bounds)]
    owner: dict[int, int] = {}
    for stage, mine in enumerate(cut):
        for name, parameter in ((name, p) for piece in mine for name, p in piece.parameters.items()):
            if owner.setdefault(id(parameter), stage) != stage:
                raise TrainError(
                    f"stages {owner[id(parameter)]} and {stage} both need {name}: a parameter can be in one stage "
                    "only. Give `cut` such that all its layers lie in one stage, or train on fewer ranks"
                )
    return cut


class PipelineStage:
    """This rank's stage: receives from the rank before, sends to the rank after, and back again.

    Parameters
    ----------
    stages
        The pieces of every rank's stage; all ranks have the same.
    schedule
        The order of its turns: one of `labkit.train.schedules.SCHEDULES`.
    loss
        Mean loss of outputs and labels; the last rank computes it.
    over
        The ranks, on a communicator that nobody else uses meanwhile: after an interrupt messages may be left there.

    Attributes
    ----------
    kept
        The most micro-batches whose activations it kept at a time.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Piece]],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        over: Ranks,
    ) -> None:
        self.number, self.count = over.rank, len(stages)
        self.pieces = stages[self.number]
        self.kept = 0
        self._taken = stages[self.number - 1][-1] if self.number else None
        self._schedule, self._loss = schedule, loss
        self._group = None if isinstance(over, Alone) else over.group
        self._under_way: list[comm.Request] = []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this stage, by their names in the model."""
        return {name: parameter for piece in self.pieces for name, parameter in piece.parameters.items()}

    def step(self, images: Tensor, labels: Tensor, micro_batches: int) -> tuple[float, Tensor]:
        """Add the gradient of the mean loss over all samples to this stage's parameters.

        Parameters
        ----------
        images, labels
            The samples of the step, the same on all ranks.
        micro_batches
            How many to cut them into; at most as many as there are samples.

        Returns
        -------
        loss, right
            On the last rank the mean loss, and whether each answer was right (bool, N); elsewhere 0 and nothing.
        """
        n = len(labels)
        cuts = [slice(*share(n, number, min(micro_batches, n))) for number in range(min(micro_batches, n))]
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        total, right = 0.0, torch.empty(n if self._is_last else 0, dtype=torch.bool, device=labels.device)
        for turn in self._schedule(self.number, self.count, len(cuts)):
            mine = cuts[turn.number]
            samples = mine.stop - mine.start
            if not turn.forward:
                self._backward(turn.number, *kept.pop(turn.number))
                continue
            if self._taken is None:
                x = y = images[mine]
            else:
                x = self._receive(self._taken, samples, turn.number, images)
                y = x.clone()  # the first layer may work in place, which autograd forbids where its gradients end
            for piece in self.pieces:
                y = piece(y)
            if self._is_last:
                right[mine] = y.detach().argmax(1) == labels[mine]
                y = self._loss(y, labels[mine]) * (samples / n)
                total += float(y.detach())
            else:
                self._send(y.detach(), self.number + 1, turn.number)
            kept[turn.number] = x, y
            self.kept = max(self.kept, len(kept))
        for request in self._under_way:
            request.wait()
        self._under_way.clear()
        return total, right

    @property
    def _is_last(self) -> bool:
        return self.number == self.count - 1

    def _backward(self, number: int, x: Tensor, y: Tensor) -> None:
        """Take the gradient of `y` from the next rank, and give that of `x` to the one before."""
        gradient = None
        if not self._is_last:
            gradient = torch.empty_like(y, memory_format=torch.contiguous_format)
            comm.recv(gradient, self.number + 1, number, group=self._group)
        if y.requires_grad:  # the first stage may have nothing to learn
            y.backward(gradient)
        if self._taken is not None:
            self._send(torch.zeros_like(x) if x.grad is None else x.grad, self.number - 1, number)

    def _receive(self, piece: Piece, samples: int, number: int, like: Tensor) -> Tensor:
        x = torch.empty((samples, *piece.shape), dtype=piece.dtype, device=like.device)
        comm.recv(x, self.number - 1, number, group=self._group)
        return x.requires_grad_()

    def _send(self, x: Tensor, rank: int, number: int) -> None:
        """Begin to send: the other may have something else to do first."""
        self._under_way.append(comm.isend(x, rank, number, group=self._group))


def broadcast_stages(stages: Sequence[Sequence[Piece]], over: Ranks) -> None:
    """Give every rank the parameters and buffers of all stages, each from its own rank."""
    for rank, stage in enumerate(stages):
        for piece in stage:
            for tensor in (*piece.parameters.values(), *piece.buffers.values()):
                over.broadcast(tensor.data, src=rank)
