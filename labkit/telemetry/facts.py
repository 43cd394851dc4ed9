"""What a rank used (data set and where it came from, seeds, model), for a report's environment table."""

from __future__ import annotations

__all__ = ["clear", "record", "recorded"]

_facts: dict[str, list[str]] = {}


def record(kind: str, value: str) -> None:
    """Note a fact; the same fact twice counts once.

    Parameters
    ----------
    kind
        What it is, as the table shall name it: ``"data set"``, ``"seed"``, ``"model"`` …
    value
        The fact.
    """
    values = _facts.setdefault(kind, [])
    if value not in values:
        values.append(value)


def recorded() -> dict[str, list[str]]:
    """Return a copy of all facts noted in this process, in the order they were noted."""
    return {kind: list(values) for kind, values in _facts.items()}


def clear() -> None:
    """Forget all facts."""
    _facts.clear()
