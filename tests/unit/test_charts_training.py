"""Charts: records in, figure out; the shape of the data kept whatever it came in."""

from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest

from labkit import charts
from labkit.charts.records import MOST_POINTS, Run, reduced
from labkit.charts.theme import colour, dash
from labkit.telemetry import Store


def columns(steps: int, loss: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "step": np.arange(steps, dtype=float),
        "loss": np.full(steps, loss),
        "compute_s": np.full(steps, 0.002),
        "wait_s": np.full(steps, 0.001),
        "transfer_s": np.full(steps, 0.0005),
    }


def a_history(rank: int, steps: int, mean: float = 0.5) -> SimpleNamespace:
    """What the charts read of a labkit.train.History."""
    measured = columns(steps, loss=float(rank))
    measured["rank_loss"], measured["loss"] = measured["loss"], np.full(steps, mean)
    measured["samples"] = np.full(steps, 64.0)
    del measured["step"]
    return SimpleNamespace(rank=rank, steps=SimpleNamespace(**measured))


def names(figure: go.Figure) -> list[str]:
    return [trace.name for trace in figure.data]


def test_loss_is_drawn_for_each_rank_and_their_mean() -> None:
    figure = charts.loss_per_rank({0: columns(5, 1.0), 1: columns(5, 3.0)})
    assert names(figure) == ["rank 0", "rank 1", "mean"]
    assert list(figure.data[2].y) == [2.0] * 5


def test_one_rank_alone_has_no_mean() -> None:
    assert names(charts.loss_per_rank(columns(5))) == ["rank 0"]


def test_the_mean_is_taken_where_all_ranks_have_a_step() -> None:
    run = Run({0: columns(10, 1.0), 1: columns(7, 3.0)})
    steps, values = run.mean("loss")
    assert list(steps) == list(range(7))
    assert list(values) == [2.0] * 7


def test_step_time_is_the_sum_of_its_parts_in_milliseconds() -> None:
    figure = charts.step_time_per_rank({0: columns(4)})
    assert np.allclose(figure.data[0].y, 3.5)


def test_parts_of_a_step_are_stacked_bars_of_means() -> None:
    figure = charts.step_parts({0: columns(4), 2: columns(4)})
    assert names(figure) == ["compute", "wait", "transfer"]
    assert figure.layout.barmode == "stack"
    assert list(figure.data[0].y) == ["rank 0", "rank 2"]
    assert np.allclose([bar.x[0] for bar in figure.data], [2.0, 1.0, 0.5])


def test_histories_are_compared_by_their_mean_over_ranks() -> None:
    figure = charts.compare({"gloo": a_history(0, 6, mean=0.5), "mpi": a_history(0, 8, mean=0.25)})
    assert names(figure) == ["gloo", "mpi"]
    assert list(figure.data[0].y) == [0.5] * 6
    assert list(figure.data[1].y) == [0.25] * 8
    times = charts.compare({"a": a_history(0, 3)}, column="compute_s")
    assert np.allclose(times.data[0].y, 2.0)


def test_one_ranks_history_shows_that_rank_and_the_measured_mean() -> None:
    figure = charts.loss_per_rank(a_history(2, 5, mean=0.5))
    assert names(figure) == ["rank 2", "mean"]
    assert list(figure.data[0].y) == [2.0] * 5
    assert list(figure.data[1].y) == [0.5] * 5


def test_histories_of_several_ranks_make_one_chart() -> None:
    figure = charts.training([a_history(rank, 5) for rank in range(3)])
    assert names(figure) == ["rank 0", "rank 1", "rank 2", "mean", "rank 0", "rank 1", "rank 2"]


def test_arrays_of_ranks_by_steps_are_read_too() -> None:
    run = Run.of({"loss": np.arange(12.0).reshape(3, 4), "step": [0, 1, 2, 3]})
    assert list(run.ranks) == [0, 1, 2]
    assert list(run.ranks[2]["loss"]) == [8, 9, 10, 11]
    assert list(run.ranks[2]["step"]) == [0, 1, 2, 3]


def test_the_store_is_read_as_it_stands() -> None:
    store = Store(2)
    store.add(1, np.array([(step, 0, 1000 + step, 0.5, 0.1, 0.1, 0.1, 8) for step in range(5)], float))
    assert list(Run.of(store).ranks) == [1]
    assert Run.of(store).steps == 5


def test_an_empty_run_gives_an_empty_chart_and_not_an_error() -> None:
    for draw in (charts.loss_per_rank, charts.step_time_per_rank, charts.step_parts, charts.training):
        assert all(trace.x is None or len(trace.x) == 0 for trace in draw(Store(2)).data)


@pytest.mark.parametrize("source", [3, "loss", {}, {"nothing": [1]}, [], None])
def test_what_is_no_run_is_refused_with_what_is_expected(source: object) -> None:
    with pytest.raises(TypeError, match="expected a History"):
        Run.of(source)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Run.of({0: {"loss": [1, 2], "step": [1]}})


def test_a_long_line_keeps_its_spikes_and_its_ends() -> None:
    x = np.arange(100_000.0)
    y = np.zeros_like(x)
    y[31_337], y[77_777] = 9.0, -9.0
    rx, ry = reduced(x, y)
    assert len(rx) <= MOST_POINTS
    assert (rx[0], rx[-1]) == (x[0], x[-1])
    assert (ry.max(), ry.min()) == (9.0, -9.0)
    assert (np.diff(rx) > 0).all()


def test_a_short_line_is_left_alone_and_nan_stays_a_gap() -> None:
    x = np.arange(10.0)
    assert reduced(x, x)[1] is x
    y = np.full(5000, np.nan)
    y[:10] = 1.0
    _, ry = reduced(np.arange(5000.0), y)
    assert np.isnan(ry[-1])
    assert ry[0] == 1.0


def test_ranks_keep_their_look_in_every_chart_and_no_two_share_it() -> None:
    assert len({(colour(rank), dash(rank)) for rank in range(32)}) == 32
    runs = {3: columns(4), 5: columns(4)}
    loss, times = charts.loss_per_rank(runs), charts.step_time_per_rank(runs)
    assert loss.data[0].line.color == times.data[0].line.color == colour(3)


def test_plotlys_own_default_template_is_left_alone() -> None:
    import plotly.io as pio

    assert pio.templates.default == "plotly"
