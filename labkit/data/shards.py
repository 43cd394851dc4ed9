"""Which samples each rank takes at each step.

All ranks shuffle alike and each takes its part of every global batch. So R ranks with batch B see, step by
step, exactly the samples one rank with batch R·B sees; all make equally many steps (a rank that made one
step more would wait in its all-reduce for ever); and each sample comes once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch

from .errors import DataError

__all__ = ["Part", "Shard", "check_weights", "share", "shuffled"]


class Part(NamedTuple):
    """A rank's part of one global batch.

    Attributes
    ----------
    indices
        int64; which samples this rank takes, possibly none in the last step.
    total
        Samples that all ranks take together. The mean gradient weighs a rank by ``len(indices) / total``.
    """

    indices: torch.Tensor
    total: int


@dataclass(frozen=True)
class Shard:
    """One rank's share of `n` samples.

    Parameters
    ----------
    n
        Samples in the data set.
    rank, size
        This rank, and how many there are.
    batch_size
        Samples a rank takes at a step: the global batch has ``size * batch_size``.
    seed
        Seed of the shuffle; the same on all ranks.
    global_batch
        Samples that all ranks take together at a step; default: ``size * batch_size``. Given where the steps of an
        epoch must stay the same although ranks come and go.
    weights
        One number a rank: a rank with weight 2 takes twice the samples of each global batch that a rank with
        weight 1 takes. Default: all alike.

    Raises
    ------
    DataError
        For numbers that make no sense.

    Examples
    --------
    >>> shard = Shard(n=10, rank=1, size=2, batch_size=3)
    >>> shard.steps, [(len(part.indices), part.total) for part in shard.epoch(0)]
    (2, [(3, 6), (2, 4)])
    """

    n: int
    rank: int
    size: int
    batch_size: int
    seed: int = 0
    global_batch: int | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.n < 0:
            raise DataError(f"a data set cannot have {self.n} samples")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise DataError(f"there is no rank {self.rank} among {self.size} ranks (0…{self.size - 1})")
        if self.batch_size < 1:
            raise DataError(f"the batch size must be at least 1, not {self.batch_size}")
        if self.global_batch is not None and self.global_batch < 1:
            raise DataError(f"the global batch must have at least 1 sample, not {self.global_batch}")
        if self.seed < 0:
            raise DataError(f"the seed must be at least 0, not {self.seed}")
        if self.weights is not None:
            check_weights(self.weights, self.size)

    @property
    def together(self) -> int:
        """Samples that all ranks take together at a step, but for the last."""
        return self.global_batch or self.size * self.batch_size

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same on every rank: n / (size · batch_size), rounded up."""
        return -(-self.n // self.together)

    def epoch(self, number: int) -> Iterator[Part]:
        """Go through epoch `number` (from 0), shuffled in an order of its own."""
        for batch in shuffled(self.n, self.seed, number).split(self.together):
            first, last = share(len(batch), self.rank, self.size, self.weights)
            if len(batch):  # an empty data set is split into one empty batch
                yield Part(batch[first:last], len(batch))


def share(n: int, rank: int, size: int, weights: Sequence[float] | None = None) -> tuple[int, int]:
    """Return [first, last) of rank's part of `n` things, cut as evenly as possible, or by `weights`.

    Examples
    --------
    >>> [share(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    >>> [share(10, rank, 3, weights=(2, 1, 1)) for rank in range(3)]
    [(0, 5), (5, 7), (7, 10)]
    """
    if weights is None:
        return rank * n // size, (rank + 1) * n // size
    # Exact: by floating-point sums two neighbours could disagree where one ends and the other begins.
    exact = [Fraction(weight) for weight in weights]
    whole, before = sum(exact), sum(exact[:rank])
    return math.floor(n * before / whole), math.floor(n * (before + exact[rank]) / whole)


def check_weights(weights: Sequence[float], size: int | None = None) -> tuple[float, ...]:
    """Return `weights` as they are kept: one finite number above 0 for each of `size` ranks (None: however many).

    Raises
    ------
    DataError
        When they are not.
    """
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight < math.inf:
            raise DataError(f"each weight must be a finite number above 0, not {weight!r}")
    expected = max(1, len(weights)) if size is None else size
    if len(weights) != expected:
        raise DataError(f"{len(weights)} weights were given, and {expected} ranks compute: give one a rank")
    return tuple(float(weight) for weight in weights)


def shuffled(n: int, *key: int) -> torch.Tensor:
    """Return 0…n−1 in an order drawn by `key`: seed, epoch and whatever else; the same wherever it is drawn."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.randperm(n, generator=torch.Generator().manual_seed(int(state[0])))
