"""Images and labels held in memory, and cut into normalised batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .errors import DataError

__all__ = ["Tensors", "check_samples", "dims", "in_words", "statistics"]


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
        check_samples(self.images, self.labels)
        mean, std = self.mean, self.std
        if self.images.is_floating_point():
            mean, std = (0.0,), (1.0,)
        elif mean is None or std is None:
            mean, std = statistics(self.images)
        shape = (1, -1, 1, 1)
        shift = torch.tensor(mean, dtype=torch.float32, device=self.images.device).reshape(shape) * 255
        scale = 1 / (torch.tensor(std, dtype=torch.float32, device=self.images.device).reshape(shape) * 255)
        for name, value in (("mean", mean), ("std", std), ("_shift", shift), ("_scale", scale)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(
        self, indices: torch.Tensor | Sequence[int] | slice, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images (normalised: mean 0, standard deviation 1) and labels at `indices`.

        The images are `dtype`; default: float32, or what they are where they were normalised before.
        """
        images, labels = self.images[indices], self.labels[indices]
        if not images.is_floating_point():
            images = images.to(torch.float32).sub_(self._shift).mul_(self._scale)
        return images if dtype is None else images.to(dtype), labels

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


def check_samples(images: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise `DataError` for a wrong dtype or shape, or labels that don't fit the images."""
    if images.is_floating_point():
        if images.ndim < 2:
            raise DataError(f"images are {dims(images.shape)}; floating-point samples must be N×… (N×C×H×W)")
    elif images.dtype != torch.uint8:
        raise DataError(
            f"images are {in_words(images.dtype)}; they must be uint8 (0…255), or floating point and normalised "
            "already: images.to(torch.uint8)"
        )
    elif images.ndim != 4:
        raise DataError(f"images are {dims(images.shape)}; uint8 images must be N×C×H×W (C: 1 for grey, 3 for colour)")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(
            f"labels are {in_words(labels.dtype)} {dims(labels.shape)}; they must be int64, one number a sample"
        )
    if len(images) != len(labels):
        raise DataError(f"there are {len(images):,} images and {len(labels):,} labels: one label an image is needed")
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"the smallest label is {int(labels.min())}; labels are counted from 0")


def statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, 0…1, exactly: from the counts of the 256 values."""
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


def dims(shape: Sequence[int]) -> str:
    """Return a shape in words: ``1×28×28``."""
    return "×".join(map(str, shape)) or "a single number"


def in_words(dtype: torch.dtype) -> str:
    """Return ``uint8`` for ``torch.uint8``."""
    return str(dtype).removeprefix("torch.")
