"""How many images a second ranks train on together, beside as many ranks that do not communicate, and one alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 300
SHARE = 0.97
DOCUMENT, DOCUMENT_RANKS = 1.84, 2
"""Speed-up that the document D0 reports for two ranks."""


def run(*, quick: bool = False, ranks: Sequence[int] = (2,)) -> Outcome:
    """Measure all in turn: the CNN on MNIST, 64 images a rank and step, one thread a rank (`quick`: few steps).

    In each round one rank trains alone while the others wait, then all train apart, each on its part of the data and
    without any communication, then all together. A round is 12 steps of the epoch's 469 and more, since all are alike:
    the rate counts, not the length. "speedup" is the rate by that of one rank in the same round; of ranks that train
    apart the slowest sets the rate.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        measured = measure("labkit.bench.epoch_ranks", size, quick=quick, limit_s=LIMIT_S)
        rows += _rows(size, measured)
        goals += _goals(size, measured)
    return Outcome("epoch", rows, goals)


def _rows(ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    rates = measured["images_per_s"]
    names = {
        "one": (1, "alone"),
        "apart": (ranks, "no communication"),
        "together": (ranks, f"sync={measured['sync']}"),
    }
    rows = []
    for way, (size, name) in names.items():
        row = {"ranks": size, "way": name, "images_per_s": spread(rates[way])}
        row["speedup"] = spread(_times(rates[way], rates["one"]))
        row["speedup_in_D0"] = DOCUMENT if (way, ranks) == ("together", DOCUMENT_RANKS) else None
        row |= {"dataset": measured["dataset"], "steps": measured["steps"], "batch": measured["batch"]}
        rows.append(row)
    return rows


def _goals(ranks: int, measured: dict[str, Any]) -> list[Goal]:
    rates = measured["images_per_s"]
    value = median(_times(rates["together"], rates["apart"]))
    return [Goal(f"{ranks} ranks: images/s, as a share of that without communication", value, SHARE, at_most=False)]


def _times(rates: Sequence[float], other: Sequence[float]) -> list[float]:
    """How many times as fast as `other`, round by round."""
    return [mine / theirs for mine, theirs in zip(rates, other, strict=True)]
