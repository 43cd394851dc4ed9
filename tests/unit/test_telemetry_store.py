"""The store: bounded memory, the whole run in view, runs kept apart."""

import numpy as np
import pytest

from labkit.telemetry import COLUMNS, Step, Store


def rows(first: int, count: int, begun: float = 1000.0, samples: int = 64) -> np.ndarray:
    """Steps first … first+count-1, a hundredth of a second apart."""
    steps = np.arange(first, first + count)
    return np.array([(s, 0, begun + s / 100, 1 / (s + 1), 0.01, 0.002, 0.001, samples) for s in steps], float)


def test_a_store_ten_times_overfilled_keeps_its_size_and_the_first_and_last_step() -> None:
    store = Store(ranks=2, capacity=100)
    size = store.nbytes
    for first in range(0, 1000, 7):
        store.add(0, rows(first, min(7, 1000 - first)))
        series = store.series(0)
        assert series["step"][0] == 0
        assert series["step"][-1] == min(first + 7, 1000) - 1
        assert len(series["step"]) <= 101  # the last step may stand beside the thinned ones
    assert store.nbytes == size
    assert store.received == 1000


def test_thinned_steps_lie_evenly_over_the_run() -> None:
    store = Store(ranks=1, capacity=64)
    for first in range(0, 5000, 13):
        store.add(0, rows(first, min(13, 5000 - first)))
    gaps = np.diff(store.series(0)["step"][:-1])
    assert len(set(gaps)) == 1
    assert gaps[0] == 128  # 5000 steps into 64 places: every 2**7th


def test_one_batch_larger_than_the_buffer_is_thinned_too() -> None:
    store = Store(ranks=1, capacity=10)
    store.add(0, rows(0, 12345))
    series = store.series(0)
    assert series["step"][0] == 0
    assert series["step"][-1] == 12344
    assert len(series["step"]) <= 11


def test_an_odd_capacity_still_keeps_the_first_step() -> None:
    store = Store(ranks=1, capacity=7)
    for step in range(100):
        store.add(0, rows(step, 1))
    assert store.series(0)["step"][0] == 0
    assert len(set(np.diff(store.series(0)["step"][:-1]))) == 1


def test_columns_come_back_as_they_went_in() -> None:
    store = Store(ranks=1)
    step = Step(0, 3, 1, 1000.5, 0.25, 0.01, 0.002, 0.001, 64)
    store.add(0, np.array([step.row()]))
    assert {name: values[0] for name, values in store.series(0).items()} == dict(zip(COLUMNS, step.row(), strict=True))
    assert store.latest(0) == step


def test_a_new_run_replaces_the_former_one() -> None:
    store = Store(ranks=1)
    store.add(0, rows(0, 50, begun=100.0), run=100.0)
    store.add(0, rows(0, 5, begun=200.0), run=200.0)
    assert list(store.series(0)["step"]) == [0, 1, 2, 3, 4]
    assert store.run == 200.0
    assert store.received == 55


def test_late_steps_of_an_earlier_run_are_counted_but_not_shown() -> None:
    store = Store(ranks=1)
    store.add(0, rows(0, 5, begun=200.0), run=200.0)
    store.add(0, rows(40, 10, begun=100.0), run=100.0)
    assert list(store.series(0)["step"]) == [0, 1, 2, 3, 4]
    assert store.received == 15


def test_a_step_number_that_falls_back_begins_a_new_run() -> None:
    store = Store(ranks=1)
    both = np.vstack([rows(0, 30, begun=100.0), rows(0, 4, begun=200.0)])
    store.add(0, both)
    assert list(store.series(0)["step"]) == [0, 1, 2, 3]
    assert store.run == 200.0


def test_ranks_that_take_no_part_in_the_newest_run_are_not_shown() -> None:
    store = Store(ranks=3)
    for rank in range(3):
        store.add(rank, rows(0, 10, begun=100.0), run=100.0 + rank / 100)
    assert store.shown() == [0, 1, 2]
    store.add(0, rows(0, 10, begun=500.0), run=500.0)
    assert store.shown() == [0]
    assert store.latest(1) is None
    assert len(store.series(2)["loss"]) == 0


def test_samples_are_summed_over_all_steps_even_the_thinned_ones() -> None:
    store = Store(ranks=2, capacity=10)
    for rank in range(2):
        store.add(rank, rows(0, 1000, samples=8))
    assert store.samples() == 2 * 1000 * 8


def test_reset_forgets_steps_and_counts() -> None:
    store = Store(ranks=1)
    store.add(0, rows(0, 10))
    store.reset()
    assert store.shown() == []
    assert store.received == 0


@pytest.mark.parametrize(("ranks", "capacity"), [(0, 10), (-1, 10), (2, 1)])
def test_a_store_of_no_size_is_refused(ranks: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        Store(ranks, capacity)


def test_a_rank_outside_the_world_and_rows_of_another_shape_are_refused() -> None:
    store = Store(ranks=2)
    with pytest.raises(ValueError, match="rank 2"):
        store.add(2, rows(0, 1))
    with pytest.raises(ValueError, match="shape"):
        store.add(0, np.zeros((3, 5)))
