"""Every training method on the same data: accuracy, time, and what the ranks spend on communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.bench import Goal, Outcome
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 1200
ACCURACY = 0.97
RANKS = (4,)


def run(*, quick: bool = False, ranks: Sequence[int] = RANKS) -> Outcome:
    """Train by every method in turn with its defaults, on MNIST where it is, else on digits (`quick`: few images).

    The defaults are those of ``labkit train --method …``, with LeNet in place of the larger network and three epochs
    where they have fewer; `single` trains on one rank, with the batches of all. "communication" is the share of the
    computing ranks' step time in which they wait or move data.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        measured = measure("labkit.bench.methods_ranks", size, quick=quick, limit_s=LIMIT_S)
        rows += measured
        for row in measured:
            name = f"{row['method']}, {size} ranks: test accuracy"
            goals.append(Goal(name, row["accuracy"], ACCURACY, at_most=False))
    return Outcome("methods", rows, goals)
