"""What a queue gains where one worker is slow: an epoch of Downpour with equal shards, and with a queue."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["FACTOR", "run"]

LIMIT_S = 600
FACTOR = 3.0
"""How many times as long the slow worker computes."""
GAIN = 1.5


def run(*, quick: bool = False, ranks: Sequence[int] = (5,)) -> Outcome:
    """Train LeNet for an epoch by either way in turn: a master, and workers of which the last is slowed down.

    "gain" is by how much the epoch is shorter than the one with equal shards in the same round; "slow_worker_percent"
    the share of the samples that the slow one took. "gain_at_best" is what W workers with a core each would come to at
    best: equal shards take as long as the slow one needs for its 1/W of the samples, 3/W of the work; a queue lets
    W − 1 + 1/3 workers' worth of them work to the end. On fewer cores than workers, those that are through leave
    their cores to the slow one, which gains by it with equal shards, too.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        measured = measure("labkit.bench.balance_ranks", size, quick=quick, limit_s=LIMIT_S)
        rows += _rows(measured)
        gain = median(_gains(measured, "queue"))
        name = f"{measured['workers']} workers, one {FACTOR:g} times slower: gain by the queue"
        goals.append(Goal(name, gain, GAIN, at_most=False))
    return Outcome("balance", rows, goals)


def at_best(workers: int) -> float:
    """Return the gain with a core for each of the workers.

    Examples
    --------
    >>> at_best(4)
    2.5
    """
    return FACTOR / workers * (workers - 1 + 1 / FACTOR)


def _gains(measured: dict[str, Any], way: str) -> list[float]:
    seconds = measured["seconds"]
    return [base / mine for mine, base in zip(seconds[way], seconds["equal shards"], strict=True)]


def _rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "data": way,
            "workers": measured["workers"],
            "epoch_s": spread(measured["seconds"][way]),
            "gain": spread(_gains(measured, way)),
            "gain_at_best": at_best(measured["workers"]) if way == "queue" else 1.0,
            "slow_worker_percent": spread(measured["slow_percent"][way]),
            "dataset": measured["dataset"],
        }
        for way in measured["seconds"]
    ]
