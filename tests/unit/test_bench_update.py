"""What the update benchmark makes of the ranks' figures, and what a master that is always busy comes to."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.bench import Outcome, table, update
from labkit.bench.update_ranks import saturation


def cost(optimizer: str = "adam", **ms: list[float]) -> dict[str, Any]:
    ways = {"loop": [10.0, 100.0, 10.0], "flat fused": [5.0, 20.0, 8.0]} | ms
    return {"model": "CNN", "parameters": 1_199_882, "optimizer": optimizer, "device": "cpu", "ms": ways}


def served(way: str, rates: list[list[float]], model: str = "MLP") -> dict[str, Any]:
    about = {"model": model, "way": way, "compute_ms": 30.0, "workers": [1, 4], "updates_per_s": rates}
    return about | {"service_ms": [[10.0, 9.0, 12.0], [11.0, 11.0, 11.0]]}


def test_a_way_is_compared_with_the_loop_round_by_round() -> None:
    loop, fused = update._applied(cost())
    assert (loop["of_loop"], fused["of_loop"]) == (1.0, 0.5)  # of 0.5, 0.2 and 0.8; that of the medians is 0.8
    assert fused["ms"] == {"median": 8.0, "min": 5.0, "max": 20.0}
    assert (fused["what"], fused["model"], fused["way"]) == ("apply adam", "CNN, 1.2 M", "flat fused")


def test_the_documents_figures_stand_beside_them() -> None:
    rows = [update._in_d1(way, ms) for way, ms in update.IN_D1.items()]
    assert [(row["ms"], row["of_loop"]) for row in rows] == [(20.0, 1.0), (6.0, 0.3), (3.0, 0.15)]


def test_a_master_is_full_where_requests_come_as_fast_as_it_serves_them() -> None:
    assert saturation(30.0, 10.0) == 4.0
    assert saturation(0.0, 10.0) == 1.0  # one worker that computes nothing is enough


def test_a_rate_is_compared_with_the_nearer_bound() -> None:
    one, four = update._served(served("loop", [[20.0, 25.0, 30.0], [60.0, 50.0, 70.0]]))
    assert (one["workers"], one["full_at"], four["full_at"]) == (1, 4.0, 4.0)
    assert one["of_bound"] == pytest.approx(25 / (1e3 / 40))
    assert four["of_bound"] == pytest.approx(60 / (1e3 / 10))  # 4 workers can send no more than it serves


def test_goals_are_the_fused_adam_and_how_many_updates_more_it_serves() -> None:
    series = [served("loop", [[20.0], [50.0]]), served("flat fused", [[25.0], [80.0]]), served("loop", [[9.0]], "CNN")]
    goals = update._goals([cost(), cost("sgd"), cost(loop=[6.0, 6.0, 6.0])], series)
    assert [(round(goal.value, 9), goal.met) for goal in goals] == [(0.5, True), (1.333333333, False), (1.6, True)]


def test_rows_with_other_columns_are_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"what": "apply", "ms": 1.5}, {"what": "apply again", "ms": 2.5}, {"what": "serve", "workers": 3}]
    table.show(Outcome("update", rows))
    printed = capsys.readouterr().out
    first, second = printed.split("serve")[0].rsplit("┏", 1)
    assert printed.count("┏") == 2 and "update ·" in first and "update ·" not in second
    assert "ms" in first and "workers" not in first and "workers" in second
