"""The lab's card, drawn anew while the ranks work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["LiveCard"]

PERIOD_S = 0.5


class LiveCard:
    """A card in the notebook that a thread keeps up to date.

    Parameters
    ----------
    look
        Gives the card as HTML, None once there is nothing more to show. Called in the card's own thread, and at last
        with True: it shall let go of what it looks with.
    """

    def __init__(self, look: Callable[[bool], str | None]) -> None:
        self._look = look
        self._html = ""
        self._handle: Any = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="labkit card", daemon=True)

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(self._html), display_id=True)
            self._thread.start()

    def _follow(self) -> None:
        from IPython.display import HTML

        while (html := self._look(False)) is not None:
            if html != self._html:
                self._html = html
                self._handle.update(HTML(html))
            if self._closing.wait(PERIOD_S):
                break
        self._look(True)

    def close(self) -> None:
        """Leave the card as it is."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
