"""What applying an update costs a master, by implementation, and how many workers it can serve."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.update_ranks import WORKERS, saturation
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 600
NAIVE, FAST = "loop", "flat fused"
IN_D1 = {"numpy": 20.0, "NumExpr": 6.0, "TensorFlow, GPU": 3.0}
"""Milliseconds to apply an update by Adam that the document D1 reports for its CIFAR10 example (section 3.3)."""
TIMES_NAIVE = 0.7
"""At most so much of the loop's time may Adam take as one kernel on flat parameters."""
SATURATED, TIMES_SERVED = "MLP", 1.5
"""With this model few workers are enough to keep the master busy; then it serves so many times more of them."""


def run(*, quick: bool = False) -> Outcome:
    """Measure for three models (`quick`: few rounds, 2 workers).

    "apply" rows: milliseconds in which one thread applies an update, in each of the ways of `labkit.train.updates`,
    all in turn, and what share of the loop's time that is, round by round. Where there is a GPU, on it as well. Beside
    them stand the document D1's figures, for another network, on another machine.

    "serve" rows: updates a second that a master with Adam applies for so many workers, each of which computes a batch
    of 64 images, sends its gradient and gets the weights back; "ms" is the master's time for one update (receive,
    apply, send). The workers' computing is a sleep of "compute_ms", the time that it takes alone on a core: two cores
    cannot compute for 16 workers. "full_at" is the number of workers from which on the master should always be busy,
    (compute + service) / service, by its time for one update with one worker. "of_bound" compares the rate with the
    most that these two times allow, min(workers / (compute + service), 1 / service).

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    costs = measure("labkit.bench.update_costs", 1, quick=quick, limit_s=LIMIT_S)
    workers = 2 if quick else max(WORKERS)
    served = measure("labkit.bench.update_ranks", 1 + workers, quick=quick, limit_s=LIMIT_S)
    rows = [row for each in costs for row in _applied(each)]
    rows += [_in_d1(way, ms) for way, ms in IN_D1.items()]
    rows += [row for each in served for row in _served(each)]
    return Outcome("update", rows, _goals(costs, served))


def _applied(measured: dict[str, Any]) -> list[dict[str, Any]]:
    device = "" if measured["device"] == "cpu" else f", {measured['device']}"
    return [
        {
            "what": f"apply {measured['optimizer']}{device}",
            "model": f"{measured['model']}, {measured['parameters'] / 1e6:.2g} M",
            "way": way,
            "ms": spread(ms),
            "of_loop": _ratio(ms, measured["ms"][NAIVE]),
        }
        for way, ms in measured["ms"].items()
    ]


def _in_d1(way: str, ms: float) -> dict[str, Any]:
    row = {"what": "apply adam, D1", "model": "CIFAR10 CNN", "way": way}
    return row | {"ms": ms, "of_loop": ms / IN_D1["numpy"]}


def _served(measured: dict[str, Any]) -> list[dict[str, Any]]:
    compute_ms, service_ms = measured["compute_ms"], median(measured["service_ms"][0])
    series = zip(measured["workers"], measured["updates_per_s"], measured["service_ms"], strict=True)
    return [
        {
            "what": "serve adam",
            "model": measured["model"],
            "way": measured["way"],
            "ms": spread(services),
            "compute_ms": compute_ms,
            "workers": workers,
            "updates_per_s": spread(rates),
            "full_at": saturation(compute_ms, service_ms),
            "of_bound": median(rates) / 1e3 / min(workers / (compute_ms + service_ms), 1 / service_ms),
        }
        for workers, rates, services in series
    ]


def _goals(costs: Sequence[dict[str, Any]], served: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    for each in costs:
        if each["optimizer"] == "adam":
            name = f"adam, {each['model']}, {each['device']}: {FAST}, times the {NAIVE}"
            goals.append(Goal(name, _ratio(each["ms"][FAST], each["ms"][NAIVE]), TIMES_NAIVE))
    most = {each["way"]: max(map(median, each["updates_per_s"])) for each in served if each["model"] == SATURATED}
    name = f"{SATURATED}: most updates/s at the master, {FAST}, times the {NAIVE}"
    return [*goals, Goal(name, most[FAST] / most[NAIVE], TIMES_SERVED, at_most=False)]


def _ratio(ms: Sequence[float], other: Sequence[float]) -> float:
    """How many times as long as `other`: the median over the rounds."""
    return median(mine / theirs for mine, theirs in zip(ms, other, strict=True))
