"""Where the ranks of a benchmark run."""

from __future__ import annotations

import os

from labkit import comm

__all__ = ["settle"]


def settle() -> None:
    """Give each rank's main thread a core of its own, where there are enough; threads that gloo has go where they like.

    Otherwise the system may put ranks that wait for each other on one core, for as long as others use the rest.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= comm.size:
        os.sched_setaffinity(0, {cores[comm.rank]})
