"""Images and labels held in memory, and cut into normalised batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .errors import DataError

__all__ = ["Dataset", "Tensors", "from_tensors"]

Array = torch.Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Tensors:
    """Images and their labels.

    Images stay uint8 in memory, a quarter of float32, and are normalised a batch at a time.

    Parameters
    ----------
    images
        uint8, N×C×H×W, 0…255; or floating point, N×…, which is taken as normalised already.
    labels
        int64, N, from 0.
    mean, std
        One number a channel, on the scale 0…1; default: those of `images`. A test set is given its
        training set's.

    Raises
    ------
    DataError
        For a wrong dtype or shape, or labels that don't fit the images.
    """

    images: torch.Tensor
    labels: torch.Tensor
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    _shift: torch.Tensor = field(init=False, repr=False)
    _scale: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.images, self.labels)
        mean, std = self.mean, self.std
        if self.images.is_floating_point():
            mean, std = (0.0,), (1.0,)
        elif mean is None or std is None:
            mean, std = _statistics(self.images)
        shape = (1, -1, 1, 1)
        shift = torch.tensor(mean, dtype=torch.float32, device=self.images.device).reshape(shape) * 255
        scale = 1 / (torch.tensor(std, dtype=torch.float32, device=self.images.device).reshape(shape) * 255)
        for name, value in (("mean", mean), ("std", std), ("_shift", shift), ("_scale", scale)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor | Sequence[int] | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images (float32, normalised: mean 0, standard deviation 1) and labels at `indices`."""
        images, labels = self.images[indices], self.labels[indices]
        if images.is_floating_point():
            return images, labels
        return images.to(torch.float32).sub_(self._shift).mul_(self._scale), labels

    def to(self, device: torch.device | str) -> Tensors:
        """Return the same on `device`; itself when it is there already."""
        images = self.images.to(device)
        if images is self.images:
            return self
        return Tensors(images, self.labels.to(device), self.mean, self.std)

    def take(self, indices: torch.Tensor) -> Tensors:
        """Return the samples at `indices` as Tensors of their own, with the same mean and std."""
        return Tensors(self.images[indices], self.labels[indices], self.mean, self.std)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.images.shape))
        return f"Tensors({shape} {str(self.images.dtype).removeprefix('torch.')})"


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
    """

    name: str
    train: Tensors
    test: Tensors
    classes: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(
                f"training images are {_dims(self.train.images.shape[1:])}, "
                f"test images {_dims(self.test.images.shape[1:])}: both must have one shape"
            )
        for part, name in ((self.train, "training"), (self.test, "test")):
            highest = int(part.labels.max()) if len(part) else 0
            if highest >= len(self.classes):
                raise DataError(
                    f"the {name} labels go up to {highest}, but there are {len(self.classes)} classes "
                    f"(0…{len(self.classes) - 1}): name more classes, or number the labels from 0"
                )

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        """Height of an image in pixels."""
        return self.train.images.shape[2]

    @property
    def summary(self) -> str:
        """Name, sizes and shape in one line, without the source: the same on all ranks."""
        return (
            f"{self.name}: {len(self.train):,} training and {len(self.test):,} test images, "
            f"{_dims(self.train.images.shape[1:])}, {len(self.classes)} classes"
        )

    def __repr__(self) -> str:
        return f"{self.summary}; {self.source}"


def from_tensors(
    images: Array,
    labels: Array,
    test_images: Array | None = None,
    test_labels: Array | None = None,
    *,
    classes: Sequence[str] | None = None,
    name: str = "own data",
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Make a data set of your own tensors or arrays.

    Parameters
    ----------
    images
        uint8 (0…255), N×C×H×W or N×H×W for grey; or floating point, N×…, normalised already.
    labels
        Integers from 0, N.
    test_images, test_labels
        Likewise; without them a part of the samples is held back for the test.
    classes
        Names of the classes; default: the numbers.
    name
        What to call it in charts and reports.
    test_fraction, seed
        How large that part is, and the seed by which it is drawn.

    Raises
    ------
    DataError
        For a wrong dtype or shape, or labels that don't fit the images.

    Examples
    --------
    >>> import torch
    >>> from_tensors(torch.zeros(50, 8, 8, dtype=torch.uint8), torch.arange(50) % 5)
    own data: 45 training and 5 test images, 1×8×8, 5 classes; from tensors
    """
    if (test_images is None) != (test_labels is None):
        raise DataError("give both test_images and test_labels, or neither")
    x, y = _as_images(images, "images"), _as_labels(labels, "labels")
    if test_images is not None and test_labels is not None:
        train = Tensors(x, y)
        test = Tensors(
            _as_images(test_images, "test_images"),
            _as_labels(test_labels, "test_labels"),
            train.mean,
            train.std,
        )
    else:
        if not 0 <= test_fraction < 1:
            raise DataError(f"test_fraction must be at least 0 and below 1, not {test_fraction}")
        _check(x, y)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        held_back = math.ceil(test_fraction * len(y))
        train = Tensors(x[order[held_back:]], y[order[held_back:]])
        test = Tensors(x[order[:held_back]], y[order[:held_back]], train.mean, train.std)
    if classes is None:
        highest = max(int(part.labels.max()) if len(part) else 0 for part in (train, test))
        classes = [str(label) for label in range(highest + 1)]
    return Dataset(name, train, test, tuple(classes), "from tensors")


def _as_images(array: Array, what: str) -> torch.Tensor:
    images = _as_tensor(array, what)
    return images.unsqueeze(1) if images.dtype == torch.uint8 and images.ndim == 3 else images


def _as_labels(array: Array, what: str) -> torch.Tensor:
    labels = _as_tensor(array, what)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"{what} are {_dtype(labels)}; they must be integers, the number of each sample's class")
    return labels.to(torch.int64)


def _as_tensor(array: Array, what: str) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    if not isinstance(array, np.ndarray):
        raise DataError(f"{what} must be a torch tensor or a numpy array, not {type(array).__name__}")
    try:
        # A copy where torch could not write: it warns about such arrays, and a training may augment in place.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise DataError(f"{what} are {array.dtype}, which torch does not know: convert them to uint8") from error


def _check(images: torch.Tensor, labels: torch.Tensor) -> None:
    if images.is_floating_point():
        if images.ndim < 2:
            raise DataError(f"images are {_dims(images.shape)}; floating-point samples must be N×… (N×C×H×W)")
    elif images.dtype != torch.uint8:
        raise DataError(
            f"images are {_dtype(images)}; they must be uint8 (0…255), or floating point and normalised "
            "already: images.to(torch.uint8)"
        )
    elif images.ndim != 4:
        raise DataError(f"images are {_dims(images.shape)}; uint8 images must be N×C×H×W (C: 1 for grey, 3 for colour)")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(f"labels are {_dtype(labels)} {_dims(labels.shape)}; they must be int64, one number a sample")
    if len(images) != len(labels):
        raise DataError(f"there are {len(images):,} images and {len(labels):,} labels: one label an image is needed")
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"the smallest label is {int(labels.min())}; labels are counted from 0")


def _statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, exactly, from the counts of the 256 values."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1).cpu(), minlength=256).to(torch.float64)
        total = counts.sum().clamp(min=1)
        mean = float(levels @ counts / total)
        deviation = math.sqrt(float((levels - mean).square() @ counts / total))
        means.append(mean)
        deviations.append(deviation or 1.0)  # one flat grey: nothing to scale
    return tuple(means), tuple(deviations)


def _dims(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a single number"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
