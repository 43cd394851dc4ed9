"""What a chart is drawn from: each rank's steps as arrays, whatever they came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["Run", "reduced"]

MOST_POINTS = 600
"""Points drawn of one line: more than a screen shows, few enough for four draws a second."""


@dataclass(frozen=True)
class Run:
    """The steps of one run: for each rank, equally long arrays by column name.

    Columns are those of `labkit.telemetry.COLUMNS`; ``step``, and whatever a chart asks for, must be there.
    """

    ranks: dict[int, dict[str, np.ndarray]]
    mean_loss: np.ndarray | None = None
    """Loss of each step over all ranks, where it was measured rather than averaged here."""

    @classmethod
    def of(cls, source: Any) -> Run:
        """Read a run from where it is kept.

        Parameters
        ----------
        source
            A `Run`, a `labkit.telemetry.Store`, a `labkit.train.History` or several (one of each rank), a
            mapping from ranks to columns, or a mapping of columns (one array each, or ranks by steps).

        Raises
        ------
        TypeError
            If it is none of these.
        ValueError
            If columns differ in length.
        """
        if isinstance(source, Run):
            return source
        if hasattr(source, "series") and hasattr(source, "shown"):
            return cls({rank: source.series(rank) for rank in source.shown()})
        if hasattr(source, "steps") and hasattr(source.steps, "rank_loss"):
            every = dict(enumerate(getattr(source, "by_rank", []))) or {source.rank: source.steps}
            own = {rank: _of_history(steps) for rank, steps in every.items()}
            return cls(own, np.asarray(source.steps.loss, dtype=float))
        if isinstance(source, Sequence) and source and not isinstance(source, str):
            runs = [cls.of(each) for each in source]
            return cls({rank: columns for run in runs for rank, columns in run.ranks.items()}, runs[0].mean_loss)
        if isinstance(source, Mapping) and source:
            if all(isinstance(key, int) for key in source):
                return cls({rank: _columns(columns) for rank, columns in source.items()})
            if "loss" in source or "compute_s" in source:
                return cls(_by_rank(source))
        raise TypeError(
            f"cannot draw a {type(source).__name__}: expected a History, a Store, or a mapping with "
            "arrays such as 'step' and 'loss'"
        )

    @property
    def steps(self) -> int:
        """Number of the last step of any rank, counted from 1; 0 before the first."""
        last = [int(columns["step"][-1]) for columns in self.ranks.values() if len(columns["step"])]
        return max(last, default=-1) + 1

    def step_ms(self, rank: int) -> np.ndarray:
        """Return how long each step of a rank took, in milliseconds."""
        columns = self.ranks[rank]
        return np.asarray(columns["compute_s"] + columns["wait_s"] + columns["transfer_s"]) * 1000

    def mean(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that all ranks have, and the mean of a column over ranks at each."""
        tables = [(c["step"], c[column]) for c in self.ranks.values() if len(c["step"])]
        if not tables:
            return np.empty(0), np.empty(0)
        if column == "loss" and self.mean_loss is not None:
            return np.arange(len(self.mean_loss), dtype=float), self.mean_loss
        common = tables[0][0]
        for steps, _ in tables[1:]:
            common = np.intersect1d(common, steps)
        total = sum(values[np.searchsorted(steps, common)] for steps, values in tables)
        return common, np.asarray(total) / len(tables)


def reduced(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points of a line that look the same.

    Each stretch keeps its lowest and its highest point, and the line both its ends.
    """
    count = len(x)
    if count <= most:
        return x, y
    edges = np.linspace(1, count - 1, max(1, (most - 2) // 2) + 1).astype(int)
    chosen = {0, count - 1}
    filled = np.where(np.isfinite(y), y, np.nan)
    for start, stop in pairwise(edges):
        part = filled[start:stop]
        if part.size and not np.isnan(part).all():
            chosen.update((start + int(np.nanargmin(part)), start + int(np.nanargmax(part))))
        elif part.size:
            chosen.add(int(start))  # a stretch of NaN stays a gap
    index = np.array(sorted(chosen))
    return x[index], y[index]


_NAMES = ("step", "epoch", "time", "loss", "compute_s", "wait_s", "transfer_s", "samples")


def _of_history(steps: Any) -> dict[str, np.ndarray]:
    names = ("compute_s", "wait_s", "transfer_s", "samples", "staleness", "time_s")
    return _columns({"loss": steps.rank_loss, **{name: getattr(steps, name) for name in names if hasattr(steps, name)}})


def _columns(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of different lengths: {lengths}")
    length = next(iter(lengths.values()), 0)
    arrays.setdefault("step", np.arange(length, dtype=float))
    return arrays


def _by_rank(columns: Mapping[str, Any]) -> dict[int, dict[str, np.ndarray]]:
    arrays = {name: np.asarray(columns[name], dtype=float) for name in _NAMES if name in columns}
    ranks = max((values.shape[0] for values in arrays.values() if values.ndim == 2), default=1)
    # A column that all ranks share, such as the step number, is given once.
    return {
        rank: _columns({name: a[rank] if a.ndim == 2 else a for name, a in arrays.items()}) for rank in range(ranks)
    }
