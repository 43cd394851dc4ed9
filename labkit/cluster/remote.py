"""What the notebook's side runs on the ranks.

ipyparallel sends these functions to the engines, so each imports what it needs.
"""

from __future__ import annotations

from typing import Any

__all__ = ["connect_telemetry", "disconnect_telemetry", "facts", "introduce", "prepare", "renew_communicator"]


def introduce() -> dict[str, Any]:
    """Who this engine is in the MPI world, and what it holds."""
    import glob
    import os
    import socket

    import psutil
    from mpi4py import MPI

    from labkit.cluster.probe import mapped_segments, mpi_library

    process = psutil.Process()
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    rank = MPI.COMM_WORLD.rank
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": process.pid,
        "children": [child.pid for child in process.children()],
        "device": f"cuda:{rank % gpus}" if gpus else "cpu",
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0)),
        "mpi": mpi_library(),
        "segments": mapped_segments(),
    }


def prepare(address: str) -> int:
    """Make this rank's world communicators, together with all others, and let it answer at `address`.

    Done at the start of a lab: the first call of labkit.comm is a collective one, and a cell that runs on some ranks
    would wait for the rest. Gives the communicator's generation; a second call does nothing but that.
    """
    import os

    from labkit import comm
    from labkit.comm import states, warden, watched

    states.follow_cells()
    warden.start(address.format(pid=os.getpid()))
    generation = comm.world().generation
    watched.install()
    return generation


def renew_communicator(generation: int) -> None:
    """Move this rank to a fresh communicator of that generation, together with all others."""
    import gc

    from labkit import comm

    comm.renew(generation)
    gc.collect()  # the error that ended the cell keeps the arrays of the calls it came through


def facts() -> dict[str, list[str]]:
    """What this rank used so far: data sets, seeds, models."""
    from labkit import telemetry

    return telemetry.facts.recorded()


def connect_telemetry(metrics: str, control: str) -> None:
    """Send this rank's measurements to the notebook at these addresses."""
    from mpi4py import MPI

    from labkit import telemetry

    telemetry.connect(telemetry.Endpoints(metrics=metrics, control=control), MPI.COMM_WORLD.rank)


def disconnect_telemetry() -> None:
    """Send what is left and close the sockets."""
    from labkit import telemetry

    telemetry.disconnect()
