"""A history survives the disk as it was, is written whole or not at all, and shows itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from labkit.train import EpochRow, History, Steps


def example() -> History:
    rows = [
        EpochRow(
            1,
            2,
            0.5,
            0.875,
            0.6,
            0.75,
            seconds=1.5,
            images_per_s=4000.0,
            test_loss=0.25,
            test_accuracy=0.9145,
        ),
        EpochRow(2, 1, math.inf, 0.5, math.nan, 0.5, seconds=1.0, images_per_s=10.0),
    ]
    steps = Steps(*np.arange(27.0).reshape(9, 3))
    steps.rank_loss[2] = math.nan
    steps.loss[1] = math.inf
    return History(
        1,
        4,
        {"dataset": "a <b> set", "lr": 0.1},
        {"torch": "2"},
        steps,
        rows,
        3,
        "stopped early",
        [steps, Steps.empty()],
    )


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    before = example()
    path = before.save(tmp_path / "run.json")
    after = History.load(path)
    assert repr(after) == repr(before)
    assert str([asdict(row) for row in after.epochs]) == str([asdict(row) for row in before.epochs])
    for name, values in asdict(before.steps).items():
        np.testing.assert_array_equal(getattr(after.steps, name), values)
        np.testing.assert_array_equal(getattr(after.by_rank[0], name), values)
    assert len(after.by_rank) == 2 and len(after.by_rank[1]) == 0
    assert (after.settings, after.versions, after.copies, after.stopped) == (
        before.settings,
        before.versions,
        3,
        "stopped early",
    )


def test_the_file_is_json_that_other_programs_read(tmp_path: Path) -> None:
    path = example().save(tmp_path / "run.json")
    content = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
    assert content["steps"]["rank_loss"][2] is None
    assert content["seconds"] == 2.5


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = example().save(tmp_path / "run.json")
    old = path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        History(0, 1).save(path)
    assert path.read_text() == old and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"steps": 3, "epochs": []}', '{"steps": {}, "epochs": [{"x": 1}]}']
)
def test_a_file_that_is_no_history_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is no training history"):
        History.load(tmp_path / "other.json")


def test_it_shows_itself_with_its_names_escaped() -> None:
    shown = example()._repr_html_()
    assert shown.count("<tr>") == 3 and "91.45%" in shown and "stopped early" in shown
    assert "a &lt;b&gt; set" in shown and "<b>" not in shown


def test_an_epoch_is_one_line_and_says_nothing_of_what_was_not_measured() -> None:
    first, second = example().epochs
    assert first.line(2).startswith("epoch 1/2  loss 0.5000  accuracy 87.50%  test loss 0.2500  test accuracy 91.45%")
    assert "test" not in second.line(2) and "nan" not in second.line(2)
    assert "replicas differ by" not in second.line(2)


def test_an_empty_history_shows_itself_too() -> None:
    empty = History(0, 1)
    assert repr(empty) == "History(rank 0 of 1, 0 steps)" and math.isnan(empty.test_accuracy)
    assert "<table>" in empty._repr_html_()
