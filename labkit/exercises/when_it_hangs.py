"""The four programs of ``notebooks/02_when_it_hangs.ipynb``, each of which hangs or fails until it is repaired.

In a `%%px` cell::

    from labkit.exercises.when_it_hangs import check

    def shift(mine): ...

    check(shift)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit import exercises
from labkit.exercises import Case, Exercise

__all__ = ["EXERCISES", "check"]

SMALL, LARGE = 8, 1_000_000
"""Numbers in a message: one that leaves at once, and one that waits for its receiver under every MPI."""


def check(program: Callable[[Any], Any]) -> None:
    """Say on this rank whether `program`, a function named as in the notebook, is right; call it on every rank."""
    exercises.check(program, EXERCISES)


def of_rank(rank: int, count: int) -> Any:
    """A tensor of `count` equal numbers, other ones on each rank."""
    import torch

    return torch.full((count,), 10.0 + rank)


def around(rank: int, _: int) -> Any:
    """A tensor whose smallest and largest number no two ranks share."""
    import torch

    return torch.tensor([1.0 - rank, 0.0, 2.0 + rank])


EXERCISES = {
    "shift": Exercise(
        [
            Case(
                f"{count:,} numbers",
                lambda rank, size, count=count: of_rank(rank, count),  # type: ignore[misc]
                lambda rank, size, count=count: of_rank((rank - 1) % size, count),  # type: ignore[misc]
            )
            for count in (SMALL, LARGE)
        ],
        "Give back what the left neighbour sent, rank − 1, and on rank 0 what the last rank sent.",
    ),
    "collect": Exercise(
        [
            Case(
                "a number from each rank",
                lambda rank, size: 100 + rank,
                lambda rank, size: [100 + each for each in range(size)] if rank == 0 else None,
            )
        ],
        "Rank 0 gives every rank's number once, its own among them, in ascending order; the others give None.",
    ),
    "total_loss": Exercise(
        [
            Case(
                "more batches on some ranks than on others",
                lambda rank, size: [rank + 1.0] * (rank + 1),
                lambda rank, size: sum((each + 1.0) ** 2 for each in range(size)),
            )
        ],
        "Every batch of every rank counts once, on every rank the same. How often does each rank make the call?",
    ),
    "spread": Exercise(
        [Case("three numbers on each rank", around, lambda rank, size: 2.0 * size - 1)],
        "The largest number of all ranks minus the smallest of all ranks, on every rank the same.",
    ),
}
