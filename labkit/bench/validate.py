"""How much of a run is saved by testing in a thread, or on all ranks, and not on rank 0 while the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 400
RANKS = (1, 2)
DISTRIBUTED_SAVES = 10.0
"""Percent: two ranks need half the time for the test, so they save about 15."""
DOCUMENT_SAVED, DOCUMENT_SHARE = 100 * 65 / 313, 100 * 89 / 313
"""Percent of a run of 313 s that the document D1 saved by a thread (65 s), and that its validation took (89 s)."""


def run(*, quick: bool = False, ranks: Sequence[int] = RANKS) -> Outcome:
    """Measure all ways in turn: twelve epochs of LeNet on digits or MNIST, one thread a rank (`quick`: few rounds).

    The test set is so large that the test on rank 0 takes about as large a share of the run as in the document.
    "saved_percent" is how much shorter the whole run is than with the test inline, in the same round; the wait for
    the last test is in it. "test_percent" is the share of the run in which training stood still for the test, "none" a
    run without one, and "D1_saved" and "D1_test" are the document's figures. What can be saved depends on the cores:
    the test is as much work as before, and where the ranks fill all cores it can only be spread over them, so 2 ranks
    on 2 cores save about half of the test's share at most, by either way. All of it, as a master on a GPU nearly does
    in the document, needs a core that is free.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        measured = measure("labkit.bench.validate_ranks", size, quick=quick, limit_s=LIMIT_S)
        rows += _rows(size, measured)
        goals += _goals(size, measured)
    return Outcome("validate", rows, goals)


def _rows(ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "ranks": ranks,
            "validate": way,
            "seconds": spread(measured["seconds"][way]),
            "test_percent": spread(_shares(measured, way)),
            "saved_percent": spread(_saved(measured, way)),
            "D1_saved": DOCUMENT_SAVED if way == "thread" else None,
            "D1_test": DOCUMENT_SHARE if way == "inline" else None,
            "free_cores": measured["free_cores"],
            "dataset": measured["dataset"],
        }
        for way in measured["seconds"]
    ]


def _shares(measured: dict[str, Any], way: str) -> list[float]:
    pairs = zip(measured["test_seconds"][way], measured["seconds"][way], strict=True)
    return [100 * test / whole for test, whole in pairs]


def _saved(measured: dict[str, Any], way: str) -> list[float]:
    """Percent of the inline run's time, round by round."""
    seconds = measured["seconds"]
    return [100 * (1 - mine / base) for mine, base in zip(seconds[way], seconds["inline"], strict=True)]


def _goals(ranks: int, measured: dict[str, Any]) -> list[Goal]:
    saved = {way: median(_saved(measured, way)) for way in ("distributed", "thread") if way in measured["seconds"]}
    goals = []
    if ranks > 1:
        name = f"{ranks} ranks: % of the run that distributed saves"
        goals.append(Goal(name, saved["distributed"], DISTRIBUTED_SAVES, at_most=False))
    if measured["free_cores"] > 0:
        name = f"{ranks} rank{'s' if ranks > 1 else ''}: % of the run that a thread saves, at least as in D1"
        goals.append(Goal(name, saved["thread"], DOCUMENT_SAVED, at_most=False))
    return goals
