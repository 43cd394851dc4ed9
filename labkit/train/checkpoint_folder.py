"""The folder of one run's checkpoints: whenever the process that writes them dies, a whole one is there.

A checkpoint is written to another name, brought to the disk, and only then renamed; the one before it stays until
then, and as ``previous.pt`` after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

from .checkpoint import BEST, LATEST, PREVIOUS, CheckpointError, pack, read

__all__ = ["CheckpointFolder"]

PARTIAL, LOCK = "new.partial", ".lock"


class CheckpointFolder:
    """The folder into which one run writes. One run at a time: it is locked until `close`.

    Parameters
    ----------
    path
        Made if it is not there.
    needed
        Bytes that one checkpoint takes, about.
    going_on
        Whether the run goes on from a checkpoint. Another one does not write over those that are there.

    Raises
    ------
    CheckpointError
        If the run could not write here.
    """

    def __init__(self, path: Path, needed: int, going_on: bool) -> None:
        self.path = path
        self._epochs: dict[str, int | None] = {}  # file → the epoch at whose end it was written
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be written to {path}: {error.strerror}") from error
        try:
            self._take_lock()
            there = [name for name in (LATEST, PREVIOUS, BEST) if (path / name).exists()]
            if there and not going_on:
                raise CheckpointError(
                    f"{path} holds {there[0]} of an earlier run: go on from it by restore=True, or give another "
                    "folder, or remove it"
                )
            self._try_to_write(needed)
        except BaseException:
            self.close()
            raise

    def write(self, content: dict[str, Any], epoch: int | None) -> None:
        """Make `content` the latest checkpoint, and the latest the previous one.

        Parameters
        ----------
        content
            Tensors, numbers, strings, and dicts, lists and tuples of them.
        epoch
            The epoch at whose end this is; None: in the middle of one.

        Raises
        ------
        OSError
            If it cannot be written; the latest one is then as it was.
        """
        packed = pack(content)
        partial = self.path / PARTIAL
        try:
            with open(partial, "wb") as file:
                file.write(packed)
                file.flush()
                os.fsync(file.fileno())
            if (self.path / LATEST).exists():
                os.replace(self.path / LATEST, self.path / PREVIOUS)
                self._epochs[PREVIOUS] = self._epochs.get(LATEST)
            os.replace(partial, self.path / LATEST)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._epochs[LATEST] = epoch
        self._sync_names()

    def keep_best(self, scores: dict[int, float]) -> None:
        """Copy the latest or the previous checkpoint to ``best.pt`` if it is better than that.

        Parameters
        ----------
        scores
            How good the weights were at the end of each epoch whose score is known; more is better.

        Raises
        ------
        OSError
            If it cannot be written; the best one is then as it was.
        """
        best = self._epochs.get(BEST)
        limit = scores.get(best, -float("inf")) if best is not None else -float("inf")
        better = [
            (scores[epoch], name)
            for name in (PREVIOUS, LATEST)
            if (epoch := self._epochs.get(name)) in scores and epoch is not None and scores[epoch] > limit
        ]
        if not better:
            return
        _, name = max(better, key=lambda pair: pair[0])
        partial = self.path / PARTIAL
        try:
            with open(self.path / name, "rb") as source, open(partial, "wb") as file:
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path / BEST)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._epochs[BEST] = self._epochs[name]
        self._sync_names()

    def know(self, name: str, epoch: int | None) -> None:
        """Say at the end of which epoch a file that is there was written."""
        self._epochs[name] = epoch

    def put_damaged_aside(self) -> None:
        """Rename what cannot be used, so that it takes no good one's place; note of which epoch the best is."""
        for name in (LATEST, PREVIOUS, BEST):
            file = self.path / name
            if name in self._epochs or not file.exists():
                continue
            try:
                content = read(file)
            except CheckpointError:
                with contextlib.suppress(OSError):
                    os.replace(file, file.with_suffix(".damaged"))
            else:
                self._epochs[name] = content["epoch"] if content["step"] == 0 else None

    def close(self) -> None:
        """Let another run write here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run is writing its checkpoints to {self.path}: give each run a folder of its own"
            ) from error
        except OSError:
            return  # a file system without locks

    def _try_to_write(self, needed: int) -> None:
        partial = self.path / PARTIAL
        try:
            free = shutil.disk_usage(self.path).free
            with open(partial, "wb") as file:
                file.write(b"labkit")
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be written to {self.path}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        if free < needed:
            raise CheckpointError(
                f"no checkpoints can be written to {self.path}: {free / 1e6:,.0f} MB are free, and one needs about "
                f"{needed / 1e6:,.0f} MB"
            )

    def _sync_names(self) -> None:
        """Bring the renaming to the disk, too."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot
                os.fsync(folder)
        finally:
            os.close(folder)
