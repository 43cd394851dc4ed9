"""The chart of ranks that leave a training and come back: which train when, and how fast."""

import numpy as np
import plotly.graph_objects as go
import pytest

from labkit import charts
from labkit.train import EpochRow, History, Steps

STEPS, STEP_S = 40, 0.1


def a_history(*changes: tuple[int, list[int]]) -> History:
    """An epoch of 40 steps, 64 images each in 0.1 s; from which step on which ranks train."""
    history = History(0, 4)
    zeros = np.zeros(STEPS)
    times = STEP_S * np.arange(1, STEPS + 1)
    parts = np.full(STEPS, STEP_S / 2), np.full(STEPS, STEP_S / 4), np.full(STEPS, STEP_S / 4)
    history.steps = Steps(zeros, zeros, *parts, np.full(STEPS, 16.0), zeros, zeros, times)
    seconds = STEPS * STEP_S
    history.epochs = [EpochRow(1, STEPS, 1.0, 0.5, 1.0, 0.5, seconds, 64 * STEPS / seconds, time_s=seconds + 1)]
    for step, ranks in changes:
        history.changed(step, ranks, step * STEP_S)
    return history


def bars(figure: go.Figure) -> dict[str, list[tuple[float, float]]]:
    """From when to when each rank trains, as drawn."""
    drawn = [trace for trace in figure.data if trace.type == "bar"]
    return {
        bar.name: [(float(begin), float(begin + long)) for begin, long in zip(bar.base, bar.x, strict=True)]
        for bar in drawn
    }


def words(figure: go.Figure) -> list[str]:
    return [note.text for note in figure.layout.annotations]


def test_a_rank_that_dies_trains_until_then() -> None:
    figure = charts.world_size_over_time(a_history((0, [0, 1, 2, 3]), (10, [0, 1, 3])))
    drawn = bars(figure)
    assert drawn["rank 2"] == [(0.0, pytest.approx(1.0))]
    assert drawn["rank 0"] == drawn["rank 3"] == [(0.0, pytest.approx(5.0))], "to the end of the test"
    assert words(figure) == ["rank 2 died"]
    assert [shape.x0 for shape in figure.layout.shapes] == [1.0] * len(figure.layout.shapes) != []


def test_runs_that_go_on_from_each_other_are_drawn_one_behind_the_other() -> None:
    first = a_history((0, [0, 1, 2, 3]), (10, [0, 1, 3]), (20, [0, 3]))
    figure = charts.world_size_over_time([first, a_history((0, [0, 1, 2, 3]))])
    assert bars(figure)["rank 2"] == [(0.0, pytest.approx(1.0)), (5.0, pytest.approx(10.0))]
    assert words(figure) == ["rank 2 died", "rank 1 died", "ranks 1, 2 came back"]
    line = figure.data[-1]
    drawn = np.isfinite(line.y)
    assert np.allclose(line.y[drawn], 640)
    assert list(line.x[~drawn]) == [5.0, 10.0], "a gap after each run"
    assert line.x[drawn][-1] == pytest.approx(9.0) and np.all(np.diff(line.x) > 0)


def test_images_a_second_do_not_count_the_test() -> None:
    slower = a_history((0, [0, 1]), (20, [0]))
    slower.steps.wait_s[20:] += STEP_S
    line = charts.world_size_over_time(slower).data[-1]
    assert line.y[0] == pytest.approx(640) and line.y[-2] == pytest.approx(320)


def test_a_history_that_does_not_say_who_trained_is_refused() -> None:
    for histories in (a_history(), [], [a_history((0, [0])), a_history()]):
        with pytest.raises(ValueError, match=r"only a history of train\.elastic"):
            charts.world_size_over_time(histories)
