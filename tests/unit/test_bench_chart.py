"""A benchmark's outcome as a chart for a README."""

from __future__ import annotations

from labkit.bench import Outcome
from labkit.bench.chart import mermaid


def test_the_chosen_rows_are_bars_of_their_medians() -> None:
    rows = [
        {"way": way, "ranks": 2, "bytes": nbytes, "copies": {"median": median}}
        for way, nbytes, median in (("copy", 8, 9.0), ("copy", 1_800_000, 1.0), ("gloo", 1_800_000, 23.456))
    ]
    text = mermaid(Outcome("allreduce", rows))
    assert 'x-axis ["copy", "gloo"]' in text
    assert "bar [1, 23.5]" in text
    assert text.startswith("```mermaid\nxychart-beta\n") and text.endswith("\n```")


def test_a_way_that_adds_nothing_has_no_bar_below_the_axis() -> None:
    row = {"model": "LeNet", "ranks": 2, "way": "overlap", "added_percent": {"median": -0.4}}
    assert "bar [0]" in mermaid(Outcome("step", [row]))
