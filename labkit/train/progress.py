"""What training prints while it goes on."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

__all__ = ["PROGRESS_VARIABLE", "Progress"]

PROGRESS_VARIABLE = "LABKIT_PROGRESS"
"""Set to "rewrite" by whoever starts ranks whose output ends on a terminal: they cannot see that themselves."""
PAUSE_S = 1.0
"""Time between two rewritings of the line."""


class Progress:
    """One line an epoch; where the line can be rewritten, also how far the epoch is, once a second.

    Parameters
    ----------
    stream
        Where it is written; default: standard output.
    rewrite
        Whether the line can be rewritten; default: on a terminal and in a notebook.
    """

    def __init__(self, stream: TextIO | None = None, *, rewrite: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        asked = os.environ.get(PROGRESS_VARIABLE) == "rewrite"
        # A notebook's output stream is ipykernel's own; `%%px` shows what stands last on a rewritten line.
        in_notebook = type(self._stream).__module__.startswith("ipykernel")
        self._rewrite = asked or in_notebook or self._stream.isatty() if rewrite is None else rewrite
        self._next = time.monotonic() + PAUSE_S
        self._width = 0

    def step(self, epoch: int, epochs: int, step: int, steps: int, loss: float) -> None:
        """After a step, counted from 1: rewrite the line, if a second has passed."""
        if self._rewrite and time.monotonic() >= self._next:
            self._next = time.monotonic() + PAUSE_S
            self._write(f"epoch {epoch}/{epochs}  step {step:,}/{steps:,}  loss {loss:.4f}", end="")

    def epoch(self, line: str) -> None:
        """After an epoch: the line that stays."""
        self._write(line, end="\n")

    def _write(self, line: str, end: str) -> None:
        over = "\r" if self._width else ""
        self._stream.write(f"{over}{line.ljust(self._width)}{end}")
        self._stream.flush()
        self._width = 0 if end else len(line)
