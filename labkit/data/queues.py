"""Pieces of a data set handed out one by one: whoever is quicker takes more of them.

The master keeps the `WorkQueue`; each worker has a `QueueFeed`, which asks it. How the question gets there is the
training method's business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from .errors import DataError
from .feeds import Batch
from .prefetch import read_ahead
from .shards import share, shuffled
from .tensors import Tensors

__all__ = ["QueueFeed", "WorkQueue"]

log = logging.getLogger("labkit.data")


class WorkQueue:
    """Which pieces are still to be had; kept by the master. The workers need not be in the same epoch.

    Parameters
    ----------
    pieces
        Files, or chunks of a data set in memory, numbered from 0.
    seed
        Seed of the order in which they are handed out, another one each epoch.

    Examples
    --------
    >>> queue = WorkQueue(pieces=2)
    >>> sorted([queue.next(epoch=0), queue.next(epoch=0)]), queue.next(epoch=0)
    ([0, 1], None)
    """

    def __init__(self, pieces: int, seed: int = 0) -> None:
        if pieces < 1:
            raise DataError(f"a queue needs at least one piece to hand out, not {pieces}")
        if seed < 0:
            raise DataError(f"the seed must be at least 0, not {seed}")
        self._pieces = pieces
        self._seed = seed
        self._left: dict[int, deque[int]] = {}  # by epoch

    def next(self, epoch: int) -> int | None:
        """Return the number of the piece that whoever asks shall take next in `epoch`; None when none is left."""
        if epoch not in self._left:
            self._left[epoch] = deque(shuffled(self._pieces, self._seed, epoch, 0).tolist())
        left = self._left[epoch]
        return left.popleft() if left else None


class QueueFeed:
    """A worker's batches, of the pieces that the master hands it; each piece is shuffled.

    Each worker goes at its own pace. While it trains on one piece, the next is read. The last batch of a piece may be
    smaller than the others.

    Parameters
    ----------
    ask
        Takes the epoch, asks the master and returns its answer: a piece's number, or None when none is left. Called in
        the thread that iterates.
    load
        Takes epoch and piece, returns the samples; a `DataError` in their place is told and the piece left out.
        Called in a thread of its own.
    batch_size
        Samples of a batch.
    seed
        Of the shuffle.
    dtype
        Floating-point type of the images; default: float32, or what they are where they were normalised before.
    part
        Where several ranks are one worker and are handed the same pieces: this rank's number among them, and how many
        they are. Each then takes its part of each batch of all of them, `batch_size` samples a rank.
    sizes
        Samples of each piece, to count those that could not be read.

    Attributes
    ----------
    missing
        This rank's part of the last epoch's samples that could not be read.
    """

    together = False
    steps = 0

    def __init__(
        self,
        ask: Callable[[int], int | None],
        load: Callable[[int, int], Tensors | DataError],
        batch_size: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        part: tuple[int, int] = (0, 1),
        sizes: Sequence[int] = (),
    ) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, not {batch_size}")
        self._ask = ask
        self._load = load
        self._batch_size = batch_size
        self._seed = seed
        self._dtype = dtype
        self._part = part
        self._sizes = sizes
        self.missing = 0

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through what the master hands out in epoch `number`.

        Raises
        ------
        DataError
            When `first` is not 0: who takes which piece is never twice the same, so that there is no batch to go on
            from.
        """
        if first:
            raise DataError("an epoch that a queue hands out can only be begun anew, not in its middle")
        return self._batches(number)

    def _batches(self, number: int) -> Iterator[Batch]:
        def load(piece: int) -> tuple[int, Tensors | DataError]:
            return piece, self._load(number, piece)

        self.missing = 0
        together = self._batch_size * self._part[1]
        for piece, samples in read_ahead(lambda: self._ask(number), load):
            if isinstance(samples, DataError):
                log.warning("left out: %s", samples)
                first, last = share(self._sizes[piece] if self._sizes else 0, *self._part)
                self.missing += last - first
                continue
            for indices in shuffled(len(samples), self._seed, number, 1 + piece).split(together):
                first, last = share(len(indices), *self._part)
                yield Batch(*samples.batch(indices[first:last], self._dtype), len(indices))
            del samples  # before the next is asked for, and read into memory
