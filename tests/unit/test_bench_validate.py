"""What the validation benchmark makes of the ranks' figures."""

from __future__ import annotations

import pytest

from labkit.bench import validate

MEASURED = {
    "seconds": {"none": [7.0, 8.0], "inline": [10.0, 10.0], "distributed": [8.0, 9.0], "thread": [7.5, 7.5]},
    "test_seconds": {"none": [0.0, 0.0], "inline": [3.0, 2.0], "distributed": [1.0, 1.0], "thread": [0.5, 0.5]},
    "free_cores": 1,
    "dataset": "digits",
}


def test_what_is_saved_is_compared_round_by_round_with_the_test_inline() -> None:
    rows = {row["validate"]: row for row in validate._rows(2, MEASURED)}
    assert rows["thread"]["saved_percent"]["median"] == pytest.approx(25)
    assert rows["distributed"]["saved_percent"]["min"] == pytest.approx(10)
    assert rows["inline"]["test_percent"] == pytest.approx({"median": 25, "min": 20, "max": 30})
    assert rows["thread"]["D1_saved"] == pytest.approx(20.77, abs=0.01)
    assert rows["inline"]["D1_test"] == pytest.approx(28.4, abs=0.1)


def test_a_thread_must_save_as_much_as_in_the_document_only_where_a_core_is_free() -> None:
    distributed, thread = validate._goals(2, MEASURED)
    assert distributed.met and thread.met and thread.value == pytest.approx(25)
    assert len(validate._goals(2, MEASURED | {"free_cores": 0})) == 1
