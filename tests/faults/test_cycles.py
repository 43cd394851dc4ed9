"""Deadlock, freed, and on with the work, again and again in one lab: sums stay right, and memory stays flat.

``LABKIT_CYCLES=100`` makes more of them.
"""

from __future__ import annotations

import os
from statistics import median

import psutil
import pytest

import labkit
from labkit.cluster.cells import DeadlockError
from labkit.cluster.lab import Lab

RANKS = 2
CYCLES = int(os.environ.get("LABKIT_CYCLES", "12"))
AT_FIRST = slice(10, 17)
"""Cycles whose memory is the measure. By then all is there of which a certain number is kept, such as old worlds."""
GROWTH_MB = 3.0
"""What is allowed beyond it, for memory that Python gives back late. One message that is kept has 8 MB."""

BEFORE = "import numpy as np\nfrom mpi4py import MPI\nfrom labkit import comm\nx, kept = np.ones(1_000_000), comm.rank"
WAITS = (
    "comm.recv(x, src=(comm.rank + 1) % comm.size, tag=9)",
    "MPI.COMM_WORLD.Recv(x, (comm.rank + 1) % comm.size, 9)",
    "if comm.rank: comm.all_reduce(x)",
    "if comm.rank: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)",
    "comm.send(x.copy(), (comm.rank + 1) % comm.size, tag=9)",
    "MPI.COMM_WORLD.Send(x.copy(), (comm.rank + 1) % comm.size, 9)",
)
AFTERWARDS = """
assert kept == comm.rank
assert comm.all_reduce(np.full(1000, comm.rank + 1.0)).tolist() == [3.0] * 1000
assert MPI.COMM_WORLD.allreduce(comm.rank + 1) == 3
"""


@pytest.mark.timeout(600)
def test_memory_is_flat_over_many_deadlocks() -> None:
    with labkit.start(RANKS) as lab:
        lab.run(BEFORE, show=False)
        rows = [cycle(lab, WAITS[number % len(WAITS)]) for number in range(CYCLES)]
    at_first, at_last = ([median(of) for of in zip(*rows[part], strict=True)] for part in (AT_FIRST, slice(-7, None)))
    print(f"notebook and ranks, MB: {at_first} at first, {at_last} at last")
    for first, last in zip(at_first, at_last, strict=True):
        assert last < first + GROWTH_MB, f"MB of the notebook and of each rank: {at_first}, then {at_last}"


def cycle(lab: Lab, wait: str) -> list[float]:
    """One deadlock, and what follows; gives the memory of the notebook's process and of each rank, in MB."""
    with pytest.raises(DeadlockError) as caught:
        lab.run(wait, show=False, deadline=30)
    assert not caught.value.stuck
    lab.run(AFTERWARDS, show=False, deadline=30)
    processes = [psutil.Process(), *(info.process() for info in lab.ranks)]
    return [process.memory_full_info().uss / 1e6 for process in processes if process is not None]
