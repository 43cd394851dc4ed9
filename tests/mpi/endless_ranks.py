"""Ranks that have met and then wait for ever: ``mpiexec … python -m tests.mpi.endless_ranks``."""

from __future__ import annotations

import signal

from mpi4py import MPI

if __name__ == "__main__":
    MPI.COMM_WORLD.Barrier()
    while True:
        signal.pause()
