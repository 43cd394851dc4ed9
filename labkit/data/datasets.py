"""Finding a data set: in a folder of the user's, in the cache, or by a download."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.telemetry import facts

from .dataset import Dataset
from .digits import load_digits
from .download import cache_folder, fetch
from .errors import DataError, NotAvailableError
from .idx import read_idx
from .tensors import Tensors

__all__ = ["NAMES", "load"]

log = logging.getLogger("labkit.data")


@dataclass(frozen=True)
class Known:
    """A data set of torchvision's: its class there, its folder in torchvision's layout, how to read it."""

    torchvision: str
    folder: str
    classes: tuple[str, ...]
    read: Callable[[Known, Path], tuple[Tensors, Tensors]]


def load(
    name: str = "auto", root: str | os.PathLike[str] | None = None, size: int | None = None, seed: int = 0
) -> Dataset:
    """Load a data set into memory.

    It is looked for in `root` (or the folder in ``LABKIT_DATA``), then in the user's cache, and then
    downloaded into the cache.

    Parameters
    ----------
    name
        ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``; ``"digits"``: scikit-learn's 1,797 digits, which
        need no network; ``"auto"``: MNIST where it can be had, else digits.
    root
        A folder in torchvision's layout (``MNIST/raw/…``); default: the environment variable
        ``LABKIT_DATA``.
    size
        Training images to keep, drawn by `seed`; default: all. Digits are multiplied by small shifts,
        turns and scalings up to this many, by default 10,000. The test set is always whole.
    seed
        Seed of that draw.

    Returns
    -------
    Dataset
        Images are uint8, N×C×H×W; `Dataset.source` says where they came from.

    Raises
    ------
    DataError
        For an unknown name, a folder that is not there, a file that is truncated or corrupt, or a data set
        that can be had nowhere.
    """
    name = _known_name(name)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise DataError(f"size must be a number of training images, at least 1, not {size!r}")
    if name == "digits":
        dataset = load_digits(size, seed)
    elif name == "auto":
        try:
            dataset = _load_known("mnist", root, size, seed)
        except NotAvailableError as error:
            digits = load_digits(size, seed)
            log.warning("%s\nIn place of MNIST: %s.", error, digits.source)
            dataset = Dataset(
                digits.name, digits.train, digits.test, digits.classes, f"in place of MNIST: {digits.source}"
            )
    else:
        dataset = _load_known(name, root, size, seed)
    facts.record("data set", repr(dataset))
    return dataset


def _load_known(name: str, root: str | os.PathLike[str] | None, size: int | None, seed: int) -> Dataset:
    known = KNOWN[name]
    train, test, source = _find(name, known, root)
    if size is not None and size < len(train):
        source += f", {size:,} of {len(train):,} training images (seed {seed})"
        train = train.take(torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:size])
    elif size is not None and size > len(train):
        raise DataError(f"{name} has {len(train):,} training images, {size:,} were asked for")
    return Dataset(name, train, test, known.classes, source)


def _find(name: str, known: Known, root: str | os.PathLike[str] | None) -> tuple[Tensors, Tensors, str]:
    own = _own_folder(root)
    cache = cache_folder()
    places = [(own, f"from {own}")] if own else []
    for place, source in [*places, (cache, f"from the cache {cache}")]:
        if (place / known.folder).is_dir():
            return *known.read(known, place), source
    try:
        fetch(lambda: _torchvision_class(known), known.folder, cache)
    except NotAvailableError as error:
        looked = " or ".join(str(place / known.folder) for place, _ in [*places, (cache, "")])
        raise NotAvailableError(
            f"{name} is not in {looked}, and {error}. Without a network: copy it into a folder in "
            f"torchvision's layout ({known.folder}/…) and set LABKIT_DATA to that folder, or take "
            'data.load("digits"), which needs none.'
        ) from error
    return *known.read(known, cache), f"downloaded to {cache}"


def _own_folder(root: str | os.PathLike[str] | None) -> Path | None:
    given = root if root is not None else os.environ.get("LABKIT_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        what = "root" if root is not None else "LABKIT_DATA"
        state = "is no folder" if folder.exists() else "is not there"
        raise DataError(f"{what} is {folder}, which {state}; give a folder in torchvision's layout (MNIST/raw/…)")
    return folder


def _known_name(name: str) -> str:
    plain = name.strip().lower().replace("_", "-") if isinstance(name, str) else ""
    if plain in NAMES:
        return plain
    nearest = difflib.get_close_matches(plain, NAMES, n=1, cutoff=0.4)
    hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
    raise DataError(f"there is no data set {name!r}; there are {', '.join(NAMES)}.{hint}")


def _read_idx_set(known: Known, place: Path) -> tuple[Tensors, Tensors]:
    raw = place / known.folder / "raw"
    train = _read_idx_pair(raw, "train")
    test = _read_idx_pair(raw, "t10k")
    first = Tensors(*train)
    return first, Tensors(*test, first.mean, first.std)


def _read_idx_pair(raw: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    pair = []
    for kind, dimensions in (("images", 3), ("labels", 1)):
        file = raw / f"{part}-{kind}-idx{dimensions}-ubyte"
        packed = file.with_name(file.name + ".gz")
        path = file if file.exists() or not packed.exists() else packed
        if not path.exists():
            raise DataError(f"{file} is not there (nor as .gz): the data set in {raw} is not whole; copy it anew")
        pair.append(read_idx(path, dimensions))
    images, labels = pair
    if len(images) != len(labels):
        raise DataError(f"{raw} has {len(images):,} {part} images but {len(labels):,} labels; copy it anew")
    return images.unsqueeze(1), labels.to(torch.int64)


def _read_cifar(known: Known, place: Path) -> tuple[Tensors, Tensors]:
    from torchvision.datasets.utils import check_integrity

    cifar = _torchvision_class(known)
    folder = place / known.folder
    # The files are pickles: they are opened only when their checksums are the published ones.
    for name, md5 in [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]:
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is not there: the data set in {folder} is not whole; copy it anew")
        if not check_integrity(path, md5):
            raise DataError(
                f"{path} is truncated or corrupt: its {path.stat().st_size:,} bytes do not have the md5 "
                f"{md5} of the published file; delete {folder} and load the data set again, or copy it anew"
            )
    parts = []
    for train in (True, False):
        half = cifar(place, train=train)
        images = torch.from_numpy(half.data).permute(0, 3, 1, 2).contiguous()
        parts.append((images, torch.tensor(half.targets, dtype=torch.int64)))
    first = Tensors(*parts[0])
    return first, Tensors(*parts[1], first.mean, first.std)


def _torchvision_class(known: Known) -> type[Any]:
    # Imported only here: it takes several times longer than reading MNIST does.
    import torchvision.datasets

    found: type[Any] = getattr(torchvision.datasets, known.torchvision)
    return found


FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

KNOWN = {
    "mnist": Known("MNIST", "MNIST", tuple("0123456789"), _read_idx_set),
    "fashion-mnist": Known("FashionMNIST", "FashionMNIST", FASHION, _read_idx_set),
    "cifar10": Known("CIFAR10", "cifar-10-batches-py", OBJECTS, _read_cifar),
}
NAMES = (*KNOWN, "digits", "auto")
"""The names `load` knows."""
