"""What reducing the gradients adds to a training step, in each way that `train.synchronous` has."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 500
CONTROL, AGAIN = "none", "none again"
OURS, DDP, GLOO = "overlap", "ddp on mpi", "ddp on gloo"
ADDED_PERCENT = {"LeNet": 2.0, "CNN": 2.0, "MLP": 20.0}
OR_SPREAD = ("CNN",)
"""For these as much as two measurements without communication differ by is as good."""
RANKS_WITH_BOUNDS = 2
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
"""glibc keeps the memory of the last step's gradients. Otherwise it depends on how the heap happens to lie whether a
step gets new pages from the system, which takes as long as the communication."""


def run(*, quick: bool = False, ranks: Sequence[int] = (RANKS_WITH_BOUNDS,)) -> Outcome:
    """Measure all ways in turn, for three models, 64 images a rank (`quick`: few rounds).

    A row gives milliseconds of a step (forward, backward, reduction, optimizer) on the slowest rank, and what it takes
    longer than one without communication in the same round. That is measured twice: "none again" shows how far two
    measurements of the same thing are apart. All ranks begin each step together, so a rank's wait for one that began
    late does not count. Freed memory is kept for the next step, alike in all ways. Each rank has one thread, and a
    core of its own where there are enough.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        for measured in measure("labkit.bench.step_ranks", size, quick=quick, limit_s=LIMIT_S, variables=KEEPING):
            rows += _rows(size, measured)
            goals += _goals(size, measured)
    return Outcome("step", rows, goals)


def _rows(ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "model": measured["model"],
            "parameters": measured["parameters"],
            "ranks": ranks,
            "way": way,
            "ms": spread(ms),
            "added_percent": spread(_added(measured["ms"], way)),
        }
        for way, ms in measured["ms"].items()
    ]


def _added(ms: dict[str, list[float]], way: str) -> list[float]:
    """Percent that a step takes longer than without communication, round by round.

    The way itself is no part of what it is compared with.
    """
    controls = [name for name in (CONTROL, AGAIN) if name != way]
    without = [sum(each) / len(each) for each in zip(*(ms[name] for name in controls), strict=True)]
    return [100 * (mine / base - 1) for mine, base in zip(ms[way], without, strict=True)]


def _goals(ranks: int, measured: dict[str, Any]) -> list[Goal]:
    model, ms = measured["model"], measured["ms"]
    about = f"{model}, {ranks} ranks"
    added = {way: median(_added(ms, way)) for way in (OURS, DDP, GLOO)}
    if ranks != RANKS_WITH_BOUNDS:
        return [
            Goal(f"{about}: % that {way} adds, at most what {GLOO} does", added[way], added[GLOO])
            for way in (OURS, DDP)
        ]
    limit, words = ADDED_PERCENT[model], ""
    if model in OR_SPREAD:
        limit = max(limit, median(abs(each) for each in _added(ms, AGAIN)))
        words = ", or the control's own spread"
    return [
        Goal(f"{about}: % that {OURS} adds{words}", added[OURS], limit),
        Goal(f"{about}: % that {DDP} adds, at most half of what {GLOO} does", added[DDP], added[GLOO] / 2),
    ]
