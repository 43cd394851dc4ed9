"""Charts of training: records in, plotly figure out.

Each takes a `labkit.train.History`, the live chart's store, or plain arrays; see `Run.of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .records import Run, reduced
from .theme import COLOURS, INK, PARTS, TEMPLATE, colour, dash

__all__ = ["compare", "loss_per_rank", "step_parts", "step_time_per_rank", "training"]

MOST_NAMED = 16
"""Ranks named in a legend; more would hide the chart."""
MOST_ABOVE = 6
"""Lines named in one row above a chart; more are named beside it."""
_BESIDE = {"orientation": "v", "tracegroupgap": 0, "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"}


def loss_per_rank(source: Any, *, title: str = "Training loss") -> go.Figure:
    """Draw the loss of every rank over the steps, and their mean."""
    run = Run.of(source)
    figure = _figure(title, x="step", y="loss")
    with_mean = len(run.ranks) > 1 or run.mean_loss is not None
    for rank, columns in run.ranks.items():
        figure.add_trace(_line(rank, columns["step"], columns["loss"], faint=with_mean))
    if with_mean:
        figure.add_trace(_mean_line(run))
    return _with_legend(figure)


def step_time_per_rank(source: Any, *, title: str = "Step time") -> go.Figure:
    """Draw how long each rank's steps took, in milliseconds."""
    run = Run.of(source)
    figure = _figure(title, x="step", y="ms per step")
    for rank, columns in run.ranks.items():
        figure.add_trace(_line(rank, columns["step"], run.step_ms(rank)))
    return _with_legend(figure).update_yaxes(rangemode="tozero")


def step_parts(source: Any, *, title: str = "Where a step's time goes") -> go.Figure:
    """Draw, for each rank, the mean milliseconds a step spends computing, waiting and moving data."""
    run = Run.of(source)
    figure = _figure(title, x="ms per step, mean over the run", y="")
    names = [f"rank {rank}" for rank in run.ranks]
    for part, part_colour in PARTS.items():
        means = [float(np.mean(c[f"{part}_s"])) * 1000 if len(c["step"]) else 0.0 for c in run.ranks.values()]
        figure.add_trace(
            go.Bar(
                y=names,
                x=means,
                name=part,
                orientation="h",
                marker={"color": part_colour},
                hovertemplate="%{x:.2f} ms",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.3, hovermode="y unified", height=150 + 34 * max(2, len(names)))
    figure.update_layout(legend={"traceorder": "normal"})
    return figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")


def training(source: Any, *, title: str = "Training", subtitle: str = "") -> go.Figure:
    """Draw loss and step time of every rank side by side, as the live chart does."""
    run = Run.of(source)
    figure = panels(list(run.ranks), title=title)
    fill(figure, run)
    return figure.update_layout(title={"subtitle": {"text": subtitle}})


def compare(sources: Mapping[str, Any], *, column: str = "loss", title: str = "") -> go.Figure:
    """Draw one column of several runs over each other, each the mean of its ranks.

    Parameters
    ----------
    sources
        Name of each run, and its history.
    column
        ``"loss"``, or another column of `labkit.telemetry.COLUMNS`; seconds are drawn as milliseconds.
    title
        The chart's title; default: the column's name.
    """
    seconds = column.endswith("_s")
    label = f"{column.removesuffix('_s')}, ms" if seconds else column
    figure = _figure(title or label.capitalize(), x="step", y=label)
    for index, (name, source) in enumerate(sources.items()):
        steps, values = Run.of(source).mean(column)
        x, y = reduced(steps, values * 1000 if seconds else values)
        line = {"color": COLOURS[index % len(COLOURS)], "dash": dash(index * len(COLOURS)), "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines", line=line))
    return _with_legend(figure)


def panels(ranks: list[int], *, title: str) -> go.Figure:
    """Make the empty two-panel figure: each rank's loss and mean loss, then each rank's step time."""
    figure = make_subplots(rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.09, figure=_figure(title))
    several = len(ranks) > 1
    empty = np.empty(0)
    for rank in ranks:
        figure.add_trace(_line(rank, empty, empty, faint=several), row=1, col=1)
    figure.add_trace(_mean_line(Run({})), row=1, col=1)
    for rank in ranks:
        figure.add_trace(_line(rank, empty, empty).update(showlegend=False), row=1, col=2)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss", row=1, col=1)
    figure.update_yaxes(title_text="ms per step", rangemode="tozero", row=1, col=2)
    # Beside the panels: above them it would run into the line of figures under the title.
    figure.update_layout(height=380, showlegend=len(ranks) <= MOST_NAMED, legend=_BESIDE)
    return figure


def fill(figure: go.Figure, run: Run) -> None:
    """Put a run's steps into a figure that `panels` made; ranks that are not in the run become empty.

    The figure's traces are those of its ranks' loss, the mean, and its ranks' step time, in this order.
    """
    count = (len(figure.data) - 1) // 2
    empty = np.empty(0)
    for index, trace in enumerate(figure.data):
        rank = trace.meta
        if rank is None:
            with_mean = len(run.ranks) > 1 or run.mean_loss is not None
            x, y = run.mean("loss") if with_mean else (empty, empty)
        elif rank not in run.ranks:
            x, y = empty, empty
        else:
            columns = run.ranks[rank]
            x, y = columns["step"], columns["loss"] if index < count else run.step_ms(rank)
        trace.x, trace.y = reduced(x, y)


def _figure(title: str, x: str = "", y: str = "") -> go.Figure:
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 360})
    return figure.update_xaxes(title_text=x).update_yaxes(title_text=y)


def _with_legend(figure: go.Figure) -> go.Figure:
    names = len(figure.data)
    figure.update_layout(showlegend=1 < names <= MOST_NAMED + 1)
    return figure.update_layout(legend=_BESIDE) if names > MOST_ABOVE else figure


def _line(rank: int, x: np.ndarray, y: np.ndarray, faint: bool = False) -> go.Scatter:
    x, y = reduced(x, y)
    return go.Scatter(
        x=x,
        y=y,
        name=f"rank {rank}",
        meta=rank,
        legendgroup=f"rank {rank}",
        mode="lines",
        line={"color": colour(rank), "dash": dash(rank), "width": 1.1 if faint else 1.5},
        opacity=0.65 if faint else 0.9,
        hovertemplate="%{y:.4g}",
    )


def _mean_line(run: Run) -> go.Scatter:
    x, y = reduced(*run.mean("loss"))
    line = {"color": INK, "width": 2.4}
    return go.Scatter(x=x, y=y, name="mean", mode="lines", line=line, hovertemplate="%{y:.4g}")
