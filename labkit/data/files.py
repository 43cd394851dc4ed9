"""A training set in many files: found, checked by their headers, and shared by the ranks file by file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.telemetry import facts

from .errors import DataError
from .file_list import Paths, Problems, class_names, figures_given, figures_of, find_files, usual
from .files_feed import FilesFeed, Plan
from .queues import QueueFeed, WorkQueue
from .readers import Header, read_header, read_samples
from .shards import check_weights
from .tensors import Tensors, dims

__all__ = ["Files", "files"]


@dataclass(frozen=True, eq=False)
class Files:
    """A training set in files, of which each rank reads its own; made by `files`.

    Attributes
    ----------
    name
        What charts and reports call it.
    headers
        The training files.
    test
        The test set, in memory.
    classes
        Name of each class, in the order of the labels.
    mean, std
        By which all images are normalised, one number a channel.
    weights
        How much each rank reads; None: all alike.
    by_queue
        Whether a master hands the files out, to whoever asks.
    skip_bad
        Whether files that cannot be read are left out.
    """

    name: str
    headers: tuple[Header, ...]
    test: Tensors
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    by_queue: bool = False
    skip_bad: bool = False

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return sum(header.samples for header in self.headers)

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""
        return self.headers[0].shape[0]

    @property
    def image_size(self) -> int:
        """Height of an image in pixels."""
        return self.headers[0].shape[1]

    @property
    def summary(self) -> str:
        """Name, sizes and shape in one line: the same on all ranks, or else they don't see the same files.

        It ends in a checksum of the files' names and sizes and of the figures by which they are normalised.
        """
        shared = f", weights {':'.join(f'{w:g}' for w in self.weights)}" if self.weights else ""
        queued = ", handed out one by one" if self.by_queue else ""
        seen = [(header.path.name, header.samples) for header in self.headers]
        return (
            f"{self.name}: {self.samples:,} training images in {len(self.headers):,} "
            f"file{'s' if len(self.headers) != 1 else ''} and {len(self.test):,} test images, "
            f"{dims(self.headers[0].shape)}, {len(self.classes)} classes{shared}{queued}, checksum "
            f"{zlib.crc32(repr((seen, self.mean, self.std)).encode()):08x}"
        )

    @property
    def source(self) -> str:
        """Where the files lie, in words."""
        folders = sorted({str(header.path.parent) for header in self.headers})
        return f"from {folders[0]}" + (f" and {len(folders) - 1} more folders" if len(folders) > 1 else "")

    def examples(self) -> Tensors:
        """Return samples to try a model with: as many as the first file has, without their images, which are black."""
        header = self.headers[0]
        images = torch.zeros((header.samples, *header.shape), dtype=header.dtype)
        labels = torch.arange(header.samples) % len(self.classes)
        return Tensors(images, labels, self.mean, self.std)

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
    ) -> FilesFeed:
        """Return the batches of one of the ranks that compute: of the files that are its own in all epochs.

        Parameters
        ----------
        rank, size, batch_size, seed, device, dtype
            As for `labkit.data.Dataset.feed`; each file is moved to `device` when it has been read.
        weights
            One number a rank: one with weight 2 gets files with about twice the samples, and takes twice as many at a
            step. Default: those of `files`.

        Raises
        ------
        DataError
            For numbers that make no sense, or when a master is to hand the files out.
        """
        if self.by_queue:
            raise DataError(
                f"{self.name} is handed out by a queue, which needs a training method with a master; give this one "
                "files(…, queue=False)"
            )
        samples = [header.samples for header in self.headers]
        plan = Plan(samples, size, batch_size, self.weights if weights is None else weights)
        return FilesFeed(plan, samples, rank, self._loader(device), self._empty().to(device), seed, dtype)

    def work_queue(self, seed: int = 0) -> WorkQueue:
        """Return the master's queue of these files."""
        self._check_queue()
        return WorkQueue(len(self.headers), seed)

    def queue_feed(
        self,
        ask: Callable[[int], int | None],
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> QueueFeed:
        """Return the batches of a worker, which asks the master for files; see `labkit.data.Dataset.queue_feed`."""
        self._check_queue()
        load, sizes = self._loader(device), [header.samples for header in self.headers]
        return QueueFeed(ask, lambda epoch, file: load(file), batch_size, seed, dtype, part, sizes)

    def _loader(self, device: torch.device | str) -> Callable[[int], Tensors | DataError]:
        def load(file: int) -> Tensors | DataError:
            try:
                return Tensors(*read_samples(self.headers[file]), self.mean, self.std).to(device)
            except DataError as error:
                if not self.skip_bad:
                    raise
                return error

        return load

    def _empty(self) -> Tensors:
        header = self.headers[0]
        images = torch.empty((0, *header.shape), dtype=header.dtype)
        return Tensors(images, torch.empty(0, dtype=torch.int64), self.mean, self.std)

    def _check_queue(self) -> None:
        if not self.by_queue:
            raise DataError(f"{self.name} is handed out by no queue; give files(…, queue=True)")

    def __repr__(self) -> str:
        return f"{self.summary}; {self.source}"


def files(
    train: Paths,
    test: Paths | None = None,
    *,
    weights: Sequence[float] | None = None,
    queue: bool = False,
    skip_bad: bool = False,
    classes: Sequence[str] | int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "files",
) -> Files:
    """Make a training set of files; every rank calls it alike and sees the same files.

    All files are looked at first, without reading their images, so that a damaged one is found on all ranks at once.
    Each rank then reads whole files of its own, about as many samples as every other, or by weight, or as a master
    hands them out; the next file is read while one trains.

    Parameters
    ----------
    train
        A path, a pattern such as ``"shards/*.npz"``, or several. IDX files of images, named as MNIST's, with their
        labels beside them; ``.npz``, HDF5 (``.h5``, ``.hdf5``) and torch files (``.pt``, ``.pth``) with arrays
        ``images`` and ``labels``. Images are uint8, N×H×W or N×C×H×W, or floating point, N×…, normalised already;
        all of one shape.
    test
        Likewise, read into memory on every rank; default: no test set.
    weights
        One number a rank: one with weight 2 gets files with about twice the samples. Default: all alike.
    queue
        Leave it to the master of a training method which rank gets which file: the quicker one gets more.
    skip_bad
        Leave out, with a warning, files that cannot be read; default: raise. Where the damage shows only while
        training, the rank that has the file goes on with empty batches in its place.
    classes
        Names of the classes, or how many there are; default: as many as the highest label tells. Given, a label
        beyond them counts as damage.
    mean, std
        By which uint8 images are normalised, one number a channel, on the scale 0…1; default: the figures of the
        first training file, on all ranks.
    name
        What charts and reports call it.

    Raises
    ------
    DataError
        For files that are not there, empty, cut short, of another shape or dtype than most others, or with labels that
        are out of range: each is named, with what was expected and found.
    """
    if queue and weights is not None:
        raise DataError("weights are for shares made beforehand; a queue gives a quicker rank more by itself")
    paths, test_paths = find_files(train, "train"), [] if test is None else find_files(test, "test")
    both = {path.resolve() for path in paths} & {path.resolve() for path in test_paths}
    if both:
        raise DataError(f"{min(both)} is among the training and the test files: a test on it would show nothing")

    problems = Problems(skip_bad)
    headers = [header for path in paths if (header := problems.attempt(read_header, path))]
    test_headers = [header for path in test_paths if (header := problems.attempt(read_header, path))]
    names = class_names(classes, [*headers, *test_headers])
    alike = usual(headers)
    headers = [header for header in headers if problems.fits(header, alike, names)]
    test_headers = [header for header in test_headers if problems.fits(header, alike, names)]
    problems.settle()

    figures = figures_given(mean, std, headers[0]) if headers else None
    while headers and figures is None:
        figures = problems.attempt(figures_of, headers[0])
        headers = headers if figures else headers[1:]
    tested = [samples for header in test_headers if (samples := problems.attempt(read_samples, header))]
    problems.settle()
    if figures is None:
        raise DataError(f"none of the {len(paths)} training files can be used")
    if test_paths and not tested:
        raise DataError(f"none of the {len(test_paths)} test files can be used")

    nothing = torch.empty((0, *headers[0].shape), dtype=headers[0].dtype), torch.empty(0, dtype=torch.int64)
    images, labels = (torch.cat(parts) for parts in zip(*(tested or [nothing]), strict=True))
    made = Files(
        name=name,
        headers=tuple(headers),
        test=Tensors(images, labels, *figures),
        classes=names,
        mean=figures[0],
        std=figures[1],
        weights=None if weights is None else check_weights(weights),
        by_queue=queue,
        skip_bad=skip_bad,
    )
    facts.record("data set", repr(made))
    return made
