"""What hands a rank its batches, wherever the samples lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from .shards import Shard
from .tensors import Tensors

__all__ = ["Batch", "Feed", "ShardFeed"]


class Batch(NamedTuple):
    """A rank's part of one global batch, ready to compute with.

    Attributes
    ----------
    images
        n×…, normalised, float32 or the dtype asked for; n may be 0.
    labels
        int64, n.
    total
        Samples that all ranks take together at this step; n where each goes at its own pace.
    """

    images: torch.Tensor
    labels: torch.Tensor
    total: int


class Feed(Protocol):
    """A rank's batches, epoch by epoch. Every rank has one of its own.

    Attributes
    ----------
    steps
        Batches of an epoch, the same on all ranks; 0 when nobody can know beforehand.
    together
        Whether all ranks get equally many batches an epoch, so that they can step together.
    missing
        Samples of the last epoch that could not be read.
    """

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        ...

    @property
    def together(self) -> bool:
        """Whether all ranks get equally many."""
        ...

    @property
    def missing(self) -> int:
        """Samples of the last epoch that could not be read."""
        ...

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through epoch `number` (from 0), beginning with batch `first`."""
        ...


class ShardFeed:
    """A rank's part, equal or by weight, of samples in memory.

    Parameters
    ----------
    samples
        All samples, the same on every rank.
    shard
        Which of them this rank takes.
    dtype
        Floating-point type of the images; default: float32, or what they are where they were normalised before.
    """

    together = True
    missing = 0

    def __init__(self, samples: Tensors, shard: Shard, dtype: torch.dtype | None = None) -> None:
        self.samples = samples
        self.shard = shard
        self.dtype = dtype

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.shard.steps

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through epoch `number`, beginning with batch `first`."""
        for index, part in enumerate(self.shard.epoch(number)):
            if index >= first:
                yield Batch(*self.samples.batch(part.indices, self.dtype), part.total)
