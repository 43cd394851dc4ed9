"""Charts of what a cell measured: bars by rank, lines over sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from .theme import COLOURS, TEMPLATE, dash

__all__ = ["bars", "lines"]


def bars(
    groups: Mapping[str, Sequence[float | None]],
    *,
    title: str = "",
    unit: str = "",
    names: Sequence[str] | None = None,
) -> go.Figure:
    """Draw bars side by side, one colour a group.

    Parameters
    ----------
    groups
        Name of each group, and its values; None leaves a gap.
    title, unit
        The chart's title, and what the values are.
    names
        What each value of a group belongs to; default: rank 0, rank 1, …
    """
    most = max((len(values) for values in groups.values()), default=0)
    names = names or [f"rank {rank}" for rank in range(most)]
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 340})
    for index, (name, values) in enumerate(groups.items()):
        label = f"%{{y:.3~g}} {unit}"
        marker = {"color": COLOURS[index % len(COLOURS)]}
        figure.add_trace(go.Bar(x=list(names), y=list(values), name=name, marker=marker, hovertemplate=label))
    return figure.update_layout(bargap=0.3).update_yaxes(title_text=unit, rangemode="tozero")


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    log: bool = False,
) -> go.Figure:
    """Draw one line a series over the same `x`.

    Parameters
    ----------
    x
        Where the values were measured.
    series
        Name of each line, and its values, as many as `x`.
    title, xlabel, ylabel
        The chart's title, and what its axes are.
    log
        Draw both axes logarithmically.
    """
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 380})
    for index, (name, values) in enumerate(series.items()):
        line: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "dash": dash(index), "width": 2}
        mode = "lines+markers" if len(x) <= 40 else "lines"
        figure.add_trace(go.Scatter(x=list(x), y=list(values), name=name, mode=mode, line=line))
    if log:
        figure.update_xaxes(**_log_axis(x))
        figure.update_yaxes(**_log_axis([value for values in series.values() for value in values]))
    return figure.update_xaxes(title_text=xlabel).update_yaxes(title_text=ylabel)


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """One label a decade; also 2 and 5 where there are few decades."""
    positive = [value for value in values if value > 0]
    wide = not positive or max(positive) > 300 * min(positive)
    return {"type": "log", "exponentformat": "SI", "dtick": 1 if wide else "D2"}
