"""A benchmark's main figures as a bar chart in Mermaid's notation, which a README on a code host shows as a picture."""

from __future__ import annotations

from typing import Any, NamedTuple

from labkit.bench import Outcome

__all__ = ["CHARTS", "mermaid"]


class _Chart(NamedTuple):
    title: str
    where: dict[str, Any]
    """Which rows are shown."""
    label: str
    value: str
    unit: str


CHARTS = {
    "allreduce": _Chart("All-reduce of 1.8 MB on 2 ranks", {"bytes": 1_800_000, "ranks": 2}, "way", "copies", "copies"),
    "step": _Chart(
        "LeNet, 2 ranks: longer than a step alone", {"model": "LeNet", "ranks": 2}, "way", "added_percent", "%"
    ),
}
"""By benchmark. Less is better in all of them."""


def mermaid(outcome: Outcome) -> str:
    """The chart of an outcome whose benchmark is one of `CHARTS`; the medians are shown."""
    chart = CHARTS[outcome.bench]
    rows = [row for row in outcome.rows if all(row[key] == wanted for key, wanted in chart.where.items())]
    labels = ", ".join(f'"{row[chart.label]}"' for row in rows)
    values = [max(row[chart.value]["median"], 0.0) for row in rows]
    lines = [
        "```mermaid",
        "xychart-beta",
        f'    title "{chart.title}"',
        f"    x-axis [{labels}]",
        f'    y-axis "{chart.unit}"',
        f"    bar [{', '.join(f'{value:.3g}' for value in values)}]",
        "```",
    ]
    return "\n".join(lines)
