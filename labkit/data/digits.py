"""Real handwritten digits without a network: the 1,797 images that come with scikit-learn.

They are 8×8 images of the test part of the UCI set "Optical Recognition of Handwritten Digits"
(E. Alpaydin, C. Kaynak, 1998, https://doi.org/10.24432/C50P49).
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from .dataset import Dataset
from .tensors import Tensors

__all__ = ["DEFAULT_SIZE", "load_digits"]

DEFAULT_SIZE = 10_000
TEST_SHARE = 5  # every fifth image of a class is for the test: 360 of the 1,797
INNER = 24  # the digit, in a frame of 28: room to shift it without cutting it off
FRAME = 28
DEGREES, SCALE, SHIFT = 12.0, 0.12, 2.0  # the most an augmented copy is turned, scaled, shifted (pixels)


def load_digits(size: int | None, seed: int) -> Dataset:
    """Return `size` training images (default 10,000) and the 360 test images, 28×28.

    The images are split before anything else, so that no test image has an altered copy among the training
    images. Up to 1,437 training images are originals; the rest are copies turned by at most 12°, scaled by
    at most 12 % and shifted by at most 2 pixels, drawn by `seed`. The test images are enlarged only.
    """
    images, labels = _read()
    # The split is the same for every seed: accuracies stay comparable.
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    by_class = shuffled[labels[shuffled].argsort(kind="stable")]
    tested, trained = by_class[::TEST_SHARE], np.delete(by_class, slice(None, None, TEST_SHARE))
    size = DEFAULT_SIZE if size is None else size
    generator = torch.Generator().manual_seed(seed)
    originals, answers = _enlarge(images[trained]), torch.as_tensor(labels[trained])
    order = torch.randperm(len(originals), generator=generator)
    kept = order[:size]
    # Whole rounds over the originals, so that each has as many copies as any other, give or take one.
    copied = order.repeat(math.ceil(size / len(order)))[len(order) : size]
    pieces = [originals[kept]]
    if len(copied):
        pieces.append(_augment(originals[copied], generator))
    train = Tensors(_to_uint8(torch.cat(pieces)), answers[torch.cat((kept, copied))])
    test = Tensors(_to_uint8(_enlarge(images[tested])), torch.as_tensor(labels[tested]), train.mean, train.std)
    source = f"scikit-learn's {len(images):,} handwritten digits of 8×8, enlarged to {FRAME}×{FRAME}"
    if len(copied):
        source += f"; {len(kept):,} training images are originals, {len(copied):,} altered copies (seed {seed})"
    return Dataset("digits", train, test, tuple("0123456789"), f"{source}; test images unaltered")


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, N×64 with values 0…16, and their labels, in the order of the file."""
    # Importing scikit-learn takes a second on each rank, and all that is needed of it is this file.
    package = find_spec("sklearn")
    table = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if table is not None and table.is_file():
        rows = np.loadtxt(table, delimiter=",", dtype=np.int64)
        return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits as read

    images, labels = read(return_X_y=True)
    return images, labels.astype(np.int64)


def _enlarge(flat: np.ndarray) -> torch.Tensor:
    """Turn N×64 with values 0…16 into N×1×28×28 with values 0…1."""
    images = torch.as_tensor(flat, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = functional.interpolate(images, size=(INNER, INNER), mode="bicubic", align_corners=False)
    return functional.pad(images, [(FRAME - INNER) // 2] * 4).clamp(0, 1)


def _augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    n = len(images)

    def draw(most: float) -> torch.Tensor:
        return (torch.rand(n, generator=generator) * 2 - 1) * most

    angle, scale = draw(math.radians(DEGREES)), 1 + draw(SCALE)
    shift_x, shift_y = draw(SHIFT * 2 / FRAME), draw(SHIFT * 2 / FRAME)  # a frame is 2 wide in grid units
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    rows = [torch.stack((cos, -sin, shift_x), 1), torch.stack((sin, cos, shift_y), 1)]
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def _to_uint8(images: torch.Tensor) -> torch.Tensor:
    return (images * 255).round().clamp(0, 255).to(torch.uint8)
