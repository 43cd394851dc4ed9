"""The batch size as large as serves: beyond it a larger one gains little, or does not fit into memory."""

from __future__ import annotations

import copy
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm
from labkit.data import Dataset, DatasetLike, Files, Tensors, as_dataset

from .device import choose_device
from .optimizers import SGD, Optimizer
from .replicas import TrainError, agree
from .settings import Settings
from .transport import MPITransport, Transport

__all__ = ["BatchSize", "Tried", "choose_batch_size", "find_batch_size"]

FIRST = 8
STEP_TRIES, SIZE_S = 9, 0.5
"""Steps that are measured for each size, and seconds after which there are no more than the least."""
LEAST_TRIES = 3
BACKWARD = 2.0
"""Memory of a step by what forward keeps for backward: as much again for the gradients of it."""


@dataclass(frozen=True)
class Tried:
    """One batch size: images a second of the slowest rank, and the memory that one rank's step takes, 10⁶ bytes.

    `images_per_s` is NaN where it did not fit.
    """

    batch_size: int
    images_per_s: float
    memory_mb: float


@dataclass(frozen=True)
class BatchSize:
    """What was found: the value, why no larger one, and all that were tried."""

    value: int
    reason: str
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        lines = [f"{each.batch_size:8}{each.images_per_s:12,.0f}{each.memory_mb:12,.1f}" for each in self.tried]
        head = f"{'batch':>8}{'images/s':>12}{'MB':>12}"
        return "\n".join([f"batch size {self.value}: {self.reason}", head, *lines])


def find_batch_size(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    gain: float = 0.05,
    memory_share: float = 0.5,
    largest: int | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    device: torch.device | str | None = None,
    over: Transport | comm.Communicator | None = None,
) -> BatchSize:
    """Double the batch size as long as it pays; all ranks call it alike, and all get the same.

    Steps are made with a copy of the model, without communication, and measured on all ranks at once. The model and
    the random numbers stay as they are.

    Parameters
    ----------
    model, dataset
        As for training.
    gain
        How much more images a second twice the size must bring; 0.05 is 5 %.
    memory_share
        How much of the memory that is free a step may take, on each host by all its ranks together.
    largest
        No larger one is tried; default: what lets each rank have one full batch an epoch.
    loss, optimizer, device, over
        As of `labkit.train.Settings`.

    Returns
    -------
    BatchSize
        Samples of one rank at a step, and what was tried.

    Raises
    ------
    TrainError
        On all ranks, if not even the smallest size fits.
    ValueError
        For a setting that makes no sense.
    """
    if not (math.isfinite(gain) and gain >= 0 and 0 < memory_share <= 1):
        raise ValueError(f"gain must be at least 0 and memory_share in 0…1, not {gain!r} and {memory_share!r}")
    carrier = MPITransport(over) if over is None or isinstance(over, comm.Communicator) else over
    where = choose_device() if device is None else torch.device(device)
    dataset = as_dataset(dataset)
    limit = min(largest or dataset.samples, max(1, dataset.samples // carrier.size))
    allowed = _allowed_bytes(carrier, where, memory_share)
    tried: list[Tried] = []
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        twin = copy.deepcopy(model).to(where).train()
        optim = optimizer(twin.parameters()) if optimizer else SGD(twin.parameters(), lr=1e-3)
        trial = _Trial(twin, dataset.examples(), loss or functional.nll_loss, optim, where)
        size = min(FIRST, limit)
        reason = ""
        while not reason:
            last = tried[-1] if tried else None
            expected = 2 * 1e6 * last.memory_mb if last else 0.0
            mine = trial.run(size, allowed) if expected <= allowed else None
            everybody = carrier.all_gather_object(mine)
            ranks_without = [rank for rank, each in enumerate(everybody) if each is None]
            if ranks_without:
                tried.append(Tried(size, math.nan, expected / 1e6))
                reason = f"{size} does not fit into the memory of rank {', '.join(map(str, ranks_without))}"
                break
            now = Tried(size, size / max(s for s, _ in everybody), max(b for _, b in everybody) / 1e6)
            tried.append(now)
            if last and now.images_per_s < last.images_per_s * (1 + gain):
                reason = (
                    f"{size} brings {now.images_per_s / last.images_per_s - 1:.1%} more images/s, less than {gain:.0%}"
                )
            elif size == limit:
                return BatchSize(size, "no larger one was to be tried, or the data set has no more", tuple(tried))
            size = min(2 * size, limit)
    if len(tried) < 2:
        raise TrainError(f"{reason}: the model needs too much memory for any batch size")
    return BatchSize(tried[-2].batch_size, reason, tuple(tried))


def choose_batch_size(
    settings: Settings, model: nn.Module, dataset: Dataset | Files, device: torch.device, over: Transport
) -> int:
    """Return the batch size in the settings, found out if they say so."""
    agree(over, {"batch_size": settings.batch_size})  # before some measure, and others do not
    if isinstance(settings.batch_size, int):
        return settings.batch_size
    optimizer, loss = settings.make_optimizer, settings.criterion
    return find_batch_size(model, dataset, loss=loss, optimizer=optimizer, device=device, over=over).value


class _Trial:
    """Steps of a model that nobody needs afterwards."""

    def __init__(
        self,
        model: nn.Module,
        samples: Tensors,
        loss: Callable[[Tensor, Tensor], Tensor],
        optim: Optimizer,
        device: torch.device,
    ) -> None:
        self._model, self._samples, self._loss = model, samples, loss
        self._optim, self._device = optim, device
        self._dtype = next(model.parameters()).dtype

    def run(self, size: int, allowed: float) -> tuple[float, float] | None:
        """Return seconds and bytes of a step with `size` samples; None where they do not fit into `allowed` bytes."""
        try:
            images, labels = self._samples.batch(torch.arange(size) % len(self._samples))
            images, labels = images.to(self._device, self._dtype), labels.to(self._device)
            kept = Kept(self._model)
            with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
                loss = self._loss(self._model(images), labels)
            needed = BACKWARD * kept.bytes + images.numel() * images.element_size()
            if needed > allowed:
                return None
            loss.backward()
            del loss
            return self._seconds(images, labels), needed
        except torch.OutOfMemoryError:
            return None
        finally:
            self._model.zero_grad()

    def _seconds(self, images: Tensor, labels: Tensor) -> float:
        taken: list[float] = []
        while len(taken) < LEAST_TRIES or (len(taken) < STEP_TRIES and sum(taken) < SIZE_S):
            begun = time.perf_counter()
            self._model.zero_grad()
            self._loss(self._model(images), labels).backward()
            self._optim.step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)


class Kept:
    """Adds up the tensors that forward keeps for backward, each piece of memory once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._seen: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """So many so far."""
        return sum(self._seen.values())

    def keep(self, tensor: Tensor) -> Tensor:
        """Count `tensor`, and return it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor


def _allowed_bytes(over: Transport, device: torch.device, memory_share: float) -> float:
    """What a step of this rank may take: its part of the share of what is free on its host, or its GPU."""
    place = f"{socket.gethostname()} {device}"
    sharing = over.all_gather_object(place).count(place)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return memory_share * free / sharing
