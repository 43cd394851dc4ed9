"""Charts that lay training methods over each other: histories in, plotly figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .records import Run, reduced
from .theme import COLOURS, TEMPLATE, colour, dash

__all__ = ["over_time", "pace", "staleness"]

WINDOW = 20
"""A running mean is taken over a twentieth of a run's steps: the trend, without hiding how fast it falls at first."""
MOST_LABELS = 30
"""Numbers under an axis that have room beside each other."""


def over_time(histories: Mapping[str, Any], *, title: str = "Methods over time") -> go.Figure:
    """Draw training loss and test accuracy of several runs over the seconds since each began.

    Parameters
    ----------
    histories
        Name of each run, and rank 0's `labkit.train.History`.
    title
        The chart's title.

    Notes
    -----
    The loss is a running mean over the steps of all ranks, by the time they ended: so methods whose ranks step together
    and methods whose ranks do not can be compared.
    """
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.1,
        figure=go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 400}),
    )
    for index, (name, history) in enumerate(histories.items()):
        line = {"color": COLOURS[index % len(COLOURS)], "dash": dash(index), "width": 2}
        x, y = reduced(*_loss_over_time(Run.of(history)))
        figure.add_trace(go.Scatter(x=x, y=y, name=name, legendgroup=name, mode="lines", line=line), row=1, col=1)
        rows = history.epochs
        figure.add_trace(
            go.Scatter(
                x=[row.time_s for row in rows],
                y=[100 * row.test_accuracy for row in rows],
                name=name,
                legendgroup=name,
                showlegend=False,
                mode="lines+markers",
                line=line,
                marker={"size": 7},
            ),
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(title_text="training loss, running mean", row=1, col=1)
    figure.update_yaxes(title_text="test accuracy, %", row=1, col=2)
    beside = {"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"}
    return figure.update_layout(hovermode="closest", legend=beside)


def pace(source: Any, *, title: str = "Each rank at its own pace") -> go.Figure:
    """Draw how many steps each rank had made at each second since the run began; ranks without a step are left out.

    Parameters
    ----------
    source
        Rank 0's `labkit.train.History`.
    title
        The chart's title.
    """
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 360})
    for rank, columns in Run.of(source).ranks.items():
        if not len(columns["time_s"]):
            continue
        x, y = reduced(np.insert(columns["time_s"], 0, 0.0), np.arange(len(columns["time_s"]) + 1.0))
        line = {"color": colour(rank), "dash": dash(rank), "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, name=f"rank {rank}", mode="lines", line=line))
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(title_text="steps made", rangemode="tozero")
    return figure.update_layout(hovermode="closest")


def staleness(histories: Mapping[str, Any], *, title: str = "Staleness of gradients") -> go.Figure:
    """Draw, for several runs, the share of gradients that were 0, 1, 2 … updates old when they were applied."""
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 360, "barmode": "group"})
    for index, (name, history) in enumerate(histories.items()):
        columns = [c["staleness"] for c in Run.of(history).ranks.values() if len(c["staleness"])]
        values = np.concatenate(columns) if columns else np.empty(0)
        counts = np.bincount(values.astype(int)) if len(values) else np.zeros(1)
        figure.add_trace(
            go.Bar(
                x=list(range(len(counts))),
                y=100 * counts / max(1, counts.sum()),
                name=name,
                marker={"color": COLOURS[index % len(COLOURS)]},
                hovertemplate="%{y:.1f} %",
            )
        )
    most = max((len(trace.y) for trace in figure.data), default=0)
    figure.update_xaxes(
        title_text="updates by others between reading the weights and using the gradient",
        dtick=1 if most <= MOST_LABELS else None,
    )
    figure.update_yaxes(title_text="share of gradients, %")
    return figure.update_layout(showlegend=len(histories) > 1)


def _loss_over_time(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which steps of all ranks ended, and the running mean of their losses."""
    columns = [c for c in run.ranks.values() if len(c["time_s"])]
    if not columns:
        return np.empty(0), np.empty(0)
    time = np.concatenate([c["time_s"] for c in columns])
    loss = np.concatenate([c["loss"] for c in columns])
    order = np.argsort(time)
    known = order[np.isfinite(loss[order])]
    width = min(len(known), max(1, len(known) // WINDOW))
    if not width:
        return np.empty(0), np.empty(0)
    sums = np.cumsum(np.insert(loss[known], 0, 0.0))
    return time[known][width - 1 :], (sums[width:] - sums[:-width]) / width
