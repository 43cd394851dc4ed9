"""The three programs of ``notebooks/09_asynchronous_training.ipynb``, each of which is wrong until it is repaired.

In a `%%px` cell::

    from labkit.exercises.asynchronous_training import check

    def staleness(arrivals): ...

    check(staleness)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit import exercises
from labkit.exercises import Case, Exercise

__all__ = ["EXERCISES", "check"]

ALPHA = 0.5
"""Of the elastic exchange: halves of small whole numbers are exact."""
MOST = 3
"""Gradients of the worker that has most."""


def check(program: Callable[[Any], Any]) -> None:
    """Say on this rank whether `program`, a function named as in the notebook, is right; call it on every rank."""
    exercises.check(program, EXERCISES)


def weights(rank: int) -> Any:
    """A rank's weights, three numbers."""
    import torch

    return torch.tensor([16.0 * rank, 8.0, -4.0 * rank])


def pulled(rank: int, size: int) -> Any:
    """A rank's weights after rank 0, the centre, has exchanged with each worker in turn."""
    centre = weights(0)
    for worker in range(1, size):
        x = weights(worker)
        if worker == rank:
            return x + ALPHA * (centre - x)
        centre = centre + ALPHA * (x - centre)
    return centre


def gradients(rank: int) -> list[float]:
    """A rank's gradients, one, two or three in turn; the master has none."""
    return [rank + 1.0] * ((rank - 1) % MOST + 1) if rank else []


EXERCISES = {
    "staleness": Exercise(
        [
            Case("workers in turn", lambda rank, size: [1, 2, 3, 1, 2, 3], lambda rank, size: [0, 1, 2, 2, 2, 2]),
            Case("a quick and a slow one", lambda rank, size: [1, 1, 1, 2, 1], lambda rank, size: [0, 0, 0, 3, 1]),
        ],
        "A worker reads the weights after its own update: only updates by others make its next gradient older.",
    ),
    "elastic": Exercise(
        [Case("three weights on each rank", lambda rank, size: weights(rank), pulled)],
        "Both sides move by the same difference: of x and the centre as they were before either moved.",
    ),
    "serve": Exercise(
        [
            Case(
                "more gradients on some workers than on others",
                lambda rank, size: gradients(rank),
                lambda rank, size: sum(map(sum, map(gradients, range(size)))) if rank == 0 else None,
            )
        ],
        "Rank 0 gives the sum of what all workers sent; the others give None. How does it learn that a worker is done?",
    ),
}
