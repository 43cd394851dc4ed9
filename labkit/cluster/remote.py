"""What the notebook's side runs on the ranks.

ipyparallel sends these functions to the engines, so each imports what it needs.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "connect_telemetry",
    "disconnect_telemetry",
    "facts",
    "generation",
    "introduce",
    "prepare",
    "renew_communicator",
    "respawn",
    "shrink",
    "survives",
]


def introduce() -> dict[str, Any]:
    """Who this engine is in the MPI world, and what it holds."""
    import glob
    import os
    import socket
    import sys

    import psutil
    from mpi4py import MPI

    from labkit.cluster.probe import mapped_segments, mpi_library

    process = psutil.Process()
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    # A world that lost ranks or got them back is labkit's; before its first use, loading labkit.comm would cost time.
    ours = sys.modules.get("labkit.comm.communicator")
    recovery = sys.modules.get("labkit.comm.recovery")
    rank = ours.rank_and_size()[0] if ours else MPI.COMM_WORLD.rank
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": process.pid,
        "children": [child.pid for child in process.children()],
        "device": f"cuda:{rank % gpus}" if gpus else "cpu",
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0)),
        "mpi": mpi_library(),
        "rejoined": recovery is not None and recovery.has_rejoined(),
        "segments": mapped_segments(),
    }


def prepare(address: str) -> int:
    """Make this rank's world communicators, together with all others, and let it answer at `address`.

    Done at the start of a lab: the first call of labkit.comm is a collective one, and a cell that runs on some ranks
    would wait for the rest. Gives the communicator's generation; a second call does nothing but that.
    """
    import os

    from IPython import get_ipython

    from labkit import comm
    from labkit.comm import states, warden, watched

    states.follow_cells()
    warden.start(address.format(pid=os.getpid()))
    world = comm.world()
    watched.install()
    # ipyparallel's names for them, which it sets once: the ranks of a world that lost some have new ones.
    get_ipython().push({"mpi_rank": world.rank, "mpi_size": world.size})
    return world.generation


def renew_communicator(generation: int) -> None:
    """Move this rank to a fresh communicator of that generation, together with all others."""
    import gc

    from labkit import comm

    comm.renew(generation)
    gc.collect()  # the error that ended the cell keeps the arrays of the calls it came through


def generation() -> int:
    """How often this rank's world communicator was renewed, without a word to the others."""
    from labkit.comm.communicator import known_generation

    return known_generation()


def survives() -> bool:
    """Whether this MPI goes on when a rank dies."""
    from labkit.comm.mpi import REVOKES

    return REVOKES


def shrink(generation: int) -> None:
    """Go on without the ranks that are gone, together with all others that are left."""
    from labkit.comm import recovery

    recovery.shrink(generation)


def respawn(missing: list[int], generation: int) -> None:
    """Start the ranks that are gone again, together with all others that are left."""
    import sys

    from labkit.cluster.engine import REJOIN
    from labkit.comm import recovery

    recovery.respawn(sys.executable, ["-m", "labkit.cluster.engine", *sys.argv[1:], REJOIN], missing, generation)


def facts() -> dict[str, list[str]]:
    """What this rank used so far: data sets, seeds, models."""
    from labkit import telemetry

    return telemetry.facts.recorded()


def connect_telemetry(metrics: str, control: str) -> None:
    """Send this rank's measurements to the notebook at these addresses."""
    from labkit import comm, telemetry

    telemetry.connect(telemetry.Endpoints(metrics=metrics, control=control), comm.rank)


def disconnect_telemetry() -> None:
    """Send what is left and close the sockets."""
    from labkit import telemetry

    telemetry.disconnect()
