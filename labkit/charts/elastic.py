"""The chart of a training that ranks leave and come back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .records import reduced
from .theme import INK, TEMPLATE, colour

__all__ = ["world_size_over_time"]

WINDOW = 10
"""Images a second are taken over a tenth of a run's steps: one step's time says little."""
RANK_PX = 34
"""Height of a rank's bar and the space around it, in pixels."""
LIGHT = "#59636E"
"""Of the lines and words where ranks die and come back."""


def world_size_over_time(histories: Any, *, title: str = "Which ranks train") -> go.Figure:
    """Draw which ranks train at each time, and below it how many images all of them together train a second.

    Parameters
    ----------
    histories
        A `labkit.train.History` of `labkit.train.elastic`, from a rank that lived to its end; or several runs that
        went on from each other. These are drawn one behind the other, without the time between them.
    title
        The chart's title.

    Raises
    ------
    ValueError
        When there is no history, or one of another method, which does not say which ranks trained.
    """
    runs = list(histories) if isinstance(histories, Sequence) else [histories]
    if not runs or not all(run.changes for run in runs):
        raise ValueError("only a history of train.elastic says which ranks trained: it has changes")
    changes = list(_changes(runs))
    end = sum(_seconds(run) for run in runs)
    every = sorted({rank for _, ranks in changes for rank in ranks})
    heights = [RANK_PX * len(every), 170]
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.1,
        row_heights=heights,
        figure=go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": 140 + sum(heights)}),
    )
    for rank in every:
        spans = list(_spans(rank, changes, end))
        figure.add_trace(
            go.Bar(
                y=[f"rank {rank}"] * len(spans),
                base=[begin for begin, _ in spans],
                x=[until - begin for begin, until in spans],
                name=f"rank {rank}",
                orientation="h",
                marker={"color": colour(rank)},
                showlegend=False,
                hovertemplate="trains from %{base:.2f} s on, for %{x:.2f} s",
            ),
            row=1,
            col=1,
        )
    x, y = reduced(*_images_per_s(runs))
    line = {"color": INK, "width": 2}
    trace = go.Scatter(x=x, y=y, name="all ranks", mode="lines", line=line, hovertemplate="%{y:,.0f} images/s")
    figure.add_trace(trace.update(showlegend=False), row=2, col=1)
    _mark(figure, changes)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", row=1, col=1)
    figure.update_yaxes(title_text="images/s", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(range=[0, end])
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return figure.update_layout(barmode="overlay", bargap=0.35, hovermode="closest")


def _seconds(run: Any) -> float:
    """How long a run took, its tests included."""
    ends = [*run.steps.time_s[-1:], *(row.time_s for row in run.epochs[-1:]), run.changes[-1]["time_s"]]
    return float(max(ends))


def _changes(runs: Sequence[Any]) -> Iterator[tuple[float, list[int]]]:
    """From which second on which ranks train; the same ranks may come twice."""
    begin = 0.0
    for run in runs:
        for index, change in enumerate(run.changes):
            # All set out together; the first change is noted once they have come to the same weights.
            yield (begin + change["time_s"] if index else begin), change["ranks"]
        begin += _seconds(run)


def _spans(rank: int, changes: Sequence[tuple[float, list[int]]], end: float) -> Iterator[tuple[float, float]]:
    """From when to when `rank` trains."""
    begin = None
    for time_s, ranks in changes:
        if rank in ranks and begin is None:
            begin = time_s
        elif rank not in ranks and begin is not None:
            yield begin, time_s
            begin = None
    if begin is not None:
        yield begin, end


def _mark(figure: go.Figure, changes: Sequence[tuple[float, list[int]]]) -> None:
    """Draw a line where ranks died or came back, and say which."""
    before = changes[0][1]
    for time_s, ranks in changes[1:]:
        lost, joined = sorted(set(before) - set(ranks)), sorted(set(ranks) - set(before))
        words = [f"{_named(some)} {what}" for some, what in ((lost, "died"), (joined, "came back")) if some]
        before = ranks
        if words:
            figure.add_vline(x=time_s, line={"color": LIGHT, "dash": "dot", "width": 1.2})
            figure.add_annotation(
                x=time_s,
                xref="x",
                y=1,
                yref="paper",
                yanchor="bottom",
                text=", ".join(words),
                showarrow=False,
                font={"size": 12, "color": LIGHT},
            )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _images_per_s(runs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """When steps ended, and the images a second that all ranks trained in the steps before: not in tests between."""
    begin, times, rates = 0.0, [np.empty(0)], [np.empty(0)]
    for run in runs:
        steps = run.steps
        images = [np.full(row.steps, row.images_per_s * row.seconds / max(1, row.steps)) for row in run.epochs]
        seen = np.concatenate([np.zeros(1), *images]).cumsum()
        took = np.insert(steps.compute_s + steps.wait_s + steps.transfer_s, 0, 0.0).cumsum()
        count = min(len(seen), len(took)) - 1
        width = max(1, count // WINDOW)
        if count:
            images_in, seconds_in = (part[width : count + 1] - part[: count + 1 - width] for part in (seen, took))
            times += [begin + steps.time_s[width - 1 : count], np.array([begin + _seconds(run)])]
            rates += [images_in / seconds_in, np.array([np.nan])]  # a gap between two runs
        begin += _seconds(run)
    return np.concatenate(times), np.concatenate(rates)
