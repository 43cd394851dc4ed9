"""Checkpoint files: what `torch.save` writes, and one line behind it with a checksum; `torch.load` opens them, too."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .replicas import TrainError

__all__ = ["BEST", "LATEST", "PREVIOUS", "CheckpointError", "Every", "find", "load_checkpoint", "pack", "read"]

LATEST, PREVIOUS, BEST = "latest.pt", "previous.pt", "best.pt"
TRAILER = re.compile(rb"\nlabkit checkpoint 1 sha256 ([0-9a-f]{64})\n\Z")
TRAILER_BYTES = len("\nlabkit checkpoint 1 sha256 \n") + 64


class CheckpointError(TrainError):
    """A checkpoint cannot be written or used; the message names the file and the cure."""


@dataclass(frozen=True)
class Every:
    """How often checkpoints are written: one of both is None.

    Attributes
    ----------
    epochs
        After so many epochs.
    seconds
        At the first step after so many seconds.
    """

    epochs: int | None
    seconds: float | None

    @classmethod
    def parse(cls, given: int | str) -> Every:
        """Read the setting ``checkpoint_every``.

        Raises
        ------
        ValueError
            If it is neither a number of epochs nor one of seconds.
        """
        if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
            return cls(given, None)
        if isinstance(given, str) and re.fullmatch(r"\d+(\.\d*)?\s*s", given):
            return cls(None, float(given.rstrip("s ")))
        raise ValueError(
            f'checkpoint_every must be a number of epochs such as 1, or of seconds as "30s", not {given!r}'
        )


def load_checkpoint(path: str | os.PathLike[str], which: str = "latest") -> dict[str, Any]:
    """Read a checkpoint.

    Parameters
    ----------
    path
        A file, or the folder that a training was given as ``checkpoint``.
    which
        Of a folder: ``"latest"`` (if that is damaged, the one before it), ``"previous"`` or ``"best"``.

    Returns
    -------
    dict
        ``"model"`` is the model's ``state_dict``, ``"optimizer"`` the optimizer's, ``"epoch"`` how many epochs were
        whole, ``"step"`` how many steps of the next one were made.

    Raises
    ------
    CheckpointError
        If it is not there, or damaged.

    Examples
    --------
    >>> model.load_state_dict(train.load_checkpoint("runs/first", "best")["model"])
    """
    if which not in ("latest", "previous", "best"):
        raise ValueError(f'which must be "latest", "previous" or "best", not {which!r}')
    if which == "latest":
        return find(Path(path))[0]
    return read(Path(path) / f"{which}.pt")


def find(path: Path) -> tuple[dict[str, Any], Path, str | None]:
    """Return the checkpoint to go on from, its file, and why it is not the latest one, where it is not.

    Raises
    ------
    CheckpointError
        If there is none that can be used.
    """
    if not path.is_dir():
        return read(path), path, None
    latest, previous = path / LATEST, path / PREVIOUS
    if not latest.exists() and not previous.exists():
        raise CheckpointError(f"there is no checkpoint in {path}: neither {LATEST} nor {PREVIOUS}")
    try:
        return read(latest), latest, None
    except CheckpointError as error:
        problem = str(error)
    try:
        return read(previous), previous, problem
    except CheckpointError as error:
        raise CheckpointError(f"{problem}; and {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds.

    Raises
    ------
    CheckpointError
        If it is not there, or not as it was written.
    """
    try:
        written = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    trailer = TRAILER.search(written, max(0, len(written) - TRAILER_BYTES))
    if trailer is None:
        raise CheckpointError(f"{path} is cut short, or no checkpoint of labkit's: its checksum is missing")
    content = memoryview(written)[: trailer.start()]
    if hashlib.sha256(content).hexdigest().encode() != trailer[1]:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read by this version of torch: {error}") from error
    if not isinstance(found, dict) or not {"model", "optimizer", "epoch", "step", "ranks"} <= found.keys():
        raise CheckpointError(f"{path} is no checkpoint of a training")
    return found


def pack(content: dict[str, Any]) -> bytes:
    """Return a file's bytes; `content` is tensors, numbers, strings, and dicts, lists and tuples of them."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(f"\nlabkit checkpoint 1 sha256 {digest}\n".encode())
    return buffer.getvalue()
