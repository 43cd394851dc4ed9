"""The chart that grows while the ranks train, and stays in the notebook when they are done."""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from .records import Run
from .training import fill, panels, training

if TYPE_CHECKING:
    from labkit.telemetry import Collector

    from .controls import Controls

__all__ = ["PLOTLY", "Live", "chart_bundle"]

PLOTLY = "application/vnd.plotly.v1+json"
"""The output type under which notebooks keep an interactive plotly chart."""
_VIEW = "application/vnd.jupyter.widget-view+json"
PAUSE = 0.25
"""Seconds between two drawings: a drawing costs a browser some 40 ms."""
RATE_WINDOW = 3.0
"""Seconds over which samples per second are counted."""


class Live:
    """Loss and step time of every rank, drawn four times a second while they train.

    In a notebook the chart shows itself when it is made, with a Stop button, a learning-rate slider and a
    line of figures under it. `settle`, called when a cell is done, turns it into a static interactive chart
    that the notebook file and its report keep; a later run brings it to life again. Outside a notebook
    nothing is shown and `figure` draws what has arrived.

    Parameters
    ----------
    collector
        Where the ranks' steps arrive.
    ranks
        Ranks in the world.
    title
        The chart's title.
    show
        Whether to show the chart now.

    Attributes
    ----------
    error
        What went wrong in the last drawing, None if nothing; it stands in the status line too.
    """

    def __init__(self, collector: Collector, ranks: int, title: str = "Training", *, show: bool = True) -> None:
        self.collector = collector
        self.ranks = ranks
        self.title = title
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._widget: go.FigureWidget | None = None
        self._controls: Controls | None = None
        self._painter: threading.Thread | None = None
        self._handle: Any = None
        self._shown_in: int | None = None
        self._live = False
        self._run = collector.store.run
        self._seen: tuple[float, ...] = self._state()
        self._settled = collector.store.received
        self._rates: deque[tuple[float, float]] = deque()
        if show and _kernel_shell() is not None:
            self.show()

    def show(self) -> None:
        """Show the chart under the current cell; nothing happens outside a notebook."""
        shell = _kernel_shell()
        if shell is None:
            return
        from IPython.display import display

        with self._lock:
            self._handle = display(self._new_view(), raw=True, display_id=True)
            self._shown_in = shell.execution_count
            if self._painter is None:
                self._painter = threading.Thread(target=self._paint, name="labkit-painter", daemon=True)
                self._painter.start()

    def _ipython_display_(self) -> None:
        # `labkit.live()` as the last line of a cell: it is already on the screen.
        shell = _kernel_shell()
        if shell is None:
            print(repr(self))
        elif self._shown_in != shell.execution_count:
            self.show()

    def __repr__(self) -> str:
        return f"<Live chart {self.title!r} of {self.ranks} ranks: {self.summary()}>"

    def figure(self) -> go.Figure:
        """Return the chart of the latest run as a plain plotly figure, with its figures under the title."""
        return training(self.collector.store, title=self.title, subtitle=self.summary(whole_run=True))

    def summary(self, *, whole_run: bool = False) -> str:
        """Say in one line where training is: step, samples per second, steps received and dropped.

        Parameters
        ----------
        whole_run
            Count samples per second from the run's begin; default: over the last three seconds.
        """
        store, counts = self.collector.store, self.collector.counts
        last = [step for rank in store.shown() if (step := store.latest(rank)) is not None]
        if not last:
            return "waiting for the first step"
        now = max(step.time for step in last)
        samples = store.samples()
        rate = self._rate(now, samples, store.run if whole_run else None)
        parts = [f"step {max(step.step for step in last) + 1:,}", f"epoch {max(s.epoch for s in last) + 1}"]
        if rate:
            parts.append(f"{rate:,.0f} samples/s")
        parts.append(f"{counts.received:,} steps received, {counts.dropped:,} dropped")
        if counts.lost or counts.malformed:
            parts.append(f"{counts.lost:,} lost, {counts.malformed:,} messages unreadable")
        return " · ".join(parts)

    def settle(self) -> None:
        """Turn the live chart into a static one, if steps have arrived since the last time.

        Call it in the main thread when a cell is done: only there does the notebook take the new output as
        part of its file.
        """
        if self._handle is None or self._closing.is_set():
            return
        self._wait_for_the_tail()
        with self._lock:
            received = self.collector.store.received
            if received == self._settled:
                return
            self._settled = received
            self._seen = self._state()
            self._run = self.collector.store.run
            self._draw()
            if self._controls is not None:
                self._controls.rest()
            figure = self.figure()
            self._handle.update(chart_bundle(figure), raw=True)
            self._live = False

    def close(self) -> None:
        """Stop drawing; what is shown stays. The collector is left to whoever opened it."""
        self._closing.set()
        if self._controls is not None:
            self._controls.rest()

    def _new_view(self) -> dict[str, Any]:
        """Make the widgets, drawn up to now, and return the output that shows them.

        The figure is a new one each time: plotly's view goes on listening after it was taken off the page,
        fails at the next drawing, and so keeps a second view of the same figure from being drawn.
        """
        import ipywidgets

        from .controls import Controls

        if self._controls is None:
            self._controls = Controls(self._send)
        if self._widget is not None:
            self._widget.close()
        figure = panels(list(range(self.ranks)), title=self.title)
        fill(figure, Run.of(self.collector.store))
        self._widget = go.FigureWidget(figure)
        box = ipywidgets.VBox([self._widget, self._controls.row, self._controls.status])
        self._controls.say(self.summary())
        self._live = True
        return {_VIEW: box._repr_mimebundle_()[_VIEW], "text/plain": repr(self)}

    def _paint(self) -> None:
        while not self._closing.wait(PAUSE):
            try:
                with self._lock:
                    self._tick()
                self.error = None
            except Exception as error:
                # A chart that cannot be drawn must neither end silently nor end the training.
                self.error = error
                assert self._controls is not None
                self._controls.say("", f"The chart could not be drawn: {type(error).__name__}: {error}")
            if self.collector.closed:
                self.close()

    def _tick(self) -> None:
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        assert self._controls is not None
        if self.collector.store.run != self._run:
            self._run = self.collector.store.run
            self._rates.clear()
            self._controls.begin()
        if not self._live:
            self._handle.update(self._new_view(), raw=True)
        self._draw()

    def _draw(self) -> None:
        assert self._widget is not None
        assert self._controls is not None
        with self._widget.batch_update():
            fill(self._widget, Run.of(self.collector.store))
            # Only now: the figure was made off the page, where plotly finds no width and takes 700 pixels.
            self._widget.layout.autosize = True
        failed = self.collector.error
        self._controls.say(self.summary(), f"No more steps are read: {failed}" if failed else "")

    def _send(self, stop: bool, lr: float | None) -> None:
        self.collector.send_control(stop=stop, lr=lr)

    def _state(self) -> tuple[float, ...]:
        store, counts = self.collector.store, self.collector.counts
        return (store.run, store.received, counts.dropped, counts.malformed, self.collector.error is not None)

    def _rate(self, now: float, samples: float, begun: float | None) -> float:
        if begun is not None:
            return samples / (now - begun) if now > begun else 0.0
        self._rates.append((now, samples))
        while now - self._rates[0][0] > RATE_WINDOW and len(self._rates) > 2:
            self._rates.popleft()
        before, had = self._rates[0]
        return (samples - had) / (now - before) if now > before else 0.0

    def _wait_for_the_tail(self, quiet: float = 0.06, most: float = 1.0) -> None:
        """Wait until nothing has arrived for a moment: the ranks' last batches are on their way."""
        end = time.monotonic() + most
        received, since = self.collector.store.received, time.monotonic()
        if received == self._settled:
            quiet /= 3  # most cells train nothing; they should not wait long
        while time.monotonic() < end and time.monotonic() - since < quiet:
            time.sleep(0.005)
            if self.collector.store.received != received:
                received, since = self.collector.store.received, time.monotonic()


def chart_bundle(figure: go.Figure) -> dict[str, Any]:
    """Return what a notebook keeps of a figure: its data for plotly, and its title as text."""
    chart = _plain(json.loads(figure.to_json()))
    chart["config"] = {"responsive": True, "displaylogo": False}
    title = figure.layout.title
    return {PLOTLY: chart, "text/plain": f"Chart: {title.text}. {title.subtitle.text or ''}".strip()}


def _plain(value: Any) -> Any:
    """Return plotly's JSON with its packed arrays as lists of numbers, which every viewer reads."""
    if isinstance(value, dict):
        if value.keys() >= {"dtype", "bdata"}:
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
            shape = [int(n) for n in str(value.get("shape", len(array))).split(",")]
            # Seven digits: more than a screen resolves, and half the size of the file.
            return _numbers(array.reshape(shape).tolist())
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if not math.isfinite(value):
        return None  # JSON has no NaN; plotly leaves a gap for null
    return int(value) if value == int(value) else float(f"{value:.7g}")


def _kernel_shell() -> Any:
    """Return the notebook's shell, None in a script or a terminal."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None
