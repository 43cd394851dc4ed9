"""The two programs of ``notebooks/11_when_a_rank_dies.ipynb``, each of which is wrong until it is repaired.

In a `%%px` cell::

    from labkit.exercises.when_a_rank_dies import check

    def my_share(batch): ...

    check(my_share)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit import exercises
from labkit.exercises import Case, Exercise

__all__ = ["EXERCISES", "check"]

AHEAD = 1
"""The rank that has made one update more than the others."""


def check(program: Callable[[Any], Any]) -> None:
    """Say on this rank whether `program`, a function named as in the notebook, is right; call it on every rank."""
    exercises.check(program, EXERCISES)


def part(batch: int) -> Case:
    """A batch to be shared out."""
    return Case(
        f"{batch} samples",
        lambda rank, size: batch,
        lambda rank, size: (rank + 1) * batch // size - rank * batch // size,
    )


EXERCISES = {
    "my_share": Exercise(
        [part(48), part(65), part(2)],
        "Rank r takes samples ⌊r·B/R⌋ to ⌊(r + 1)·B/R⌋ − 1: the shares of all ranks add up to B.",
    ),
    "furthest": Exercise(
        [
            Case("one is ahead", lambda rank, size: 7 + (rank == AHEAD), lambda rank, size: AHEAD),
            Case("all but rank 0", lambda rank, size: 7 + (rank > 0), lambda rank, size: 1),
            Case("all are equal", lambda rank, size: 7, lambda rank, size: 0),
        ],
        "All ranks must give the same one: whose number do the others learn, and how?",
    ),
}
