"""How labkit's charts look: one plotly template, one colour for each rank in every chart."""

from __future__ import annotations

import plotly.graph_objects as go
import plotly.io as pio

__all__ = ["COLOURS", "INK", "PARTS", "TEMPLATE", "colour", "dash"]

COLOURS: tuple[str, ...] = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7A5195",
    "#8C8C8C",
)
"""Colours that stay apart for colour-blind eyes: Okabe and Ito, "Color Universal Design" (2008), with two
of theirs, yellow and black, replaced: yellow is too pale on white, and black is kept for means."""

PARTS: dict[str, str] = {"compute": "#4C78A8", "wait": "#E0605E", "transfer": "#F2B134"}
"""Colours of the parts of a step."""

INK = "#1F2328"
"""Text and means."""

_DASHES = ("solid", "dash", "dot", "dashdot")
_RULE = "#C9CED6"
_GRID = "#ECEEF1"


def colour(rank: int) -> str:
    """Return the colour of a rank; they repeat after eight, with another `dash`."""
    return COLOURS[rank % len(COLOURS)]


def dash(rank: int) -> str:
    """Return the line style of a rank: solid for the first eight, then dashed, dotted, both."""
    return _DASHES[rank // len(COLOURS) % len(_DASHES)]


def _template() -> go.layout.Template:
    axis = {
        "showline": True,
        "linecolor": _RULE,
        "gridcolor": _GRID,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": _RULE,
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 12.5}},
    }
    return go.layout.Template(
        layout={
            "colorway": list(COLOURS),
            "font": {
                "family": "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', sans-serif",
                "size": 12.5,
                "color": INK,
            },
            # A white card of its own: dark text on it is as legible in a dark JupyterLab as in a light one.
            "paper_bgcolor": "#FFFFFF",
            "plot_bgcolor": "#FFFFFF",
            "title": {
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 14},
                "font": {"size": 16},
                "subtitle": {"font": {"size": 12, "color": "#59636E"}},
            },
            "margin": {"l": 60, "r": 20, "t": 76, "b": 48},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": "#FFFFFF", "bordercolor": _RULE, "font": {"color": INK}},
            "legend": {
                "orientation": "h",
                "x": 1,
                "xanchor": "right",
                "y": 1.02,
                "yanchor": "bottom",
                "font": {"size": 12},
            },
            "xaxis": axis,
            "yaxis": axis,
        }
    )


TEMPLATE = "labkit"
"""The template's name for ``fig.update_layout(template=…)``; plotly's own default stays as it is."""
pio.templates[TEMPLATE] = _template()
