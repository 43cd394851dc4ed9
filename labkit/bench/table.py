"""A benchmark's outcome as a table in the terminal."""

from __future__ import annotations

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
    """Print rows and goals."""
    console = Console(width=140)
    about = machine()
    table = Table(title=f"{outcome.bench} · {about['cpu']}, {about['cores']} cores", title_justify="left")
    columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in outcome.rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    console.print(table)
    for goal in outcome.goals:
        sign = "≤" if goal.at_most else "≥"
        console.print(
            f"{'met   ' if goal.met else 'MISSED'} {goal.name}: {goal.value:.4g} (goal {sign} {goal.limit:.4g})"
        )
