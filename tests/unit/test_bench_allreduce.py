"""What the all-reduce benchmark makes of the ranks' figures."""

from __future__ import annotations

from labkit.bench.allreduce import LARGE, MIDDLE, OURS, _goals, _rows


def measured(nbytes: int, **us: list[float]) -> dict[str, object]:
    return {"nbytes": nbytes, "us": {name.replace("_", " ") if name != "ours" else OURS: us[name] for name in us}}


def test_a_row_compares_with_the_copy_round_by_round() -> None:
    rows = _rows(2, measured(MIDDLE, copy=[1.0, 10.0, 2.0], ours=[2.0, 11.0, 6.0]))
    assert [row["way"] for row in rows] == ["copy", OURS]
    assert rows[0]["copies"]["median"] == 1.0
    assert rows[1]["copies"] == {"median": 2.0, "min": 1.1, "max": 3.0}  # the ratio of the medians is another one
    assert (rows[1]["us"]["median"], rows[1]["bytes"], rows[1]["ranks"]) == (6.0, MIDDLE, 2)


def test_goals_are_bounds_from_both_sides() -> None:
    goals = {
        goal.name: (goal.value, goal.met)
        for goal in _goals(
            2,
            [
                measured(8, copy=[1.0], ours=[5.0], mpi4py=[1.0], gloo=[100.0], torch_mpi=[10.0]),
                measured(MIDDLE, copy=[100.0], ours=[120.0], mpi4py=[230.0], gloo=[1320.0]),
                measured(LARGE, copy=[10.0], ours=[20.0], mpi4py=[60.0], gloo=[60.0]),
            ],
        )
    }
    assert goals == {
        f"{OURS}, 2 ranks, 1,800,000 B: times one copy": (1.2, True),
        f"{OURS}, 2 ranks, 44,000,000 B: times one copy": (2.0, False),
        f"{OURS}, 2 ranks, 1,800,000 B: times faster than gloo": (11.0, True),
        f"{OURS}, 2 ranks, 44,000,000 B: times faster than gloo": (3.0, False),
        f"{OURS}, 2 ranks, 1,800,000 B: times faster than mpi4py": (230 / 120, False),
        f"{OURS}, 2 ranks, 44,000,000 B: times faster than mpi4py": (3.0, True),
        "torch mpi, 2 ranks, 8 B: times faster than gloo": (10.0, True),
    }


def test_sizes_that_were_left_out_have_no_goals() -> None:
    assert _goals(4, [measured(8, copy=[1.0], ours=[5.0], mpi4py=[1.0], gloo=[100.0])]) == []
