"""Files of samples: IDX, `.npz`, HDF5 and torch's `.pt`, their headers first and the images when they are needed.

In all but IDX, ``images`` and ``labels`` are the names of two arrays: uint8 N×H×W or N×C×H×W, or floating point N×…,
and integers N.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from .errors import DataError
from .idx import idx_shape, read_idx
from .tensors import dims, in_words

__all__ = ["Header", "format_of", "is_labels_file", "read_header", "read_samples"]

CURE = "Write or copy it anew, or leave it out: skip_bad=True."


@dataclass(frozen=True)
class Header:
    """What is known of a file without its images.

    Attributes
    ----------
    path
        The file.
    samples
        How many it has, at least 1.
    shape, dtype
        Of one image: C×H×W uint8; or of one floating-point sample, as in the file.
    highest
        The highest label.
    """

    path: Path
    samples: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    highest: int

    @property
    def in_words(self) -> str:
        """Shape and dtype of an image, as errors name them."""
        return f"{in_words(self.dtype)} {dims(self.shape)}"


@dataclass(frozen=True)
class Opened:
    """A file that is open: shape and dtype of its images, and what reads them and the labels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    images: Callable[[], torch.Tensor]
    labels: Callable[[], torch.Tensor]


def read_header(path: Path) -> Header:
    """Return what `path` holds; of its arrays only the labels are read.

    Raises
    ------
    DataError
        When the file is not there, empty, cut short, of no known format, or holds something else; the message names
        the file, what was expected and what was found.
    """
    with _open(path, whole=False) as file:
        return _header(path, file, _labels(path, file))


def read_samples(header: Header) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a file's images, N×C×H×W (or N×…, floating point), and labels, int64.

    Raises
    ------
    DataError
        As `read_header`; and when the file is no longer what its header said.
    """
    path = header.path
    with _open(path, whole=True) as file:
        labels = _labels(path, file)
        found = _header(path, file, labels)
        if found != header:
            raise DataError(
                f"{path} has changed: expected {header.samples:,} images, {header.in_words}, labels up to "
                f"{header.highest}; found {found.samples:,}, {found.in_words}, up to {found.highest}. {CURE}"
            )
        return file.images().reshape(-1, *header.shape), labels


def _header(path: Path, file: Opened, labels: torch.Tensor) -> Header:
    shape, dtype = file.shape, file.dtype
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise DataError(f"{path}: images are {in_words(dtype)}; expected uint8 (0…255) or floating point. {CURE}")
    if len(shape) < 2 or (dtype == torch.uint8 and len(shape) not in (3, 4)):
        wanted = "N×H×W or N×C×H×W" if dtype == torch.uint8 else "N×…"
        raise DataError(f"{path}: images are {dims(shape)}; expected {wanted}. {CURE}")
    if dtype == torch.uint8 and len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4):
        raise DataError(f"{path}: images are {dims(shape)}, as it seems N×H×W×C; expected N×C×H×W: transpose them")
    if math.prod(shape) == 0:
        raise DataError(f"{path} is empty: its images are {dims(shape)}. {CURE}")
    if len(labels) != shape[0]:
        raise DataError(f"{path} has {shape[0]:,} images and {len(labels):,} labels; expected one each. {CURE}")
    if int(labels.min()) < 0:
        raise DataError(f"{path}: the smallest label is {int(labels.min())}; expected labels from 0. {CURE}")
    image = (1, *shape[1:]) if dtype == torch.uint8 and len(shape) == 3 else shape[1:]
    return Header(path, shape[0], image, dtype, int(labels.max()))


def _labels(path: Path, file: Opened) -> torch.Tensor:
    labels = file.labels()
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.ndim != 1:
        raise DataError(
            f"{path}: labels are {in_words(labels.dtype)} {dims(labels.shape)}; expected integers, one an image. {CURE}"
        )
    return labels.to(torch.int64)


@contextlib.contextmanager
def _open(path: Path, whole: bool) -> Iterator[Opened]:
    """Open a file of any format; what its library says of a damaged one becomes a `DataError` that names it."""
    words, opener = format_of(path)
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty: 0 bytes. {CURE}")
        with opener(path, whole) as file:
            yield file
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {CURE}") from error
    # What numpy, h5py, zipfile and torch raise for damaged files, as seen in tests that damage them.
    except (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, zlib.error, *BROKEN) as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{path} is damaged, or no {words} ({size:,} bytes): {said}. {CURE}") from error


BROKEN = (zipfile.BadZipFile, pickle.UnpicklingError)


def format_of(path: Path) -> tuple[str, Callable[[Path, bool], AbstractContextManager[Opened]]]:
    """Return the name of a file's format, told by the file's name, and what opens it."""
    for endings, words, opener in FORMATS:
        if path.suffix.lower() in endings:
            return words, opener
    if "idx3" in path.name:
        return "IDX file", _open_idx
    raise DataError(
        f"{path} is of no known format; expected a name that ends in "
        f"{', '.join(ending for endings, _, _ in FORMATS for ending in endings)}, or as MNIST's …-images-idx3-ubyte"
    )


def is_labels_file(path: Path) -> bool:
    """Whether a file has the labels of an IDX file of images."""
    return "idx1" in path.name


@contextlib.contextmanager
def _open_idx(path: Path, whole: bool) -> Iterator[Opened]:
    answers = _labels_of(path)
    yield Opened(idx_shape(path, 3), torch.uint8, lambda: read_idx(path, 3), lambda: read_idx(answers, 1))


def _labels_of(path: Path) -> Path:
    """Return the file with the labels of an IDX file of images: named as MNIST's, packed or not."""
    plain = path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for name in (plain, f"{plain}.gz"):
        if (path.parent / name).exists():
            return path.parent / name
    raise DataError(
        f"{path} has no labels: expected them in {path.parent / plain} (or .gz), which is not there. {CURE}"
    )


@contextlib.contextmanager
def _open_npz(path: Path, whole: bool) -> Iterator[Opened]:
    with zipfile.ZipFile(path) as archive:

        def read(name: str) -> torch.Tensor:
            _npy_header(path, archive, name)  # before an array of a size that the file does not have is made
            with _member(path, archive, name) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
                member.read(1)  # only at its end the checksum is compared
                return _from_numpy(array)

        shape, dtype = _npy_header(path, archive, "images")
        yield Opened(shape, _from_numpy(np.empty(0, dtype)).dtype, lambda: read("images"), lambda: read("labels"))


def _npy_header(path: Path, archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with _member(path, archive, name) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        if dtype.hasobject:
            raise DataError(f"{path}: {name} are Python objects; expected numbers. {CURE}")
        expected = member.tell() + math.prod(shape) * dtype.itemsize
    found = archive.getinfo(f"{name}.npy").file_size
    if found != expected:
        raise DataError(f"{path}: {name} has {found:,} bytes; expected {expected:,} for {dims(shape)}. {CURE}")
    return shape, dtype


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    if f"{name}.npy" not in archive.namelist():
        raise _lacks(path, name, [member.removesuffix(".npy") for member in archive.namelist()])
    return archive.open(f"{name}.npy")


@contextlib.contextmanager
def _open_hdf5(path: Path, whole: bool) -> Iterator[Opened]:
    # Imported only here: it takes as long as reading a small file.
    import h5py

    with h5py.File(path, "r") as file:
        for name in ("images", "labels"):
            if not isinstance(file.get(name), h5py.Dataset):
                raise _lacks(path, name, list(file))
        images, labels = file["images"], file["labels"]
        dtype = _from_numpy(np.empty(0, images.dtype)).dtype
        yield Opened(images.shape or (0,), dtype, lambda: _from_numpy(images[()]), lambda: _from_numpy(labels[()]))


@contextlib.contextmanager
def _open_torch(path: Path, whole: bool) -> Iterator[Opened]:
    # Mapped, only what is used is read; but a mapped file that another process cuts short ends this one, so that the
    # images are read in the ordinary way. Files from before torch 1.6 are no zip files and cannot be mapped.
    mapped = not whole and zipfile.is_zipfile(path)
    held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(held, dict):
        raise DataError(f"{path} holds a {type(held).__name__}; expected a dictionary with images and labels. {CURE}")
    for name in ("images", "labels"):
        if not isinstance(held.get(name), torch.Tensor):
            raise _lacks(path, name, list(held))
    images, labels = held["images"].detach(), held["labels"].detach()
    yield Opened(tuple(images.shape), images.dtype, images.contiguous, labels.clone)


def _lacks(path: Path, name: str, there: list[Any]) -> DataError:
    found = ", ".join(map(str, there[:8])) or "nothing"
    return DataError(f"{path} has no array {name!r}: expected images and labels, found {found}. {CURE}")


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor, its bytes in this machine's order."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


FORMATS = (
    ((".npz",), "npz file", _open_npz),
    ((".h5", ".hdf5"), "HDF5 file", _open_hdf5),
    ((".pt", ".pth"), "torch file", _open_torch),
)
"""Endings, name and opener of each format but IDX."""
