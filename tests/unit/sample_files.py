"""Small files of samples, in every format that labkit reads."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np
import torch

from labkit.data import Batch, Files

CLASSES = 10
SIZES = (7, 12, 5, 9)
N = sum(SIZES)
LARGE = 40  # pixels: zipfile then reads no more than the beginning of an array, to see what its header says


def idx(array: np.ndarray) -> bytes:
    """The bytes of an IDX file."""
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(pack(idx(images)))
    answers = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    answers.write_bytes(pack(idx(labels.astype(np.uint8))))


def write_npz(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    np.savez(path, images=images, labels=labels)


def write_packed_npz(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    np.savez_compressed(path, images=images, labels=labels)


def write_hdf5(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=True, compression="gzip")
        file.create_dataset("labels", data=labels)


def write_torch(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    torch.save({"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}, path)


def write_old_torch(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    held = {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}
    torch.save(held, path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, tuple[str, Callable[[Path, np.ndarray, np.ndarray], None]]] = {
    "idx": ("part{}-images-idx3-ubyte", write_idx),
    "idx packed": ("part{}-images-idx3-ubyte.gz", write_idx),
    "npz": ("part{}.npz", write_npz),
    "npz packed": ("part{}.npz", write_packed_npz),
    "hdf5": ("part{}.h5", write_hdf5),
    "torch": ("part{}.pt", write_torch),
    "torch before 1.6": ("part{}.pth", write_old_torch),
}
"""By format: what a file is called, and what writes it."""


def samples(n: int, start: int = 0, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """`n` grey images and their labels; the first two pixels of an image are its number, from `start` on."""
    rng = np.random.default_rng(start)
    images = rng.integers(0, 256, (n, size, size), dtype=np.uint8)
    numbers = np.arange(start, start + n)
    images[:, 0, 0], images[:, 0, 1] = numbers // 256, numbers % 256
    return images, numbers % CLASSES


def numbers(images: torch.Tensor) -> list[int]:
    """The numbers of images as `samples` makes them."""
    return [int(first) * 256 + int(second) for first, second in images[:, 0, 0, :2].tolist()]


def write_files(folder: Path, kind: str, sizes: Iterable[int], size: int = 6) -> list[Path]:
    """Files of so many samples each, numbered through; images of `size` pixels square."""
    folder.mkdir(parents=True, exist_ok=True)
    name, write = FORMATS[kind]
    paths, start = [], 0
    for index, n in enumerate(sizes):
        paths.append(folder / name.format(index))
        write(paths[-1], *samples(n, start, size))
        start += n
    return paths


def raw(dataset: Files, batches: list[Batch]) -> list[int]:
    """The numbers of the samples in `batches`, which are normalised; their labels must be right."""
    mean, std = (torch.tensor(figure).reshape(1, -1, 1, 1) for figure in (dataset.mean, dataset.std))
    images = torch.cat([batch.images for batch in batches])
    found = numbers(((images * std + mean) * 255).round())
    assert [number % CLASSES for number in found] == torch.cat([batch.labels for batch in batches]).tolist()
    return found


def epoch_of(dataset: Files, size: int, batch: int = 4, epoch: int = 0) -> list[list[Batch]]:
    """Each rank's batches of an epoch."""
    return [list(dataset.feed(rank, size, batch).epoch(epoch)) for rank in range(size)]
