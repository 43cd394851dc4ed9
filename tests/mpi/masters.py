"""A small model and noise to train it on, for what is said of methods with a master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm
from labkit.data import Dataset, from_tensors
from labkit.train import History

WITH_MASTER = ("downpour", "easgd", "gem", "backup_workers")
QUIET: dict[str, Any] = {"progress": False, "device": "cpu", "batch_size": 8}
several = pytest.mark.skipif(comm.size < 3, reason="a master and two workers are 3 ranks")
five = pytest.mark.skipif(comm.size < 5, reason="two masters with a worker each, under another, are 5 ranks")


class Small(nn.Module):
    """Small, so that a hundred steps take no time; double, so that sums in another order are equal."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(49, 12), nn.Linear(12, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(x, 4).flatten(1)
        return functional.log_softmax(self.last(torch.tanh(self.first(x))), dim=1)


class WithNorm(Small):
    """Counts its inputs' mean by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def noise(n: int) -> Dataset:
    """`n` training and 37 test images, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (n + 37, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n + 37,), generator=generator)
    return from_tensors(images[:n], labels[:n], images[n:], labels[n:])


def farthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def samples_of_all(history: History) -> int:
    return sum(comm.all_gather_object(int(history.steps.samples.sum())))


def alike(history: History) -> None:
    """All ranks have the same epochs; each has figures of its own in them."""
    rows = [(r.epoch, r.steps, r.loss, r.accuracy, r.test_loss, r.test_accuracy, r.time_s) for r in history.epochs]
    assert len(set(comm.all_gather_object(repr((rows, history.stopped))))) == 1
