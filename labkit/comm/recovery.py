"""A world that has lost ranks: it goes on without them, or they are started again under their old numbers.

MPI's user-level fault mitigation (ULFM) gives the communicator of those that are left; a new process is spawned by
them, merged with them, and the ranks are put back into their order. Every call here is collective among the ranks
that are left, and blocks in MPI: it is for moments at which nothing else runs.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from labkit.comm import watched
from labkit.comm.communicator import adopt, base
from labkit.comm.mpi import MPI

__all__ = ["has_rejoined", "rejoin", "respawn", "shrink"]

_rejoined = False


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
    _complete(left, _Plan(command, arguments, missing, generation), 0, before.rank)


def rejoin() -> None:
    """In a process that `respawn` started: take the place of a missing rank. Raw calls are watched there, too."""
    global _rejoined
    _rejoined = True
    watched.install()
    bridge = MPI.Comm.Get_parent()
    merged = bridge.Merge(high=True)
    bridge.Free()
    plan, index = merged.bcast(None)
    _complete(merged, plan, index + 1, plan.missing[index])


def has_rejoined() -> bool:
    """Whether this process has taken a missing rank's place. It and the others talk by TCP."""
    return _rejoined


class _Plan(NamedTuple):
    """What `respawn` was asked for."""

    command: str
    arguments: list[str]
    missing: list[int]
    generation: int


def _complete(together: MPI.Intracomm, plan: _Plan, index: int, number: int) -> None:
    """Start the missing ranks from the `index`-th on, and go on as rank `number` of the whole world.

    One after the other, although MPI could start all at once: processes that are started together die together.
    """
    info = MPI.Info.Create({"wdir": os.getcwd()})
    for turn in range(index, len(plan.missing)):
        bridge = together.Spawn(plan.command, plan.arguments, maxprocs=1, info=info)
        merged = bridge.Merge(high=False)
        merged.bcast((plan, turn))
        bridge.Free()
        together.Free()
        together = merged
    info.Free()
    whole = MPI.Intracomm(together.Split(0, number))
    together.Free()
    adopt(whole, plan.generation)
