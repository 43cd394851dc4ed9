"""The notebook's memory of a run: bounded, and always the whole run in view."""

from __future__ import annotations

import threading

import numpy as np

from .events import COLUMNS, Step

__all__ = ["Store"]

_STEP, _TIME, _SAMPLES = COLUMNS.index("step"), COLUMNS.index("time"), COLUMNS.index("samples")
SAME_RUN_S = 1.0
"""Ranks whose runs began within this many seconds of each other show one run: they begin it together,
but each by its own clock."""


class _Series:
    """The rows of one rank's latest run, thinned to every 2nd, 4th, … when the buffer is full."""

    def __init__(self, capacity: int) -> None:
        # zeros that are written, not np.empty: the memory is taken at once and does not grow later.
        self.rows = np.full((capacity, len(COLUMNS)), 0.0)
        self.last = np.zeros(len(COLUMNS))
        self.run = 0.0
        self.clear(0.0, 0.0)

    def clear(self, run: float, begun: float) -> None:
        self.run, self.begun = run, begun
        self.kept = self.seen = 0
        self.stride = 1
        self.samples = 0.0

    def append(self, rows: np.ndarray) -> None:
        for first in range(0, len(rows), len(self.rows)):
            self._append(rows[first : first + len(self.rows)])
        self.last[:] = rows[-1]
        self.samples += float(np.nansum(rows[:, _SAMPLES]))

    def _append(self, rows: np.ndarray) -> None:
        while True:
            chosen = rows[-self.seen % self.stride :: self.stride]
            if self.kept + len(chosen) <= len(self.rows):
                break
            # Rows at 0, 2, 4 … stay: their numbers in the run remain multiples of the doubled stride.
            half = -(-self.kept // 2)
            self.rows[:half] = self.rows[: self.kept : 2]
            self.kept = half
            self.stride *= 2
        self.rows[self.kept : self.kept + len(chosen)] = chosen
        self.kept += len(chosen)
        self.seen += len(rows)

    def table(self) -> np.ndarray:
        table = self.rows[: self.kept]
        if self.seen and (self.seen - 1) % self.stride:
            return np.vstack([table, self.last])
        return table.copy()


class Store:
    """Holds the latest run of every rank in memory that is taken once and never grows.

    When a rank's buffer is full, every second row goes, so that the whole run stays in view, from its
    first to its last step. A new run replaces a rank's former one; ranks that take no part in the newest
    run are not shown.

    Parameters
    ----------
    ranks
        Ranks in the world.
    capacity
        Rows kept for each rank; an odd number is rounded up.

    Attributes
    ----------
    received
        Steps added, in all runs.
    dropped
        Steps that ranks could not send, in all runs; set by the collector.
    """

    def __init__(self, ranks: int, capacity: int = 4096) -> None:
        if ranks < 1:
            raise ValueError(f"a store needs at least 1 rank, not {ranks}")
        if capacity < 2:
            raise ValueError(f"a store needs room for at least 2 steps a rank, not {capacity}")
        self.ranks = ranks
        self.capacity = capacity + capacity % 2
        self.received = 0
        self.dropped = 0
        self._lock = threading.Lock()
        self._series = [_Series(self.capacity) for _ in range(ranks)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: constant over the store's life."""
        return sum(series.rows.nbytes + series.last.nbytes for series in self._series)

    @property
    def run(self) -> float:
        """When the latest run began, in seconds since the epoch; 0 before any."""
        with self._lock:
            return self._latest()

    def add(self, rank: int, rows: np.ndarray, run: float = 0.0) -> None:
        """Add a rank's steps.

        Parameters
        ----------
        rank
            The rank, from 0.
        rows
            An array of float64, steps by `COLUMNS`, in the order they happened.
        run
            When their run began (seconds since the epoch); 0: not said. A step number lower than the one
            before also begins a new run.

        Raises
        ------
        ValueError
            If the rank is not one of the world's or the rows have another shape.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of this store's {self.ranks}")
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS):
            raise ValueError(f"rows of shape {rows.shape}; expected (steps, {len(COLUMNS)})")
        series = self._series[rank]
        with self._lock:
            self.received += len(rows)
            if run > series.run:
                series.clear(run, run)
            if not len(rows):
                return
            if run == 0 and series.run:
                series.clear(0.0, float(rows[0, _TIME]))  # a new connection that names no run
            elif run < series.run:
                return  # late steps of an earlier run: counted, not shown
            steps = rows[:, _STEP]
            first = series.last[_STEP] if series.seen else steps[0]
            before = np.concatenate([[first], steps[:-1]])
            for part in np.split(rows, np.flatnonzero(steps < before)):
                if not len(part):
                    continue
                if series.seen and part[0, _STEP] < series.last[_STEP]:
                    series.clear(run, float(part[0, _TIME]))
                elif not series.seen and not series.begun:
                    series.begun = float(part[0, _TIME])
                series.append(part)

    def shown(self) -> list[int]:
        """Return the ranks that have steps in the latest run."""
        with self._lock:
            return [rank for rank in range(self.ranks) if self._in_view(rank)]

    def series(self, rank: int) -> dict[str, np.ndarray]:
        """Return a copy of a rank's steps of the latest run, an array for each of `COLUMNS`.

        The arrays are empty where the rank has taken no part in that run.
        """
        with self._lock:
            table = self._series[rank].table() if self._in_view(rank) else np.empty((0, len(COLUMNS)))
        return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(COLUMNS)}

    def latest(self, rank: int) -> Step | None:
        """Return a rank's last step of the latest run, None if it has none."""
        with self._lock:
            if not self._in_view(rank):
                return None
            return Step.from_row(rank, tuple(self._series[rank].last))

    def samples(self) -> float:
        """Return the samples that all ranks together went through in the latest run."""
        with self._lock:
            return sum(series.samples for rank, series in enumerate(self._series) if self._in_view(rank))

    def reset(self) -> None:
        """Forget all steps and counts; the memory stays."""
        with self._lock:
            self.received = self.dropped = 0
            for series in self._series:
                series.clear(0.0, 0.0)

    def _latest(self) -> float:
        return max(series.begun for series in self._series)

    def _in_view(self, rank: int) -> bool:
        series = self._series[rank]
        return series.seen > 0 and series.begun >= self._latest() - SAME_RUN_S
