"""Several runs in one table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .history import History

__all__ = ["Comparison", "Summary"]


@dataclass(frozen=True)
class Summary:
    """One run in a few figures.

    Attributes
    ----------
    accuracy, loss
        On the test set after the last epoch; NaN without validation.
    seconds
        Of the whole run, tests included.
    images_per_s
        Training images of all ranks a second, tests not counted.
    communication
        Share, 0…1, of all computing ranks' step time that they waited or moved data.
    mean_staleness, max_staleness
        Of all gradients; 0 where all ranks step together.
    """

    accuracy: float
    loss: float
    seconds: float
    images_per_s: float
    communication: float
    mean_staleness: float
    max_staleness: int

    @classmethod
    def of(cls, history: History) -> Summary:
        """Sum `history` up; rank 0's knows all ranks' steps."""
        last = history.epochs[-1] if history.epochs else None
        series = [steps for steps in history.by_rank or [history.steps] if len(steps)]
        idle = sum(float((steps.wait_s + steps.transfer_s).sum()) for steps in series)
        busy = sum(float(steps.compute_s.sum()) for steps in series)
        staleness = np.concatenate([steps.staleness for steps in series]) if series else np.zeros(1)
        seconds = sum(row.seconds for row in history.epochs)
        images = sum(row.seconds * row.images_per_s for row in history.epochs)
        return cls(
            accuracy=last.test_accuracy if last else math.nan,
            loss=last.test_loss if last else math.nan,
            seconds=history.seconds,
            images_per_s=images / seconds if seconds else math.nan,
            communication=idle / (idle + busy) if idle + busy else 0.0,
            mean_staleness=float(staleness.mean()),
            max_staleness=int(staleness.max()),
        )


class Comparison:
    """Runs side by side; a notebook shows it as a table, ``print`` too.

    Parameters
    ----------
    histories
        Name of each run, and rank 0's history.

    Attributes
    ----------
    rows
        Name of each run, and its `Summary`.
    """

    COLUMNS = ("run", "test accuracy", "seconds", "images/s", "communication", "staleness mean (max)")

    def __init__(self, histories: Mapping[str, History]) -> None:
        self.rows = {name: Summary.of(history) for name, history in histories.items()}

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text."""
        return [
            (
                name,
                "–" if math.isnan(row.accuracy) else f"{row.accuracy:.2%}",
                f"{row.seconds:.1f}",
                f"{row.images_per_s:,.0f}",
                f"{row.communication:.1%}",
                f"{row.mean_staleness:.2f} ({row.max_staleness})",
            )
            for name, row in self.rows.items()
        ]

    def __str__(self) -> str:
        lines = [self.COLUMNS, *self.cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.COLUMNS))]
        return "\n".join(
            "  ".join(
                [line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))]
            )
            for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>" for line in self.cells()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
