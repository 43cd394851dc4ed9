"""Synchronous SGD: every rank takes its part of each batch, and all apply the same mean gradient.

First as one would write it down, a loop over the parameters; below, the training around it, which sends all gradients
at once (`labkit.train.flat`), or in pieces while backward computes the others (`labkit.train.overlap`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.data import Dataset, Part, Shard
from labkit.telemetry import facts

from .ddp import DDPGradients, check_backend
from .device import choose_device
from .flat import FlatGradients
from .history import History, versions
from .optimizers import SGD, Optimizer
from .overlap import OverlappedGradients
from .progress import Progress
from .recorder import Recorder
from .replicas import TrainError, agree, replica_differences, shapes
from .transport import MPITransport, Transport
from .validation import validate_shared
from .wishes import Wishes

__all__ = ["SYNCS", "choose_gradients", "sync_gradients", "sync_initial_weights", "synchronous"]

SYNCS = ("per_parameter", "fused", "overlap", "ddp")
"""Ways to reduce the gradients."""

Loss = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


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


def synchronous(
    model: nn.Module,
    dataset: Dataset,
    *,
    epochs: int = 1,
    batch_size: int = 64,
    lr: float = 1e-3,
    momentum: float = 0.85,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    sync: str = "fused",
    backend: str = "mpi",
    average: bool = True,
    initial_sync: bool = True,
    seed: int = 0,
    validate: bool = True,
    check_replicas: bool = True,
    progress: bool | Progress = True,
    device: torch.device | str | None = None,
    over: Transport | None = None,
) -> History:
    """Train `model` on all ranks together; all ranks call it alike.

    R ranks with batch size B take the same steps as one rank with R·B: each global batch holds the same
    samples, and a rank's gradient counts by how many of them the rank took.

    Parameters
    ----------
    model
        This rank's replica; changed in place and moved to `device`.
    dataset
        The same on all ranks; each takes its part.
    epochs
        How often to go through the training set.
    batch_size
        Samples of one rank at a step.
    lr, momentum
        Of the SGD optimizer; the defaults are those of the textbook example, small for MNIST.
    optimizer
        Makes another optimizer of the parameters: ``train.Adam``, or any of torch's such as
        ``lambda p: torch.optim.AdamW(p, lr=1e-3)``; `lr` and `momentum` are then not used.
    loss
        Takes a batch's output and labels, returns their mean loss; default: `torch.nn.functional.nll_loss`,
        for models that return log-probabilities.
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
    seed
        Of the shuffle and of each rank's dropout. The weights are the caller's: seed before making `model`.
    validate
        Test after each epoch, each rank on its part of the test set.
    check_replicas
        Compare all ranks' parameters after each epoch.
    progress
        Whether rank 0 prints one line an epoch (and in a notebook or on a terminal, how far it is), or what does.
    device
        Default: this rank's GPU where there is one, else the CPU.
    over
        What carries the gradients; default: MPI.

    Returns
    -------
    History
        Times and losses by step, results by epoch.

    Raises
    ------
    ValueError
        For a setting that makes no sense.
    TrainError
        On all ranks, when they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    _check(epochs, batch_size, lr, momentum, sync, dataset, model)
    if sync == "ddp":
        check_backend(backend)
    over = over or MPITransport()
    device = choose_device() if device is None else torch.device(device)
    model.to(device)
    train, test = dataset.train.to(device), dataset.test.to(device)
    dtype = next(model.parameters()).dtype
    criterion = loss or functional.nll_loss
    op = "mean" if average else "sum"
    optim = optimizer(model.parameters()) if optimizer else SGD(model.parameters(), lr, momentum)
    shard = Shard(len(train), over.rank, over.size, batch_size, seed)
    settings = {
        "model": shapes(model),
        "dataset": dataset.summary,
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": _in_words(optim),
        "loss": getattr(criterion, "__name__", type(criterion).__name__),
        "sync": sync,
        **({"backend": backend} if sync == "ddp" else {}),
        "average": average,
        "initial_sync": initial_sync,
        "seed": seed,
        "validate": validate,
        "check_replicas": check_replicas,
    }
    agree(over, settings)
    facts.record("model", shapes(model).split(" (")[0])
    facts.record("seed", f"{seed} (shuffle, dropout)")
    history = History(over.rank, over.size, settings, versions(over.name))
    history.settings |= {"source": dataset.source, "device": str(device)}
    told = (progress if isinstance(progress, Progress) else Progress()) if progress and over.rank == 0 else None
    wishes = Wishes(over, device, optim)
    recorder = Recorder(over, device, wishes.emitter)

    def forward_and_backward(part: Part) -> tuple[float, int]:
        """Leave this rank's part of the gradient in the model; return its mean loss and right answers."""
        if len(part.indices) == 0:
            return math.nan, 0
        images, labels = train.batch(part.indices)
        # A rank without a sample has no backward in which it could take part.
        everybody = part.total >= over.size
        forward = gradients.forward if isinstance(gradients, DDPGradients) and everybody else model
        output = forward(images.to(dtype))
        batch_loss = criterion(output, labels)
        # The mean over R ranks of these is the mean over samples; the weight is 1 in every full batch.
        weight = len(part.indices) * over.size / part.total
        (batch_loss if weight == 1 else batch_loss * weight).backward()
        if recorder.step == 0 and loss is None:
            _check_log_probabilities(output)
        return batch_loss.item(), int((output.argmax(1) == labels).sum())

    if initial_sync:
        sync_initial_weights(model, over)
    was_training = model.training
    gradients = choose_gradients(sync, model, over, op, backend)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Not the same dropout on all ranks: they would leave out the same units for all samples.
            torch.manual_seed(int(np.random.SeedSequence([seed, 1 + over.rank]).generate_state(1)[0]))
            for epoch in range(epochs):
                model.train()
                recorder.begin_epoch(epoch)
                for number, part in enumerate(shard.epoch(epoch), start=1):
                    with recorder.timed_step(part, optim) as result:
                        gradients.zero()
                        result.loss, result.right = forward_and_backward(part)
                        gradients.all_reduce(over, op)
                        optim.step()
                        # Here and not before the step: the ranks are together now, and waiting for the notebook's
                        # answer is part of the step's time.
                        stop = wishes.stop()
                    if told is not None:
                        told.step(epoch + 1, epochs, number, shard.steps, result.loss)
                    if stop:
                        history.stopped = f"stopped from the notebook after step {recorder.step}"
                        break
                row = recorder.end_epoch()
                if validate:
                    with recorder.timed_test(row):
                        row.test_loss, row.test_accuracy = validate_shared(model, test, criterion, over)
                if check_replicas:
                    differences = replica_differences(model, over)
                    row.replica_difference = max(differences)
                    if initial_sync and row.replica_difference and over.rank == 0:
                        _warn(differences)
                history.epochs.append(row)
                if told is not None:
                    line = row.line(epochs) + (f"  {history.stopped}" if history.stopped else "")
                    told.epoch(line)
                if history.stopped:
                    break
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"Training was interrupted after step {recorder.step}; the model keeps its weights.")
        raise
    finally:
        history.copies = gradients.copies
        gradients.release()
        model.train(was_training)
        wishes.close()
    history.steps = recorder.steps()
    return history


def choose_gradients(sync: str, model: nn.Module, over: Transport, op: str, backend: str = "mpi") -> Gradients:
    """Return `model`'s gradients as `synchronous` reduces them; all ranks call it alike."""
    if sync == "fused":
        return FlatGradients(model, over)
    if sync == "overlap":
        return OverlappedGradients(model, over, op)
    loop = LoopGradients(model)
    # One rank has nobody to reduce with.
    return DDPGradients(model, over, op, backend, loop) if sync == "ddp" and over.size > 1 else loop


def _check(
    epochs: int, batch_size: int, lr: float, momentum: float, sync: str, dataset: Dataset, model: nn.Module
) -> None:
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
    for name, value in (("lr", lr), ("momentum", momentum)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
    if sync not in SYNCS:
        raise ValueError(f'sync must be "per_parameter", "fused", "overlap" or "ddp", not {sync!r}')
    if len(dataset.train) == 0:
        raise ValueError("the data set has no training samples")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")


def _check_log_probabilities(output: Tensor) -> None:
    """Refuse what nll_loss would take for log-probabilities: its minimum is then minus infinity."""
    if output.ndim != 2 or not torch.allclose(output.detach().logsumexp(1), output.new_zeros(()), atol=1e-2):
        raise TrainError(
            "the model does not return log-probabilities, which nll_loss needs: end its forward with "
            "log_softmax(x, dim=1), or give loss=torch.nn.functional.cross_entropy"
        )


def _in_words(optim: Optimizer) -> str:
    shown = ("lr", "momentum", "betas", "weight_decay", "nesterov")
    settings = ", ".join(f"{name}={optim.defaults[name]}" for name in shown if optim.defaults.get(name))
    return f"{type(optim).__name__}({settings})"


def _warn(differences: list[float]) -> None:
    apart = ", ".join(f"rank {rank} by {value:g}" for rank, value in enumerate(differences) if value)
    warnings.warn(
        f"the replicas are no longer equal: {apart} from rank 0. Something changed the weights outside the "
        "training loop, or the ranks computed different sums.",
        stacklevel=3,
    )
