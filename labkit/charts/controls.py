"""The widgets under the live chart: Stop, learning rate, and a line of figures."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

__all__ = ["Controls"]

AS_SET = "as the cell set it"


class Controls:
    """A Stop button, a learning-rate slider and a status line, for one training run after another.

    Parameters
    ----------
    send
        Called with (stop, learning rate or None) when the user clicks or moves the slider.
    """

    def __init__(self, send: Callable[[bool, float | None], None]) -> None:
        self._send = send
        self._quiet = False
        self.lr: float | None = None
        self.stop = widgets.Button(
            description="Stop",
            icon="stop",
            button_style="warning",
            tooltip="All ranks stop after the step they are in",
            layout=widgets.Layout(width="110px"),
        )
        self.slider = widgets.FloatLogSlider(
            value=1e-3,
            base=10,
            min=-5,
            max=0,
            step=0.05,
            description="Learning rate",
            readout=False,
            continuous_update=False,
            style={"description_width": "initial"},
            layout=widgets.Layout(width="340px"),
        )
        self.value = widgets.Label(AS_SET)
        self.status = widgets.HTML()
        self.row = widgets.HBox([self.stop, self.slider, self.value], layout=widgets.Layout(align_items="center"))
        self.stop.on_click(self._stopped)
        self.slider.observe(self._moved, names="value")
        for widget in (self.stop, self.slider):
            _clickable_while_a_cell_runs(widget)
        self.rest()

    def begin(self) -> None:
        """Make ready for a new run: nothing asked yet."""
        self.lr = None
        self.value.value = AS_SET
        self.stop.description, self.stop.disabled = "Stop", False
        self.slider.disabled = False

    def rest(self) -> None:
        """Take no clicks: no run is going on."""
        self.stop.disabled = self.slider.disabled = True

    def say(self, text: str, error: str = "") -> None:
        """Show the line of figures, and what went wrong, if something did."""
        shown = f"<span style='font-variant-numeric: tabular-nums'>{html.escape(text)}</span>"
        if error:
            shown += f"<br><b style='color:#C9372C'>{html.escape(error)}</b>"
        if shown != self.status.value:
            self.status.value = shown

    def _stopped(self, _button: Any) -> None:
        self.stop.description, self.stop.disabled = "Stopping …", True
        self._tell(True)

    def _moved(self, change: Any) -> None:
        self.lr = float(change["new"])
        self.value.value = f"{self.lr:.2g}"
        self._tell(self.stop.description != "Stop")

    def _tell(self, stop: bool) -> None:
        try:
            self._send(stop, self.lr)
        except (RuntimeError, ValueError) as error:
            self.say("", str(error))


def _clickable_while_a_cell_runs(widget: Any) -> None:
    """Let clicks reach the kernel at once, not after the training cell.

    JupyterLab sends them through a subshell, a thread beside the busy one. ipykernel 7.4 overrides that: it
    asks the front end to answer a widget through the shell that spoke last for it, which is the busy one
    (7.1 did not). Handing back the front end's own choice undoes this. A private name of ipykernel, hence
    the look first; where it is missing, clicks act as that ipykernel handles them.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
