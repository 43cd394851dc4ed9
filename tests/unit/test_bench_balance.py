"""What the balance benchmark makes of the ranks' figures."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.bench import Outcome, balance, table

MEASURED: dict[str, Any] = {
    "seconds": {"equal shards": [6.0, 9.0, 4.0], "queue": [3.0, 6.0, 1.0]},
    "slow_percent": {"equal shards": [25.0, 25.0, 25.0], "queue": [10.0, 12.0, 11.0]},
    "workers": 4,
    "dataset": "mnist",
}


def test_the_gain_is_of_each_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(balance, "measure", lambda *_, **__: MEASURED)
    outcome = balance.run(quick=True)
    equal, queue = outcome.rows
    assert equal["gain"]["median"] == 1.0
    assert queue["gain"] == {"median": 2.0, "min": 1.5, "max": 4.0}  # that of the medians is 2.0, too; of the means 1.9
    assert queue["slow_worker_percent"]["median"] == 11.0
    [goal] = outcome.goals
    assert goal.met and (goal.value, goal.limit) == (2.0, 1.5)
    table.show(Outcome("balance", outcome.rows, outcome.goals))
    assert "one 3 times slower" in capsys.readouterr().out


def test_with_a_core_each_the_slow_workers_share_is_what_is_gained() -> None:
    assert balance.at_best(4) == pytest.approx(2.5)  # 3/4 of the work against 1 / (3 + 1/3)
    assert balance.at_best(1) == pytest.approx(1.0)
