"""A benchmark's outcome as a table in the terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from labkit.bench import Outcome, machine

__all__ = ["show"]


def cell(value: Any) -> str:
    """A figure to four digits; a spread as median and range."""
    if isinstance(value, dict):
        return f"{cell(value['median'])}  ({cell(value['min'])} … {cell(value['max'])})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def show(outcome: Outcome) -> None:
    """Print rows, those with other columns as a table of their own, and goals."""
    console = Console(width=140)
    about = machine()
    title = f"{outcome.bench} · {about['cpu']}, {about['cores']} cores"
    for columns, rows in groupby(outcome.rows, key=tuple):
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*map(cell, row.values()))
        console.print(table)
        title = ""
    for goal in outcome.goals:
        sign = "≤" if goal.at_most else "≥"
        console.print(
            f"{'met   ' if goal.met else 'MISSED'} {goal.name}: {goal.value:.4g} (goal {sign} {goal.limit:.4g})"
        )
