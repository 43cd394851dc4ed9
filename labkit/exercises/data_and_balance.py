"""The two programs of ``notebooks/10_data_and_balance.ipynb``, each of which is wrong until it is repaired.

In a `%%px` cell::

    from labkit.exercises.data_and_balance import check

    def part(n): ...

    check(part)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit import exercises
from labkit.exercises import Case, Exercise

__all__ = ["EXERCISES", "check"]


def check(program: Callable[[Any], Any]) -> None:
    """Say on this rank whether `program`, a function named as in the notebook, is right; call it on every rank."""
    exercises.check(program, EXERCISES)


def parted(n: int, rank: int, size: int) -> list[int]:
    """The numbers of a rank's samples, the first ranks with one more where `n` does not divide."""
    each, left = divmod(n, size)
    first = rank * each + min(rank, left)
    return list(range(first, first + each + (rank < left)))


EXERCISES = {
    "part": Exercise(
        [
            Case("12 samples", lambda rank, size: 12, lambda rank, size: parted(12, rank, size)),
            Case("14 samples", lambda rank, size: 14, lambda rank, size: parted(14, rank, size)),
            Case("1 sample", lambda rank, size: 1, lambda rank, size: parted(1, rank, size)),
        ],
        "No sample may be left out, and none come twice: the first n % R ranks take one more than the others.",
    ),
    "hand_out": Exercise(
        [
            Case("more pieces than workers", lambda rank, size: 10, lambda rank, size: list(range(10))),
            Case("fewer pieces than workers", lambda rank, size: 1, lambda rank, size: [0]),
        ],
        "Each piece is done once, and every worker must hear that there is none left.",
    ),
}
