"""Finding files by path and pattern, and what to do with those that cannot be used."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from .errors import DataError
from .readers import Header, is_labels_file, read_samples
from .tensors import statistics

__all__ = ["Paths", "Problems", "class_names", "figures_given", "figures_of", "find_files", "usual"]

log = logging.getLogger("labkit.data")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Figures = tuple[tuple[float, ...], tuple[float, ...]]
Thing = TypeVar("Thing")
Result = TypeVar("Result")
SHOWN = 5
"""How many bad files an error names before it says how many more there are."""


def find_files(paths: Paths, what: str) -> list[Path]:
    """Return the files that `paths` and patterns name, each once; those of a pattern by name.

    Of a pattern's files, those with an IDX file's labels are left out, and a packed file beside the same unpacked one.

    Raises
    ------
    DataError
        When a pattern fits no file, or a file is named twice.
    """
    found: list[Path] = []
    for given in [paths] if isinstance(paths, str | os.PathLike) else paths:
        pattern = os.path.expanduser(os.fspath(given))
        if Path(pattern).exists() or not glob.has_magic(pattern):
            found.append(Path(pattern))
            continue
        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        twins = {match.with_name(f"{match.name}.gz") for match in matches}
        fitting = [m for m in matches if m.is_file() and not is_labels_file(m) and m not in twins]
        if not fitting:
            raise DataError(f"{what}: no file fits {pattern!r} (in {Path.cwd()})")
        found += fitting
    if not found:
        raise DataError(f"{what}: no files were given")
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise DataError(f"{what}: {path} is given twice; its samples would come twice an epoch")
        seen.add(path.resolve())
    return found


class Problems:
    """What was found wrong with files: raised together, or told and those files left out.

    Parameters
    ----------
    skip_bad
        Whether to leave them out.
    """

    def __init__(self, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self._errors: list[DataError] = []

    def attempt(self, read: Callable[[Thing], Result], thing: Thing) -> Result | None:
        """Return ``read(thing)``, or None where that raises a `DataError`, which is noted."""
        try:
            return read(thing)
        except DataError as error:
            self._errors.append(error)
            return None

    def fits(self, header: Header, alike: Header | None, classes: tuple[str, ...]) -> bool:
        """Return whether a file has images such as `alike` and labels of these classes; note it where not."""
        if alike is not None and (header.shape, header.dtype) != (alike.shape, alike.dtype):
            self._errors.append(
                DataError(
                    f"{header.path}: each image is {header.in_words}; expected {alike.in_words}, as in most of the "
                    f"training files ({alike.path.name})"
                )
            )
            return False
        if header.highest >= len(classes):
            self._errors.append(
                DataError(
                    f"{header.path}: the labels go up to {header.highest}; expected at most {len(classes) - 1}, since "
                    f"there are {len(classes)} classes"
                )
            )
            return False
        return True

    def settle(self) -> None:
        """Raise what was noted, or tell it.

        Raises
        ------
        DataError
            Unless bad files are left out.
        """
        errors, self._errors = self._errors, []
        if self._skip_bad:
            for error in errors:
                log.warning("left out: %s", error)
        elif len(errors) == 1:
            raise errors[0]
        elif errors:
            more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
            named = "".join(f"\n  {error}" for error in errors[:SHOWN])
            raise DataError(f"{len(errors)} files cannot be used:{named}{more}")


def usual(headers: Sequence[Header]) -> Header | None:
    """Return the first file whose images have the shape and dtype that most have: the first of all may be a bad one."""
    counts = Counter((header.shape, header.dtype) for header in headers)
    return max(headers, key=lambda header: counts[header.shape, header.dtype], default=None)


def class_names(classes: Sequence[str] | int | None, headers: Iterable[Header]) -> tuple[str, ...]:
    """Return the classes' names: as given, or numbers up to the highest label."""
    if classes is None:
        classes = 1 + max((header.highest for header in headers), default=0)
    if isinstance(classes, int):
        if isinstance(classes, bool) or classes < 1:
            raise DataError(f"classes must be names, or how many there are, at least 1; not {classes!r}")
        return tuple(map(str, range(classes)))
    return tuple(classes)


def figures_given(mean: Sequence[float] | None, std: Sequence[float] | None, header: Header) -> Figures | None:
    """Return mean and standard deviation as given, None where they are not; those of float samples are 0 and 1."""
    if header.dtype != torch.uint8:
        return (0.0,), (1.0,)
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise DataError("give both mean and std, or neither")
    channels = header.shape[0]
    if len(mean) != channels or len(std) != channels or not all(deviation > 0 for deviation in std):
        raise DataError(
            f"mean and std must be {channels} number{'s' if channels > 1 else ''} each, one a channel, std above 0; "
            f"they are {tuple(mean)} and {tuple(std)}"
        )
    return tuple(map(float, mean)), tuple(map(float, std))


def figures_of(header: Header) -> Figures:
    """Return the mean and standard deviation of a file of uint8 images, by channel."""
    return statistics(read_samples(header)[0])
