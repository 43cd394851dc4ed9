"""What a training run did, step by step and epoch by epoch."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .monitor import Resources

__all__ = ["EpochRow", "History", "Steps", "versions"]


@dataclass(slots=True)
class Steps:
    """One number a step, each a float64 array.

    Attributes
    ----------
    loss
        Mean over all ranks' samples; over this rank's where each goes at its own pace.
    rank_loss
        Mean over this rank's samples; NaN where it had none.
    compute_s, wait_s, transfer_s
        Seconds of this rank: forward, backward and optimizer; waiting for other ranks; moving data.
    samples
        Of this rank.
    lr
        Learning rate.
    staleness
        Updates that others had applied to the weights between this rank's reading them and the use of its gradient;
        0 where all step together.
    time_s
        When the step ended, in seconds since the run began.
    """

    loss: np.ndarray
    rank_loss: np.ndarray
    compute_s: np.ndarray
    wait_s: np.ndarray
    transfer_s: np.ndarray
    samples: np.ndarray
    lr: np.ndarray
    staleness: np.ndarray
    time_s: np.ndarray

    @classmethod
    def empty(cls) -> Steps:
        """Return no steps."""
        return cls(*np.empty((len(fields(cls)), 0)))

    def __len__(self) -> int:
        return len(self.rank_loss)


@dataclass(slots=True)
class EpochRow:
    """One epoch; accuracies are shares, 0…1, and losses are means over samples.

    Attributes
    ----------
    epoch
        From 1.
    steps
        Steps made; where each rank goes at its own pace, by all of them.
    loss, accuracy
        Over all ranks' training samples, as they were seen.
    rank_loss, rank_accuracy
        Over this rank's.
    test_loss, test_accuracy
        Over the whole test set, which the ranks share; NaN without validation.
    seconds, test_seconds
        Wall-clock time of the training, and how long it stood still for the test.
    images_per_s
        Training images of all ranks a second.
    replica_difference
        Largest difference of any parameter on any rank from rank 0's; NaN when not checked.
    time_s
        When the epoch ended, its test included, in seconds since the run began.
    """

    epoch: int
    steps: int
    loss: float
    accuracy: float
    rank_loss: float
    rank_accuracy: float
    seconds: float
    images_per_s: float
    test_loss: float = math.nan
    test_accuracy: float = math.nan
    test_seconds: float = 0.0
    replica_difference: float = math.nan
    time_s: float = math.nan

    def line(self, epochs: int) -> str:
        """Return the epoch in one line."""
        words = [
            f"epoch {self.epoch}/{epochs}",
            f"loss {self.loss:.4f}",
            f"accuracy {self.accuracy:.2%}",
            *([] if math.isnan(self.test_loss) else [f"test loss {self.test_loss:.4f}"]),
            *([] if math.isnan(self.test_accuracy) else [f"test accuracy {self.test_accuracy:.2%}"]),
            f"{self.seconds:.1f} s",
            f"{self.images_per_s:,.0f} images/s",
            *([] if math.isnan(self.replica_difference) else [f"replicas differ by {self.replica_difference:g}"]),
        ]
        return "  ".join(words)


@dataclass(slots=True)
class History:
    """A training run as this rank saw it.

    Attributes
    ----------
    rank, world_size
        This rank, and how many trained.
    settings
        What training was called with.
    versions
        Of Python, the packages, and what carried the gradients.
    steps
        Arrays with one number a step.
    epochs
        One row an epoch.
    copies
        Gradients copied into the flat buffer: 0 when autograd wrote there itself.
    stopped
        Why it ended early, or None.
    by_rank
        Every rank's steps, on rank 0; elsewhere empty.
    resources
        What every rank's process used of the machine, on rank 0 and with ``monitor=True``; else empty.
    parts
        Seconds of parts of this rank's steps, one array a part, where the method times them apart; of a run that went
        on from a checkpoint, since then.
    changes
        Where ranks can be lost and taken back: which trained from which step on. Each change has the ``step`` (from
        0, of this history), ``time_s`` since the run began, the ``ranks`` that train from there on, and those that
        were ``lost`` and ``joined``.
    """

    rank: int
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps.empty)
    epochs: list[EpochRow] = field(default_factory=list)
    copies: int = 0
    stopped: str | None = None
    by_rank: list[Steps] = field(default_factory=list)
    resources: list[Resources] = field(default_factory=list)
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def changed(self, step: int, ranks: list[int], time_s: float) -> None:
        """Note that from `step` on these ranks train."""
        before = self.changes[-1]["ranks"] if self.changes else ranks
        lost, joined = sorted(set(before) - set(ranks)), sorted(set(ranks) - set(before))
        self.changes.append({"step": step, "time_s": time_s, "ranks": ranks, "lost": lost, "joined": joined})

    def world_sizes(self) -> np.ndarray:
        """How many ranks trained at each step: int64, as long as the steps."""
        sizes = np.full(len(self.steps), self.world_size)
        for change in self.changes:
            sizes[change["step"] :] = len(change["ranks"])
        return sizes

    @property
    def method(self) -> str:
        """How it trained."""
        return str(self.settings.get("method", ""))

    @property
    def test_accuracy(self) -> float:
        """Test accuracy after the last epoch; NaN when none was measured."""
        return self.epochs[-1].test_accuracy if self.epochs else math.nan

    @property
    def seconds(self) -> float:
        """Wall-clock time of all epochs, tests included."""
        return sum(row.seconds + row.test_seconds for row in self.epochs)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file is there as a whole or not at all.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        target = Path(path)
        content = json.dumps(_plain(asdict(self) | {"seconds": self.seconds}), allow_nan=False)
        with tempfile.NamedTemporaryFile(
            "w",
            dir=target.parent,
            prefix=f".{target.name}.",
            suffix=".partial",
            delete=False,
            encoding="utf-8",
        ) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If the file is no history.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            del content["seconds"]
            steps, *by_rank = [_steps(each) for each in (content.pop("steps"), *content.pop("by_rank"))]
            resources = [Resources(**_arrays(each)) for each in content.pop("resources", [])]
            rows = [EpochRow(**{name: _number(value) for name, value in row.items()}) for row in content.pop("epochs")]
            parts = _arrays(content.pop("parts", {}))
            return cls(steps=steps, epochs=rows, by_rank=by_rank, resources=resources, parts=parts, **content)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no training history: {error}") from error

    def __repr__(self) -> str:
        last = f"; {self.epochs[-1].line(len(self.epochs))}" if self.epochs else ""
        stopped = f"; {self.stopped}" if self.stopped else ""
        return f"History(rank {self.rank} of {self.world_size}, {len(self.steps)} steps{last}{stopped})"

    def _repr_html_(self) -> str:
        columns: list[tuple[str, Callable[[EpochRow], str]]] = [
            ("epoch", lambda row: str(row.epoch)),
            ("loss", lambda row: f"{row.loss:.4f}"),
            ("accuracy", lambda row: f"{row.accuracy:.2%}"),
            ("test loss", lambda row: _or_dash(row.test_loss, ".4f")),
            ("test accuracy", lambda row: _or_dash(row.test_accuracy, ".2%")),
            ("seconds", lambda row: f"{row.seconds:.1f}"),
            ("images/s", lambda row: f"{row.images_per_s:,.0f}"),
            ("replicas differ by", lambda row: _or_dash(row.replica_difference, "g")),
        ]
        head = "".join(f"<th>{name}</th>" for name, _ in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{show(row)}</td>" for _, show in columns) + "</tr>" for row in self.epochs
        )
        caption = f"rank {self.rank} of {self.world_size}; {self.settings.get('dataset', '')}"
        if self.stopped:
            caption += f"; {self.stopped}"
        return (
            f"<table><caption>{html.escape(caption)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def versions(transport: str) -> dict[str, str]:
    """Return the versions that a result depends on; `transport` says what carried the gradients."""
    found = {"python": platform.python_version(), "transport": transport}
    for package in ("labkit", "torch", "numpy", "mpi4py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _or_dash(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _plain(value: Any) -> Any:
    """Turn arrays into lists and what JSON lacks into null (NaN) or a string (infinities)."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _steps(columns: dict[str, list[Any]]) -> Steps:
    return Steps(**_arrays(columns))


def _arrays(columns: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([_number(value) for value in column], np.float64) for name, column in columns.items()}


def _number(value: Any) -> Any:
    """Undo what `_plain` did to a number that JSON lacks."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, str) else value
