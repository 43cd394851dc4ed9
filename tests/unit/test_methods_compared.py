"""Several runs in one table and one chart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit import charts
from labkit.train import Comparison, EpochRow, History, Steps


def run(rank_steps: list[Steps], accuracy: float) -> History:
    rows = [EpochRow(n, 3, 1.0, 0.5, 1.0, 0.5, 2.0, 300.0, 0.2, accuracy, 0.5, time_s=2.5 * n) for n in (1, 2)]
    return History(0, len(rank_steps), {"method": "x"}, {}, rank_steps[0], rows, by_rank=rank_steps)


def steps(losses: list[float], times: list[float], staleness: list[float]) -> Steps:
    each = np.ones(len(losses))
    return Steps(
        each, np.array(losses), 3 * each, 0.5 * each, 0.5 * each, each, each, np.array(staleness), np.array(times)
    )


MASTER = Steps.empty()
ONE = steps([4.0, 2.0, 0.0], [1.0, 3.0, 5.0], [0, 1, 1])
OTHER = steps([3.0, math.nan, 1.0], [2.0, 2.5, 4.0], [2, 0, 0])


def test_a_table_sums_up_what_all_ranks_did() -> None:
    table = Comparison({"a <b>": run([MASTER, ONE, OTHER], 0.9), "untested": run([ONE], math.nan)})
    row = table.rows["a <b>"]
    assert (row.accuracy, row.seconds, row.images_per_s) == (0.9, 5.0, 300.0)
    assert row.communication == pytest.approx(0.25)
    assert row.mean_staleness == pytest.approx(4 / 6) and row.max_staleness == 2
    assert str(table).splitlines()[1].split() == ["a", "<b>", "90.00%", "5.0", "300", "25.0%", "0.67", "(2)"]
    assert "a &lt;b&gt;" in table._repr_html_() and "<td>–</td>" in table._repr_html_()


def test_losses_of_all_ranks_are_drawn_by_the_time_their_steps_ended() -> None:
    figure = charts.over_time({"one": run([MASTER, ONE, OTHER], 0.9), "two": run([ONE], 0.5)})
    loss, accuracy = figure.data[:2]
    assert list(loss.x) == [1, 2, 3, 4, 5] and list(loss.y) == [4, 3, 2, 1, 0]
    assert list(accuracy.x) == [2.5, 5.0] and list(accuracy.y) == [90, 90]
    assert [trace.name for trace in figure.data] == ["one", "one", "two", "two"]


def test_staleness_is_shown_as_shares() -> None:
    figure = charts.staleness({"one": run([MASTER, ONE, OTHER], 0.9)})
    assert list(figure.data[0].x) == [0, 1, 2] and list(figure.data[0].y) == pytest.approx([50, 100 / 3, 100 / 6])


def test_old_gradients_are_numbered_one_by_one_only_while_the_numbers_have_room() -> None:
    fresh, old = steps([1.0], [1.0], [3]), steps([1.0], [1.0], [200])
    assert charts.staleness({"fresh": run([fresh], 0.9)}).layout.xaxis.dtick == 1
    assert charts.staleness({"fresh": run([fresh], 0.9), "old": run([old], 0.9)}).layout.xaxis.dtick is None


def test_each_ranks_pace_has_its_own_colour_and_a_master_none() -> None:
    one, other = charts.pace(run([MASTER, ONE, OTHER], 0.9)).data
    assert [one.name, other.name] == ["rank 1", "rank 2"]
    assert [one.line.color, other.line.color] == list(charts.COLOURS[1:3])
    assert list(one.x) == [0, 1, 3, 5] and list(one.y) == [0, 1, 2, 3]


def test_a_run_without_a_step_is_drawn_empty() -> None:
    empty = History(0, 1)
    assert len(charts.over_time({"none": empty}).data[0].x) == 0
    assert list(charts.staleness({"none": empty}).data[0].y) == [0]
    assert Comparison({"none": empty}).cells()[0][1] == "–"
