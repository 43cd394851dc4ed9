"""Your own data: tensors, arrays, or torch's data sets."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from .dataset import Dataset
from .errors import DataError
from .files import Files
from .tensors import Tensors, check_samples, dims, in_words

__all__ = ["DatasetLike", "as_dataset", "from_tensors"]

log = logging.getLogger("labkit.data")

Array = torch.Tensor | np.ndarray
DatasetLike = Dataset | Files | tuple[Any, Any]
"""What training takes: see `as_dataset`."""
COMPARED = 4
"""Samples of a torch data set that are read twice, to see whether they come out the same."""


def as_dataset(
    thing: Any,
    *,
    test_fraction: float | None = None,
    classes: Sequence[str] | None = None,
    name: str = "own data",
    seed: int = 0,
) -> Dataset | Files:
    """Make a data set of whatever holds one.

    Parameters
    ----------
    thing
        A `Dataset` or `Files`, which is returned as it is; or a pair ``(train, test)``, each a data set of torch's
        (with ``len`` and an index) or a pair ``(images, labels)`` as `from_tensors` takes it; or one such without a
        test set, with `test_fraction`. A data set of torch's is read into memory once: uint8 images and PIL's are
        normalised by their own figures, floating-point samples are taken as they are.
    test_fraction
        How much of a single set to hold back for the test, from 0 to 1; 0: nothing.
    classes
        Names of the classes; default: those that torch's data set has, else the numbers.
    name
        What to call it in charts and reports.
    seed
        By which the part for the test is drawn.

    Raises
    ------
    DataError
        For anything else, with what to give in its place.

    Examples
    --------
    >>> import torch
    >>> digits = torch.utils.data.TensorDataset(torch.zeros(50, 1, 8, 8), torch.arange(50) % 5)
    >>> as_dataset((digits, digits))
    own data: 50 training and 50 test images, 1×8×8, 5 classes; from tensors
    """
    if isinstance(thing, Dataset | Files):
        return thing
    pair = isinstance(thing, tuple | list) and len(thing) == 2
    if pair and not _is_samples(thing):
        if test_fraction is not None:
            raise DataError("test_fraction is for data without a test set; here (train, test) were given")
        (images, labels), (test_images, test_labels) = _samples(thing[0], "train"), _samples(thing[1], "test")
        names = classes or getattr(thing[0], "classes", None)
        return from_tensors(images, labels, test_images, test_labels, classes=names, name=name)
    images, labels = _samples(thing, "the data set")
    if test_fraction is None:
        raise DataError(
            "a test set is needed, too: give (train, test); or test_fraction=0.1 with data.as_dataset, to hold a tenth "
            "of the samples back for it"
        )
    names = classes or getattr(thing, "classes", None)
    return from_tensors(images, labels, classes=names, name=name, test_fraction=test_fraction, seed=seed)


def _is_samples(thing: Any) -> bool:
    """Whether it is (images, labels)."""
    return isinstance(thing, tuple | list) and len(thing) == 2 and all(isinstance(part, Array) for part in thing)


def _samples(thing: Any, what: str) -> tuple[Array, Array]:
    """Return images and labels of (images, labels) or of a data set of torch's."""
    if _is_samples(thing):
        return thing[0], thing[1]
    if isinstance(thing, TensorDataset) and len(thing.tensors) == 2:
        return thing.tensors
    if isinstance(thing, Array | str | dict | tuple | list) or not hasattr(thing, "__getitem__"):
        raise DataError(
            f"{what} is {_a(thing)}; it must be a data set of torch's with an index, or (images, labels) as tensors or "
            "arrays"
        )
    if not hasattr(thing, "__len__") or len(thing) == 0:
        raise DataError(f"{what}, {_a(thing)}, has no samples, or does not say how many")
    return _read(thing, what)


def _read(thing: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a data set of torch's into memory."""
    n = len(thing)
    first, _ = _sample(thing, 0, what)
    images, labels = torch.empty((n, *first.shape), dtype=first.dtype), torch.empty(n, dtype=torch.int64)
    for index in range(n):
        image, labels[index] = _sample(thing, index, what)
        if image.shape != first.shape or image.dtype != first.dtype:
            raise DataError(
                f"{what}: sample {index} is {in_words(image.dtype)} {dims(image.shape)}, sample 0 is "
                f"{in_words(first.dtype)} {dims(first.shape)}: all must have one shape; resize or crop them"
            )
        images[index] = image
    if not all(torch.equal(_sample(thing, index, what)[0], images[index]) for index in range(min(n, COMPARED))):
        log.warning(
            "%s gives another image each time it is asked for the same (a random transform?): labkit reads each once, "
            "and all epochs see that one",
            what,
        )
    return images, labels


def _sample(thing: Any, index: int, what: str) -> tuple[torch.Tensor, int]:
    item = thing[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"{what}: sample {index} is {_a(item)}; it must be (image, label)")
    image, label = item
    try:
        number = operator.index(label)
    except TypeError as error:
        raise DataError(
            f"{what}: the label of sample {index} is {label!r}; it must be the number of a class"
        ) from error
    return _as_image(image, index, what), number


def _as_image(image: Any, index: int, what: str) -> torch.Tensor:
    """Return a tensor as it is, H×W of an array or PIL image as 1×H×W, H×W×C (C: 1, 3 or 4) as C×H×W."""
    if not isinstance(image, Array):
        if getattr(image, "mode", None) not in ("L", "RGB"):
            kind = f"of PIL's mode {image.mode!r}" if hasattr(image, "mode") else _a(image)
            raise DataError(
                f"{what}: the image of sample {index} is {kind}; it must be a tensor, an array, or a PIL image in "
                'grey or colour: image.convert("RGB")'
            )
        image = np.array(image)
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] in (1, 3, 4):
        image = image.transpose(2, 0, 1)
    tensor = _as_tensor(np.ascontiguousarray(image) if isinstance(image, np.ndarray) else image, what)
    return tensor.unsqueeze(0) if tensor.dtype == torch.uint8 and tensor.ndim == 2 else tensor


def _a(thing: Any) -> str:
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


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
        check_samples(x, y)
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
        raise DataError(
            f"{what} are {in_words(labels.dtype)}; they must be integers, the number of each sample's class"
        )
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
