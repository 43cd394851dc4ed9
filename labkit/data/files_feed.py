"""Whole files spread over the ranks, and a rank's batches of its own files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .errors import DataError
from .feeds import Batch
from .prefetch import read_ahead
from .shards import check_weights, share, shuffled
from .tensors import Tensors

__all__ = ["FilesFeed", "Plan", "spread"]

log = logging.getLogger("labkit.data")


def spread(samples: Sequence[int], size: int, weights: Sequence[float] | None = None) -> list[list[int]]:
    """Return for each of `size` ranks the numbers of its files.

    The largest file goes first, each to the rank that then has the least for its weight (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best possible, for equal weights).

    Examples
    --------
    >>> spread([50, 30, 20, 20], size=2)
    [[0, 3], [1, 2]]
    >>> spread([50, 30, 20, 20], size=2, weights=(3, 1))
    [[0, 1, 3], [2]]
    """
    weights = [1.0] * size if weights is None else weights
    mine: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for file in sorted(range(len(samples)), key=lambda file: -samples[file]):
        rank = min(range(size), key=lambda rank: (load[rank] + samples[file]) / weights[rank])
        mine[rank].append(file)
        load[rank] += samples[file]
    return [sorted(files) for files in mine]


class Plan:
    """Which files each rank reads and how many samples it takes at a step; the same on all ranks.

    Parameters
    ----------
    samples
        Of each file.
    size
        Ranks.
    batch_size
        Samples of a rank at a step. By weights: of the mean rank, so that one with twice the samples takes twice as
        many at a step.
    weights
        One number a rank; default: all alike.

    Attributes
    ----------
    files
        By rank: the numbers of its files.
    samples
        By rank: its samples in all.
    batches
        By rank: its samples at a step.
    steps
        Steps of an epoch: those of the rank that needs most.

    Examples
    --------
    >>> plan = Plan([50, 30, 20, 20], size=2, batch_size=20)
    >>> plan.samples, plan.steps, [plan.total(step) for step in range(plan.steps)]
    ([70, 50], 4, [40, 40, 30, 10])
    """

    def __init__(
        self, samples: Sequence[int], size: int, batch_size: int, weights: Sequence[float] | None = None
    ) -> None:
        if size < 1:
            raise DataError(f"there must be at least one rank, not {size}")
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, not {batch_size}")
        if weights is not None:
            check_weights(weights, size)
        self.files = spread(samples, size, weights)
        self.samples = [sum(samples[file] for file in mine) for mine in self.files]
        parts = [share(size * batch_size, rank, size, weights) for rank in range(size)]
        self.batches = [max(1, last - first) for first, last in parts]
        self.steps = max(-(-n // batch) for n, batch in zip(self.samples, self.batches, strict=True))

    def total(self, step: int) -> int:
        """Return the samples that all ranks take together at `step`."""
        pairs = zip(self.samples, self.batches, strict=True)
        return sum(min(batch, max(0, n - step * batch)) for n, batch in pairs)


class Span(NamedTuple):
    """A file and which of a rank's samples it has in an epoch, counted in the order in which they come."""

    file: int
    start: int
    stop: int


class FilesFeed:
    """A rank's batches of its own files, which never leave it.

    Each epoch has an order of files and, within each file, of samples of its own; batches go over the files' borders.
    The next file is read while the current one trains. A rank that has fewer samples than another has empty batches at
    the end, so that all make equally many steps.

    Parameters
    ----------
    plan
        Which rank reads what.
    samples
        Of each file.
    rank
        This rank.
    load
        Takes a file's number, returns its samples; a `DataError` in their place is told, and its samples are missing
        from their batches from then on. The other ranks don't know of it: the steps stay as planned, and so does each
        `Batch.total`. Called in a thread of its own.
    empty
        No samples, in the shape of the others.
    seed
        Of the shuffle; the same on all ranks.
    dtype
        Floating-point type of the images; default: float32, or what they are where they were normalised before.

    Attributes
    ----------
    damaged
        The files that this rank could not read: by number, what is wrong with each.
    """

    together = True

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[int],
        rank: int,
        load: Callable[[int], Tensors | DataError],
        empty: Tensors,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= rank < len(plan.files):
            raise DataError(f"there is no rank {rank} among {len(plan.files)} ranks (0…{len(plan.files) - 1})")
        if seed < 0:
            raise DataError(f"the seed must be at least 0, not {seed}")
        self.damaged: dict[int, DataError] = {}
        self._plan = plan
        self._samples = samples
        self._rank = rank
        self._load = load
        self._empty = empty
        self._seed = seed
        self._dtype = dtype
        if not plan.files[rank]:
            log.warning("rank %d has no file of the %d: it trains on nothing; make more files", rank, len(samples))

    @property
    def steps(self) -> int:
        """Batches of an epoch, the empty ones included."""
        return self._plan.steps

    @property
    def missing(self) -> int:
        """Samples of the files that this rank could not read."""
        return sum(self._samples[file] for file in self.damaged)

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through epoch `number`, beginning with batch `first`; files before it are not read.

        Raises
        ------
        DataError
            When a file cannot be read and `load` raised it.
        """
        batch = self._plan.batches[self._rank]
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        step = first
        for ends, *piece in self._pieces(number, first * batch, batch):
            pieces.append((piece[0], piece[1]))
            if ends:
                yield self._joined(pieces, step)
                step, pieces = step + 1, []
        while step < self.steps:
            yield self._joined([], step)
            step += 1

    def _joined(self, pieces: list[tuple[torch.Tensor, torch.Tensor]], step: int) -> Batch:
        if not pieces:
            return Batch(*self._empty.batch(slice(0), self._dtype), self._plan.total(step))
        if len(pieces) == 1:
            return Batch(*pieces[0], self._plan.total(step))
        images, labels = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return Batch(images, labels, self._plan.total(step))

    def _pieces(self, number: int, begin: int, batch: int) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
        """Cut this rank's samples, from position `begin` on, where a batch or a file ends.

        Positions count the samples of damaged files, too, so that no batch depends on what was damaged before it.
        Yields whether a batch ends, images and labels.
        """
        end = self._plan.samples[self._rank]
        wanted = (span for span in self._spans(number) if span.stop > begin)
        at = begin
        for span, samples in read_ahead(lambda: next(wanted, None), self._read):
            if isinstance(samples, DataError):
                self._tell(span, samples)
                samples = self._empty
            order = shuffled(span.stop - span.start, self._seed, number, 1 + span.file)
            while at < span.stop:
                upto = min(span.stop, at + batch - at % batch)
                chosen = order[at - span.start : upto - span.start] if len(samples) else slice(0)
                yield upto % batch == 0 or upto == end, *samples.batch(chosen, self._dtype)
                at = upto
            del samples  # before the next but one is read into memory

    def _spans(self, number: int) -> Iterator[Span]:
        """Go through this rank's files in the order of epoch `number`."""
        mine = self._plan.files[self._rank]
        at = 0
        for place in shuffled(len(mine), self._seed, number, 0, 1 + self._rank).tolist():
            file = mine[place]
            yield Span(file, at, at + self._samples[file])
            at += self._samples[file]

    def _read(self, span: Span) -> tuple[Span, Tensors | DataError]:
        return span, self.damaged.get(span.file) or self._load(span.file)

    def _tell(self, span: Span, error: DataError) -> None:
        if span.file not in self.damaged:
            self.damaged[span.file] = error
            log.warning(
                "rank %d leaves out %s samples, their batches are empty or smaller: %s",
                self._rank,
                f"{span.stop - span.start:,}",
                error,
            )
