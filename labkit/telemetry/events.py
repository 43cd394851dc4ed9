"""What crosses the wire from a rank to the notebook."""

from __future__ import annotations

from dataclasses import astuple, dataclass

__all__ = ["COLUMNS", "Step"]

COLUMNS: tuple[str, ...] = (
    "step",
    "epoch",
    "time",
    "loss",
    "compute_s",
    "wait_s",
    "transfer_s",
    "samples",
)
"""The numbers of one step in the order in which they lie in a row (float64 each)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step as one rank saw it.

    Attributes
    ----------
    rank
        Rank in the world that ran the step.
    step
        Number of the step, counted over the whole run from 0.
    epoch
        Number of the epoch, from 0.
    time
        When the step ended, in seconds since the epoch of the clock (``time.time``).
    loss
        The rank's own mean loss over its batch; NaN where the step has none.
    compute_s, wait_s, transfer_s
        Seconds spent computing, waiting for other ranks, and moving data.
    samples
        Samples in the rank's batch.
    """

    rank: int
    step: int
    epoch: int
    time: float
    loss: float
    compute_s: float
    wait_s: float
    transfer_s: float
    samples: int

    def row(self) -> tuple[float, ...]:
        """Return the numbers in the order of `COLUMNS`, without the rank."""
        return astuple(self)[1:]

    @classmethod
    def from_row(cls, rank: int, row: tuple[float, ...]) -> Step:
        """Make a step of a rank from numbers in the order of `COLUMNS`."""
        step, epoch, time, loss, compute_s, wait_s, transfer_s, samples = (float(value) for value in row)
        return cls(rank, int(step), int(epoch), time, loss, compute_s, wait_s, transfer_s, int(samples))
