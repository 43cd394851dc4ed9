"""Who waits for whom, as a picture: ranks on a circle, an arrow from each rank that waits to the one it waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import networkx as nx
import plotly.graph_objects as go

from .theme import INK, PARTS, TEMPLATE

__all__ = ["wait_graph"]

ALARM = PARTS["wait"]
"""Arrows and ranks of the cycle."""
CALM = "#59636E"
OVER = "#C9CED6"
"""Ranks that have left the cell."""
LEFT = ("finished", "failed", "absent", "gone")

MOST_ON_A_CIRCLE = 12
RADIUS_PX = 21
"""Of a rank's disc."""
SIDE_PX = 5
"""Arrows keep to one side by this much, so that two ranks that wait for each other get two arrows."""
LONGEST = 28
"""Characters of a call that are shown; the whole of it is in the hover text."""

Point = tuple[float, float]


def wait_graph(
    edges: Iterable[tuple[int, int, str]],
    nodes: Mapping[int, str],
    cycle: Sequence[int] = (),
    *,
    title: str = "Who waits for whom",
) -> go.Figure:
    """Draw a wait-for graph.

    Parameters
    ----------
    edges
        ``(waiting rank, awaited rank, call)``.
    nodes
        Every rank to draw, and what it does in a word, such as "waiting", "computing" or "finished".
    cycle
        Ranks each of which waits for the next, and the last for the first; drawn in the alarm colour.
    title
        The chart's title.

    Returns
    -------
    plotly.graph_objects.Figure
        Ranks clockwise in rank order, the first on top (of two ranks: on the left).
    """
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(sorted(nodes))
    graph.add_edges_from((rank, other, {"call": call}) for rank, other, call in edges)
    places = _places(graph)
    around = set(zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))
    figure = go.Figure(layout=_layout(places, title))
    for rank, other in dict.fromkeys(graph.edges()):
        if rank != other:
            _arrow(figure, places[rank], places[other], ALARM if (rank, other) in around else CALM)
    beside = len(places) != 2  # there is more room under two ranks than at their sides
    roomy = len(places) <= MOST_ON_A_CIRCLE  # otherwise an awaited rank stands amid its arrows; its colour must do
    for rank, place in places.items():
        _label(
            figure,
            place,
            _calls(graph, rank),
            nodes.get(rank, "") if roomy else "",
            ALARM if rank in cycle else CALM,
            beside,
        )
    figure.add_trace(_discs(graph, places, nodes, set(cycle)))
    return figure


def _places(graph: nx.MultiDiGraph) -> dict[int, Point]:
    """Centre of each disc in pixels, y upwards."""
    count = len(graph)
    if count > MOST_ON_A_CIRCLE:
        spread = 34.0 * math.sqrt(count) + 60
        found = nx.kamada_kawai_layout(nx.Graph(graph)) if graph.edges else nx.circular_layout(graph)
        return {rank: (float(x) * spread * 1.6, float(y) * spread) for rank, (x, y) in found.items()}
    # networkx goes counter-clockwise from the right; with x and y exchanged it is clockwise from the top.
    turn = nx.circular_layout(graph)
    if count == 2:
        return {rank: (150.0 * (-1 if index == 0 else 1), 0.0) for index, rank in enumerate(graph)}
    wide, high = 120.0 + 14.0 * count, 80.0 + 12.0 * count
    if count == 1:
        wide = high = 0.0
    return {rank: (float(y) * wide, float(x) * high) for rank, (x, y) in turn.items()}


def _layout(places: Mapping[int, Point], title: str) -> dict[str, object]:
    across = max((abs(x) for x, _ in places.values()), default=0.0) + 235
    up = max((abs(y) for _, y in places.values()), default=0.0) + 70
    hidden = {"visible": False, "fixedrange": True}
    return {
        "template": TEMPLATE,
        "title": {"text": escape(title), "pad": {"l": 16}},
        "width": round(2 * across),
        "height": round(2 * up) + 60,
        "margin": {"l": 0, "r": 0, "t": 60, "b": 0},
        "showlegend": False,
        "hovermode": "closest",
        # One unit is one pixel, so that discs, arrows and labels keep their distances.
        "xaxis": {**hidden, "range": [-across, across]},
        "yaxis": {**hidden, "range": [-up, up]},
    }


def _arrow(figure: go.Figure, start: Point, end: Point, colour: str) -> None:
    length = math.dist(start, end)
    along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
    aside = (along[1] * SIDE_PX, -along[0] * SIDE_PX)
    gap = RADIUS_PX + 3
    tail = (start[0] + along[0] * gap + aside[0], start[1] + along[1] * gap + aside[1])
    head = (end[0] - along[0] * gap + aside[0], end[1] - along[1] * gap + aside[1])
    figure.add_annotation(
        x=head[0],
        y=head[1],
        ax=tail[0],
        ay=tail[1],
        xref="x",
        yref="y",
        axref="x",
        ayref="y",
        text="",
        showarrow=True,
        arrowhead=2,
        arrowsize=1.1,
        arrowwidth=2.4 if colour == ALARM else 1.6,
        arrowcolor=colour,
    )


def _calls(graph: nx.MultiDiGraph, rank: int) -> list[str]:
    return list(dict.fromkeys(call for _, _, call in graph.out_edges(rank, data="call")))


def _label(figure: go.Figure, place: Point, calls: Sequence[str], doing: str, colour: str, beside: bool) -> None:
    """Write the call at the tail of its arrows, outside the circle, where no other label is."""
    shown = [escape(_short(call)) for call in calls[:2]] + ([f"and {len(calls) - 2} more"] if len(calls) > 2 else [])
    if not shown:
        shown, colour = [escape(doing)], CALM
    x, y = place
    if beside and abs(x) > RADIUS_PX:
        anchor = {"x": x + math.copysign(RADIUS_PX + 5, x), "y": y, "xanchor": "left" if x > 0 else "right"}
        anchor["yanchor"] = "middle"
    else:
        below = y <= 0
        anchor = {"x": x, "y": y + (-1 if below else 1) * (RADIUS_PX + 5), "xanchor": "center"}
        anchor["yanchor"] = "top" if below else "bottom"
    figure.add_annotation(text="<br>".join(shown), showarrow=False, font={"size": 12, "color": colour}, **anchor)


def _short(call: str) -> str:
    """The call, cut off after an argument where it is too long."""
    if len(call) <= LONGEST:
        return call
    cut = call[: LONGEST - 1]
    whole, comma, _ = cut.rpartition(", ")
    return f"{whole}, …" if comma else f"{cut}…"


def _discs(
    graph: nx.MultiDiGraph, places: Mapping[int, Point], nodes: Mapping[int, str], cycle: set[int]
) -> go.Scatter:
    def fill(rank: int) -> str:
        if rank in cycle:
            return ALARM
        return OVER if nodes.get(rank) in LEFT else "#FFFFFF"

    def hover(rank: int) -> str:
        waits: dict[str, list[str]] = {}
        for _, other, call in graph.out_edges(rank, data="call"):
            waits.setdefault(call, []).append(str(other))
        lines = [f"waits for {', '.join(others)} in {call}" for call, others in waits.items()]
        return "<br>".join(escape(line) for line in [f"rank {rank}: {nodes.get(rank, '')}", *lines])

    return go.Scatter(
        x=[x for x, _ in places.values()],
        y=[y for _, y in places.values()],
        mode="markers+text",
        text=[str(rank) for rank in places],
        textfont={"size": 15, "color": ["#FFFFFF" if rank in cycle else INK for rank in places]},
        marker={
            "size": 2 * RADIUS_PX,
            "color": [fill(rank) for rank in places],
            "line": {"width": 1.6, "color": [ALARM if rank in cycle else CALM for rank in places]},
            "opacity": 1.0,
        },
        hovertext=[hover(rank) for rank in places],
        hoverinfo="text",
        cliponaxis=False,
    )
