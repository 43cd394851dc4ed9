"""How far ranks have come that may die at any moment, and where those that are left go on: no communication here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .replicas import TrainError

__all__ = ["ElasticState", "Point", "Reached", "meeting_point"]


@dataclass
class ElasticState:
    """What `labkit.train.elastic` needs besides the model to go on where it was: give it as ``resume=``.

    Made empty. A rank that was started again has an empty one and gets all from the others.

    Attributes
    ----------
    done
        Updates that the weights have had, since the first epoch.
    tested
        Epochs that are over, their test included.
    whole
        Whether weights and optimizer are between two updates, and not in the middle of one.
    global_batch
        Samples of all ranks at a step; 0 until training has begun.
    optimizer
        The optimizer's ``state_dict``, when training has ended.
    training
        What is trained: model, data and settings, which must be the same when training goes on.
    """

    done: int = 0
    tested: int = 0
    whole: bool = True
    global_batch: int = 0
    optimizer: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether there is anything to go on from."""
        return self.global_batch > 0


class Reached(NamedTuple):
    """What a rank tells the others when they come together: parts of its `ElasticState`, and

    `stopped`: why it is to stop, if it is; `closed`: whether it has tested after that; `refused`: why it cannot go on.
    """

    done: int
    tested: int
    whole: bool
    global_batch: int
    stopped: str = ""
    closed: bool = False
    refused: str = ""


class Point(NamedTuple):
    """Where all go on: with the weights of rank `source`, which has made `done` steps."""

    source: int
    done: int
    tested: int
    global_batch: int
    stopped: str
    closed: bool


def meeting_point(reports: Sequence[Reached]) -> Point:
    """Where the ranks with these reports, in rank order, go on. The same on all, as all have the same reports.

    No step is lost: the weights of the rank that has come furthest have every update that any living rank has made.
    No step is counted twice: all take these weights, and whoever was behind never makes the update that they contain.
    That update has every sample of its global batch, those of the dead rank too: a rank can only have made it after an
    all-reduce to which all ranks had come. For the same reason no living rank is ahead of another by more than one
    step. An epoch whose test some have not finished is tested once more; that changes no weights.

    Raises
    ------
    TrainError
        When a rank refuses, or when every rank was interrupted in the middle of an update.
    """
    for rank, report in enumerate(reports):
        if report.refused:
            raise TrainError(f"rank {rank} cannot go on: {report.refused}")
    begun = [rank for rank, report in enumerate(reports) if report.global_batch]
    stopped = next((report.stopped for report in reports if report.stopped), "")
    if not begun:
        return Point(0, 0, 0, 0, stopped, False)
    whole = [rank for rank in begun if reports[rank].whole]
    if not whole:
        raise TrainError("every rank was interrupted in the middle of an update of its weights. Begin with new ones.")
    source = max(whole, key=lambda rank: (reports[rank].done, -rank))
    tested = min(reports[rank].tested for rank in begun)
    closed = all(reports[rank].closed for rank in begun)
    return Point(source, reports[source].done, tested, reports[source].global_batch, stopped, closed)
