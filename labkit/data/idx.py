"""IDX, the file format of MNIST and Fashion-MNIST: http://yann.lecun.com/exdb/mnist.

labkit reads it itself: each byte is accounted for, a `.gz` need not be unpacked into a folder that may be
read-only, and a rank is spared the import of torchvision, which takes longer than reading the images.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
import torch

from .errors import DataError

__all__ = ["idx_shape", "read_idx"]

UNSIGNED_BYTE = 0x08  # the type code of the format; MNIST has no other
CURE = "Delete the file and load the data set again, or copy it anew."


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Read an IDX file of unsigned bytes, packed (`.gz`) or not.

    Parameters
    ----------
    path
        The file.
    dimensions
        3 for images (N×H×W), 1 for labels.

    Returns
    -------
    torch.Tensor
        uint8, with as many dimensions.

    Raises
    ------
    DataError
        When the file is truncated, too long, no IDX file or no whole gzip file; the message has the bytes
        expected and found.
    """
    with _opened(path) as file:
        shape = _header(path, file, dimensions)
        if isinstance(file, gzip.GzipFile):
            return torch.from_numpy(_unpack(path, file, shape))
        _check_size(path, file, shape)
        return torch.from_numpy(np.fromfile(file, dtype=np.uint8)).reshape(shape)


def idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Return the shape of what `read_idx` reads, from the header alone.

    Raises
    ------
    DataError
        As `read_idx` does, but that a packed file is truncated shows only when it is read.
    """
    with _opened(path) as file:
        shape = _header(path, file, dimensions)
        if not isinstance(file, gzip.GzipFile):
            _check_size(path, file, shape)
        return shape


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open a file, packed or not; whatever goes wrong with it meanwhile names it."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is a truncated or corrupt gzip file ({path.stat().st_size:,} bytes: {error}). {CURE}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_size(path: Path, file: BinaryIO, shape: tuple[int, ...]) -> None:
    expected, found = file.tell() + math.prod(shape), path.stat().st_size
    if found != expected:
        raise DataError(_wrong_size(path, shape, expected, found))


def _header(path: Path, file: IO[bytes] | gzip.GzipFile, dimensions: int) -> tuple[int, ...]:
    length = 4 + 4 * dimensions
    header = file.read(length)
    if len(header) < length:
        raise DataError(f"{path} is truncated: expected a header of {length} bytes, found {len(header)}. {CURE}")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", header)
    wanted = UNSIGNED_BYTE << 8 | dimensions
    if magic != wanted:
        raise DataError(
            f"{path} is no IDX file of {'images' if dimensions == 3 else 'labels'}: "
            f"expected it to begin with 0x{wanted:08x}, found 0x{magic:08x}. {CURE}"
        )
    return tuple(shape)


def _unpack(path: Path, packed: gzip.GzipFile, shape: tuple[int, ...]) -> np.ndarray:
    """Read what the header promises and not a byte more, so that a corrupt header cannot fill the memory."""
    promised = math.prod(shape)
    content = bytearray()
    try:
        while chunk := packed.read(min(1 << 20, promised + 1 - len(content))):
            content += chunk
    except EOFError:
        raise DataError(
            f"{path} is truncated: expected {promised:,} bytes of data when unpacked ({_dims(shape)}), "
            f"found {len(content):,} and no end ({path.stat().st_size:,} bytes packed). {CURE}"
        ) from None
    if len(content) != promised:
        raise DataError(_wrong_size(path, shape, promised, len(content)))
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _wrong_size(path: Path, shape: tuple[int, ...], expected: int, found: int) -> str:
    state = "truncated" if found < expected else "too long"
    at_least = "at least " if path.suffix == ".gz" and found > expected else ""
    return f"{path} is {state}: expected {expected:,} bytes ({_dims(shape)}), found {at_least}{found:,}. {CURE}"


def _dims(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{n:,}" for n in shape)
