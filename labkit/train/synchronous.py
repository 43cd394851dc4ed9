"""Synchronous SGD: every rank takes its part of each batch, and all apply the same mean gradient.

First as one would write it down, a loop over the parameters; below, the training, which sends all gradients
at once (`labkit.train.flat`), or in pieces while backward computes the others (`labkit.train.overlap`).
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import nn

from labkit.data import Batch, DatasetLike

from .ddp import DDPGradients, check_backend
from .flat import FlatGradients
from .history import EpochRow, History
from .loop import Run
from .methods import method
from .overlap import OverlappedGradients
from .replicas import replica_differences
from .settings import SettingError, Settings
from .transport import MPITransport, Transport

__all__ = ["SYNCS", "choose_gradients", "sync_gradients", "sync_initial_weights", "synchronous"]

SYNCS = ("per_parameter", "fused", "overlap", "ddp")
"""Ways to reduce the gradients."""


def sync_initial_weights(model: nn.Module, over: Transport | None = None) -> None:
    """Rank 0 sends its weights to all other ranks, one tensor after the other.

    Parameters
    ----------
    model
        The replica; on ranks other than 0 its parameters and buffers are overwritten.
    over
        What carries them; default: MPI.
    """
    over = over or MPITransport()
    for tensor in (*model.parameters(), *model.buffers()):
        if over.rank == 0:
            for sibling in range(1, over.size):
                over.send(tensor.data, dst=sibling)
        else:
            over.recv(tensor.data, src=0)


def sync_gradients(model: nn.Module, op: str = "mean", over: Transport | None = None) -> None:
    """Replace each parameter's gradient by that of all ranks, one all-reduce a parameter.

    Parameters
    ----------
    model
        The replica, after ``backward()``.
    op
        ``"mean"``, or ``"sum"``: a sum over R ranks is R means, as if the learning rate were R times larger.
    over
        What carries them; default: MPI.
    """
    over = over or MPITransport()
    for param in model.parameters():
        if param.requires_grad:
            if param.grad is None:  # a rank without a sample takes part all the same
                param.grad = torch.zeros_like(param)
            over.all_reduce(param.grad, op)


class LoopGradients:
    """`sync_gradients` in the shape of `FlatGradients`, so that training can use either."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = 0

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self.model.zero_grad()

    def all_reduce(self, over: Transport, op: str) -> None:
        """Replace all gradients by the ranks' mean or sum."""
        sync_gradients(self.model, op, over)

    def release(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad()


class Gradients(Protocol):
    """What a step asks of a way to reduce gradients."""

    copies: int

    def zero(self) -> None:
        """Forget those of the last step."""
        ...

    def all_reduce(self, over: Transport, op: str) -> None:
        """After backward: see that the parameters have the ranks' gradients."""
        ...

    def release(self) -> None:
        """Leave the model as it was, without gradients."""
        ...


@method("synchronous")
def synchronous(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    sync: str = "fused",
    backend: str = "mpi",
    average: bool = True,
    initial_sync: bool = True,
    check_replicas: bool = True,
    **settings: Any,
) -> History:
    """Train `model` on all ranks together; all ranks call it alike.

    R ranks with batch size B take the same steps as one rank with R·B: each global batch holds the same
    samples, and a rank's gradient counts by how many of them the rank took.

    Parameters
    ----------
    model
        This rank's replica; changed in place and moved to the device.
    dataset
        The same on all ranks; each takes its part.
    sync
        ``"fused"``: one all-reduce for all gradients; ``"overlap"``: in several, while backward computes the other
        gradients; ``"per_parameter"``: `sync_gradients`; ``"ddp"``: torch's DistributedDataParallel.
    backend
        What carries the gradients of ``"ddp"``: ``"mpi"``, ``"gloo"`` or ``"nccl"``. The history counts its time as
        computing where it is not labkit's.
    average
        Apply the ranks' mean gradient; False: their sum, as if the learning rate were R times larger.
    initial_sync
        Begin with rank 0's weights on all ranks. Without it the replicas differ from the first step on.
    check_replicas
        Compare all ranks' parameters after each epoch.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` and the others of `labkit.train.Settings`.

    Returns
    -------
    History
        Times and losses by step, results by epoch.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    common = Settings.of("synchronous", settings, ("sync", "backend", "average", "initial_sync", "check_replicas"))
    if sync not in SYNCS:
        raise SettingError(f'sync must be "per_parameter", "fused", "overlap" or "ddp", not {sync!r}')
    if sync == "ddp":
        check_backend(backend)
    own = {
        "sync": sync,
        **({"backend": backend} if sync == "ddp" else {}),
        "average": average,
        "initial_sync": initial_sync,
        "check_replicas": check_replicas,
    }
    op = "mean" if average else "sum"
    with Run("synchronous", model, dataset, common, own) as run:
        over = run.over
        if initial_sync:
            sync_initial_weights(model, over)
        gradients = choose_gradients(sync, model, over, op, backend)

        def step(batch: Batch) -> tuple[float, int]:
            gradients.zero()
            forward = gradients.forward if isinstance(gradients, DDPGradients) else model
            # The mean over R ranks of these is the mean over samples; the weight is 1 in every full batch.
            weight = len(batch.labels) * over.size / batch.total
            done = run.forward_and_backward(batch, forward, weight)
            if isinstance(gradients, DDPGradients) and not len(batch.labels):
                gradients.without_samples(batch.images.to(run.dtype))
            gradients.all_reduce(over, op)
            run.optim.step()
            return done

        def compare(row: EpochRow) -> None:
            differences = replica_differences(model, over)
            row.replica_difference = max(differences)
            if initial_sync and row.replica_difference and over.rank == 0:
                _warn(differences)

        try:
            run.in_step(step, after_epoch=compare if check_replicas else None)
        finally:
            run.history.copies = gradients.copies
            gradients.release()
    return run.history


def choose_gradients(sync: str, model: nn.Module, over: Transport, op: str, backend: str = "mpi") -> Gradients:
    """Return `model`'s gradients as `synchronous` reduces them; all ranks call it alike."""
    if sync == "fused":
        return FlatGradients(model, over)
    if sync == "overlap":
        return OverlappedGradients(model, over, op)
    # One rank has nobody to reduce with.
    return DDPGradients(model, over, op, backend) if sync == "ddp" and over.size > 1 else LoopGradients(model)


def _warn(differences: list[float]) -> None:
    apart = ", ".join(f"rank {rank} by {value:g}" for rank, value in enumerate(differences) if value)
    warnings.warn(
        f"the replicas are no longer equal: {apart} from rank 0. Something changed the weights outside the "
        "training loop, or the ranks computed different sums.",
        stacklevel=3,
    )
