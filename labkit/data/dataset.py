"""A training and a test set in memory, and how the ranks share the training set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .errors import DataError
from .feeds import ShardFeed
from .queues import QueueFeed, WorkQueue
from .shards import Shard, check_weights, shuffled
from .tensors import Tensors, dims

__all__ = ["CHUNK", "Dataset"]

CHUNK = 1000
"""Samples that a queue hands out at a time: some ten batches, so that asking for them costs nothing to speak of."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set.

    Attributes
    ----------
    name
        As `load` takes it.
    train, test
        The two sets.
    classes
        Name of each class, in the order of the labels.
    source
        Where the images came from, in words.
    weights
        How much of the training set each rank takes, see `weighted`; None: all alike.
    chunk
        Samples that a master hands out at a time, see `queued`; None: each rank has its part beforehand.
    tested_on
        What `test` is in words; ``"validation"`` after `split`.
    """

    name: str
    train: Tensors
    test: Tensors
    classes: tuple[str, ...]
    source: str
    weights: tuple[float, ...] | None = None
    chunk: int | None = None
    tested_on: str = "test"

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(
                f"training images are {dims(self.train.images.shape[1:])}, "
                f"{self.tested_on} images {dims(self.test.images.shape[1:])}: both must have one shape"
            )
        for part, name in ((self.train, "training"), (self.test, self.tested_on)):
            highest = int(part.labels.max()) if len(part) else 0
            if highest >= len(self.classes):
                raise DataError(
                    f"the {name} labels go up to {highest}, but there are {len(self.classes)} classes "
                    f"(0…{len(self.classes) - 1}): name more classes, or number the labels from 0"
                )

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train)

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        """Height of an image in pixels."""
        return self.train.images.shape[2]

    @property
    def by_queue(self) -> bool:
        """Whether a master hands the samples out, to whoever asks."""
        return self.chunk is not None

    @property
    def summary(self) -> str:
        """Name, sizes and shape in one line, without the source: the same on all ranks."""
        shared = f", weights {':'.join(f'{w:g}' for w in self.weights)}" if self.weights else ""
        queued = f", handed out {self.chunk:,} at a time" if self.chunk else ""
        return (
            f"{self.name}: {len(self.train):,} training and {len(self.test):,} {self.tested_on} images, "
            f"{dims(self.train.images.shape[1:])}, {len(self.classes)} classes{shared}{queued}"
        )

    def examples(self) -> Tensors:
        """Return samples to try a model with: the training set."""
        return self.train

    def feed(
        self,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> ShardFeed:
        """Return the batches of one of the ranks that compute.

        Parameters
        ----------
        rank, size
            Which one, among how many: those that compute, without a master.
        batch_size
            Samples of a rank at a step.
        seed
            Of the shuffle; the same on all ranks.
        device
            Where the batches are made; the whole training set is moved there.
        dtype
            Floating-point type of the images; default: float32, or what they are where they were normalised before.
        weights
            As in `weighted`; default: the data set's own.

        Raises
        ------
        DataError
            For numbers that make no sense, or when a master is to hand the samples out.
        """
        if self.by_queue:
            raise DataError(
                f"{self.name} is handed out by a queue, which needs a training method with a master; "
                "give this one the data set without queued()"
            )
        own = self.weights if weights is None else check_weights(weights, size)
        shard = Shard(len(self.train), rank, size, batch_size, seed, weights=own)
        return ShardFeed(self.train.to(device), shard, dtype)

    def weighted(self, weights: Sequence[float]) -> Dataset:
        """Return the same data set, of which each rank takes a part by its weight.

        Parameters
        ----------
        weights
            One number a rank: with ``(2, 1)`` rank 0 takes two of every three samples. All ranks still make equally
            many steps, so that a quicker rank need not wait for a slower one.
        """
        return replace(self, weights=check_weights(weights), chunk=None)

    def queued(self, chunk: int = CHUNK) -> Dataset:
        """Return the same data set, handed out by a master `chunk` samples at a time, to whoever asks.

        A quicker rank asks more often. For training methods with a master.
        """
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise DataError(f"chunk must be a number of samples, at least 1, not {chunk!r}")
        return replace(self, weights=None, chunk=chunk)

    def work_queue(self, seed: int = 0) -> WorkQueue:
        """Return the master's queue of a data set that is `queued`."""
        return WorkQueue(-(-len(self.train) // self._chunk()), seed)

    def queue_feed(
        self,
        ask: Callable[[int], int | None],
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> QueueFeed:
        """Return the batches of a worker, which asks the master for its samples.

        Parameters
        ----------
        ask
            Takes the epoch, sends it to the master, where `WorkQueue.next` answers, and returns the answer.
        batch_size, seed, device, dtype
            As for `feed`; the seed is the same on all ranks.
        part
            As for `QueueFeed`.
        """
        chunk, train = self._chunk(), self.train.to(device)
        orders: dict[int, torch.Tensor] = {}

        def load(epoch: int, piece: int) -> Tensors:
            # Not the same chunks each epoch: samples that lie together in memory are often of one class.
            if epoch not in orders:
                orders.clear()
                orders[epoch] = shuffled(len(train), seed, epoch, 0)
            return train.take(orders[epoch][piece * chunk : (piece + 1) * chunk])

        return QueueFeed(ask, load, batch_size, seed, dtype, part)

    def split(self, validation: int | float, seed: int = 0) -> tuple[Dataset, Tensors]:
        """Hold a part of the training set back to choose by, so that the test set is seen once, by the best.

        Parameters
        ----------
        validation
            How many training samples, or what share of them (below 1).
        seed
            By which they are drawn.

        Returns
        -------
        tuple
            The data set to train and choose with, whose `test` is the part held back; and the test set. Both are
            normalised by the figures of the samples that are left for training.

        Raises
        ------
        DataError
            When nothing would be held back, or nothing left.

        Examples
        --------
        >>> import torch
        >>> from labkit.data import from_tensors
        >>> digits = from_tensors(torch.zeros(70, 8, 8, dtype=torch.uint8), torch.arange(70) % 10, name="zeros")
        >>> choosing, test = digits.split(validation=13)
        >>> choosing.summary, len(test)
        ('zeros: 50 training and 13 validation images, 1×8×8, 10 classes', 7)
        """
        whole = len(self.train)
        held_back = round(validation * whole) if isinstance(validation, float) else validation
        if isinstance(validation, bool) or not 0 < held_back < whole:
            raise DataError(
                f"validation must be a number of training samples, from 1 to {whole - 1:,}, or a share of them between "
                f"0 and 1; it is {validation!r}"
            )
        order = shuffled(whole, seed)
        kept, aside = order[held_back:], order[:held_back]
        train = Tensors(self.train.images[kept], self.train.labels[kept])
        other = Tensors(self.train.images[aside], self.train.labels[aside], train.mean, train.std)
        source = f"{self.source}; {held_back:,} of {whole:,} training images held back for validation (seed {seed})"
        choosing = replace(self, train=train, test=other, source=source, tested_on="validation")
        return choosing, Tensors(self.test.images, self.test.labels, train.mean, train.std)

    def _chunk(self) -> int:
        if self.chunk is None:
            raise DataError(f"{self.name} is handed out by no queue; give queued(chunk={CHUNK}) of it")
        return self.chunk

    def __repr__(self) -> str:
        return f"{self.summary}; {self.source}"
