"""How a lab shows itself: one row a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

__all__ = ["RankStatus", "card_html", "card_text"]

COLUMNS = ("rank", "host", "pid", "device", "threads", "memory", "state", "doing")
STATE_COLOURS = {
    "ready": "#2e7d32",
    "computing": "#1565c0",
    "waiting": "#6a1b9a",
    "failed": "#c62828",
    "stopped": "#b26a00",
    "silent": "#b26a00",
    "gone": "#c62828",
}


@dataclass(frozen=True)
class RankStatus:
    """One rank of a lab.

    Attributes
    ----------
    memory
        Resident memory in bytes, None when the process is gone.
    state
        "starting", "ready", "computing", "waiting", "failed" (in the cell that still runs elsewhere), "stopped" (by a
        signal), "silent" (it does not answer) or "gone".
    doing
        For whom or since when, in words.
    """

    rank: int
    host: str
    pid: int
    device: str
    threads: int
    memory: int | None
    state: str
    doing: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of the card's columns."""
        memory = "–" if self.memory is None else f"{self.memory / 1e6:,.0f} MB"
        return (
            str(self.rank),
            self.host,
            str(self.pid),
            self.device,
            str(self.threads),
            memory,
            self.state,
            self.doing,
        )


def card_html(title: str, rows: Iterable[RankStatus]) -> str:
    """The card as HTML that follows JupyterLab's light or dark theme."""
    right = {"rank", "pid", "threads", "memory"}
    align = {name: "right" if name in right else "left" for name in COLUMNS}
    head = "".join(f'<th style="text-align:{align[name]};padding:2px 12px">{name}</th>' for name in COLUMNS)
    body = ""
    for row in rows:
        cells = ""
        for name, text in zip(COLUMNS, row.cells(), strict=True):
            colour = f";color:{STATE_COLOURS.get(text, 'inherit')};font-weight:600" if name == "state" else ""
            cells += f'<td style="text-align:{align[name]};padding:2px 12px{colour}">{escape(text)}</td>'
        body += f"<tr>{cells}</tr>"
    return (
        '<div style="font-family:var(--jp-ui-font-family,sans-serif)">'
        f'<div style="margin:0 0 4px"><b>{escape(title)}</b></div>'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def card_text(title: str, rows: Iterable[RankStatus]) -> str:
    """The card as plain text."""
    table = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title, *lines])
