"""What the ranks print and display, shown in the notebook in rank order while it comes."""

from __future__ import annotations

import sys
import time
from typing import Any

from labkit.cluster.cells import Cell
from labkit.cluster.deadlock import Verdict

__all__ = ["CellOutput", "rank_text", "show_graph"]

# Lines of one rank that are shown; all of them stay in `lab.last`.
SHOWN_LINES = 200
REDRAW_S = 0.2


def rank_text(cell: Cell) -> str:
    """What the ranks wrote, in rank order, each line with its rank in front; a longer warning of several ranks once."""
    width = len(str(max(cell.results)))
    lines: list[str] = []
    warned: dict[str, int] = {}
    for rank in cell.results:
        mark = f"rank {rank:>{width}} │ "
        own, warning = written(cell.text(rank, "stdout")), cell.text(rank, "stderr")
        first = warned.setdefault(warning, rank)
        said = written(warning)
        own += said if first == rank or len(said) < 2 else [f"the same {len(said)} lines on stderr as rank {first}"]
        for bundle in cell.displays(rank):
            if is_plain(bundle):
                own += str(bundle["data"].get("text/plain", "")).splitlines()
        if len(own) > SHOWN_LINES:
            own = [f"… {len(own) - SHOWN_LINES:,} lines before, see lab.last", *own[-SHOWN_LINES:]]
        lines += [mark + line for line in own]
    return "\n".join(lines)


def written(text: str) -> list[str]:
    """Return the lines of `text`. A progress bar rewrites its line: only what stands at the end of it is shown."""
    return [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").splitlines()]


def is_plain(bundle: dict[str, Any]) -> bool:
    """Whether a MIME bundle has nothing richer than text."""
    return set(bundle.get("data", {})) <= {"text/plain"}


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, whose outputs can be updated in place."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class CellOutput:
    """Shows one cell's output: one text that grows in place, then rich outputs in rank order."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.notebook = in_notebook()
        self.shown = ""
        self.handle: Any = None
        self.next_draw = time.monotonic() + REDRAW_S

    def refresh(self) -> None:
        """Draw what has come since, at most a few times a second."""
        if self.notebook and time.monotonic() >= self.next_draw:
            self.next_draw = time.monotonic() + REDRAW_S
            self._draw_text()

    def finish(self) -> None:
        """Draw everything, for good."""
        self._draw_text()
        if not self.notebook:
            if self.shown:
                print(self.shown, flush=True)
            return
        from IPython.display import display, publish_display_data

        for rank in self.cell.results:
            rich = [bundle for bundle in self.cell.displays(rank) if not is_plain(bundle)]
            if rich and len(self.cell.results) > 1:
                display({"text/plain": f"rank {rank}:"}, raw=True)
            for bundle in rich:
                publish_display_data(bundle["data"], bundle.get("metadata", {}))

    def _draw_text(self) -> None:
        text = rank_text(self.cell)
        if text == self.shown:
            return
        self.shown = text
        if not self.notebook:
            return
        from IPython.display import display

        bundle = {"text/plain": text}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


def show_graph(proof: Verdict) -> None:
    """In a notebook, draw who waits for whom."""
    if in_notebook() and proof.edges:
        from IPython.display import display

        from labkit.charts.live import chart_bundle
        from labkit.charts.wait_graph import wait_graph

        joined = {rank for edge in proof.edges for rank in edge[:2]}
        nodes = {rank: doing for rank, doing in proof.nodes.items() if doing != "absent" or rank in joined}
        display(chart_bundle(wait_graph(proof.edges, nodes, proof.cycle)), raw=True)
