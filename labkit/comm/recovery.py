"""A world that has lost ranks: it goes on without them, or they are started again under their old numbers.

MPI's user-level fault mitigation (ULFM) gives the communicator of those that are left; a new process is spawned by
them, merged with them, and the ranks are put back into their order. Every call here is collective among the ranks
that are left, and blocks in MPI: it is for moments at which nothing else runs.
"""

from __future__ import annotations

import os

from labkit.comm.communicator import adopt, base
from labkit.comm.mpi import MPI

__all__ = ["rejoin", "respawn", "shrink"]


def shrink(generation: int) -> None:
    """Make the ranks that are left the world, in their old order."""
    adopt(MPI.Intracomm(base().Shrink()), generation)


def respawn(command: str, arguments: list[str], missing: list[int], generation: int) -> None:
    """Start the missing ranks again.

    Parameters
    ----------
    command, arguments
        The program, which must call `rejoin` before any other communication.
    missing
        Numbers of the ranks that are gone, ascending.
    generation
        Generation of the new world: greater than that of any rank that is left.
    """
    before = base()
    left = MPI.Intracomm(before.Shrink())
    info = MPI.Info.Create({"wdir": os.getcwd()})
    bridge = left.Spawn(command, arguments, maxprocs=len(missing), info=info)
    info.Free()
    merged = bridge.Merge(high=False)
    merged.bcast((missing, generation))
    whole = MPI.Intracomm(merged.Split(0, before.rank))
    for passing in (merged, bridge, left):
        passing.Free()
    adopt(whole, generation)


def rejoin() -> None:
    """In a process that `respawn` started: take the place of a missing rank."""
    bridge = MPI.Comm.Get_parent()
    merged = bridge.Merge(high=True)
    missing, generation = merged.bcast(None)
    whole = MPI.Intracomm(merged.Split(0, missing[MPI.COMM_WORLD.rank]))
    merged.Free()
    bridge.Free()
    adopt(whole, generation)
