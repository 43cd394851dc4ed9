"""What an all-reduce costs beside one copy of the array in memory, mpi4py's own, and gloo."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["run"]

LIMIT_S = 300
MIDDLE, LARGE = 1_800_000, 44_000_000
"""Sizes, in bytes, for which there are goals: the gradients of a small network, and of one of 11 M parameters."""
OURS = "labkit, shared"
_LIMITS = [  # (another way, bytes, how many times as long it takes at least)
    ("gloo", MIDDLE, 10.0),
    ("gloo", LARGE, 4.0),
    ("mpi4py", MIDDLE, 2.0),
    ("mpi4py", LARGE, 2.0),
]
COPIES = 1.3
GROUP, SMALLEST, GROUP_FASTER = "torch mpi", 8, 5.0


def run(*, quick: bool = False, ranks: Sequence[int] = (2,)) -> Outcome:
    """Measure all ways in turn (`quick`: small sizes, few rounds).

    A row gives microseconds for a call of the slowest rank, and how often one copy of the array in the rank's own
    memory, by all ranks at once, would have fitted into it (round by round). Before each call every rank writes its
    array anew, which is not timed, and all meet. Each rank has a core of its own where there are enough.

    "labkit, shared" is `comm.all_reduce` of an array from `comm.shared_zeros`, "labkit" that of an ordinary one,
    "torch mpi" torch.distributed's back end "mpi".

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for size in ranks:
        measured = measure("labkit.bench.allreduce_ranks", size, quick=quick, limit_s=LIMIT_S)
        rows += [row for each in measured for row in _rows(size, each)]
        goals += _goals(size, measured)
    return Outcome("allreduce", rows, goals)


def _rows(ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    copies = measured["us"]["copy"]
    return [
        {
            "way": way,
            "ranks": ranks,
            "bytes": measured["nbytes"],
            "us": spread(us),
            "copies": spread([each / copy for each, copy in zip(us, copies, strict=True)]),
        }
        for way, us in measured["us"].items()
    ]


def _goals(ranks: int, measured: Sequence[dict[str, Any]]) -> list[Goal]:
    us = {each["nbytes"]: each["us"] for each in measured}
    goals = []
    for nbytes in (MIDDLE, LARGE):
        if nbytes in us:
            value = _times(us[nbytes][OURS], us[nbytes]["copy"])
            goals.append(Goal(f"{OURS}, {ranks} ranks, {nbytes:,} B: times one copy", value, COPIES))
    for way, nbytes, least in _LIMITS:
        if nbytes in us:
            value = _times(us[nbytes][way], us[nbytes][OURS])
            name = f"{OURS}, {ranks} ranks, {nbytes:,} B: times faster than {way}"
            goals.append(Goal(name, value, least, at_most=False))
    if GROUP in us.get(SMALLEST, {}):
        value = _times(us[SMALLEST]["gloo"], us[SMALLEST][GROUP])
        name = f"{GROUP}, {ranks} ranks, {SMALLEST} B: times faster than gloo"
        goals.append(Goal(name, value, GROUP_FASTER, at_most=False))
    return goals


def _times(us: Sequence[float], other: Sequence[float]) -> float:
    """How many times as long as `other`: the median over the rounds."""
    return median(a / b for a, b in zip(us, other, strict=True))
