"""What the step and the epoch benchmark make of the ranks' figures."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.bench import epoch, step


def measured(model: str = "LeNet", **ms: list[float]) -> dict[str, Any]:
    ways = {"none": [10.0, 100.0], "none again": [10.0, 100.0], "overlap": [10.1, 101.0]}
    ways |= {"ddp on mpi": [11.0, 110.0], "ddp on gloo": [13.0, 130.0]}
    return {"model": model, "parameters": 7, "ms": ways | {name.replace("_", " "): each for name, each in ms.items()}}


def added(rows: list[dict[str, Any]], way: str) -> list[float]:
    (row,) = [row for row in rows if row["way"] == way]
    return [round(row["added_percent"][name], 9) for name in ("min", "median", "max")]


def test_a_step_is_compared_with_both_of_its_rounds_that_did_not_communicate() -> None:
    rows = step._rows(2, measured(none_again=[30.0, 100.0], overlap=[22.0, 110.0]))
    assert added(rows, "overlap") == [10.0, 10.0, 10.0]  # of 20 and of 100
    assert added(rows, "none again") == [0.0, 100.0, 200.0]  # of 10 and of 100: not of itself
    assert [(row["model"], row["parameters"], row["ranks"]) for row in rows] == [("LeNet", 7, 2)] * 5


def test_ddp_on_mpi_may_add_half_of_what_gloo_does() -> None:
    goals = step._goals(2, measured())
    assert [(round(goal.value, 9), round(goal.limit, 9), goal.met) for goal in goals] == [
        (1.0, 2.0, True),
        (10.0, 15.0, True),
    ]
    _, ddp = step._goals(2, measured(ddp_on_mpi=[11.6, 116.0]))
    assert round(ddp.value, 9) == 16.0 and not ddp.met


@pytest.mark.parametrize(("model", "limit"), [("LeNet", 2.0), ("CNN", 5.0), ("MLP", 20.0)])
def test_bounds_go_by_the_model_and_for_one_by_the_controls_spread(model: str, limit: float) -> None:
    goal, _ = step._goals(2, measured(model, none_again=[9.5, 105.0], overlap=[10.4, 104.0]))
    assert round(goal.limit, 9) == limit
    assert goal.met == (goal.value <= limit)
    assert ("spread" in goal.name) == (model == "CNN")


def test_on_other_worlds_being_ahead_of_gloo_is_enough() -> None:
    goals = step._goals(4, measured(overlap=[12.0, 120.0], ddp_on_mpi=[14.0, 140.0]))
    assert [(round(goal.value, 9), round(goal.limit, 9), goal.met) for goal in goals] == [
        (20.0, 30.0, True),
        (40.0, 30.0, False),
    ]


def test_images_a_second_are_compared_round_by_round() -> None:
    rates = {"one": [100.0, 10.0, 50.0], "apart": [180.0, 20.0, 100.0], "together": [171.0, 19.6, 98.0]}
    ranks = {"dataset": "digits", "steps": 12, "batch": 64, "sync": "overlap", "images_per_s": rates}
    one, apart, together = epoch._rows(2, ranks)
    assert [row["ranks"] for row in (one, apart, together)] == [1, 2, 2]
    assert one["speedup"]["median"] == 1.0
    assert apart["speedup"] == {"median": 2.0, "min": 1.8, "max": 2.0}
    assert (together["speedup"]["median"], together["speedup_in_D0"], apart["speedup_in_D0"]) == (1.96, 1.84, None)
    (goal,) = epoch._goals(2, ranks)
    assert round(goal.value, 9) == 0.98 and goal.met  # of 0.95, 0.98 and 0.98
    (missed,) = epoch._goals(2, ranks | {"images_per_s": rates | {"together": [170.0, 19.0, 97.0]}})
    assert round(missed.value, 9) == 0.95 and not missed.met
