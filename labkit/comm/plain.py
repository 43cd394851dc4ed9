"""Communicators of labkit itself, which nobody watches.

`watched` replaces methods of mpi4py's classes. labkit's own calls need no watching, and they rely on one property of
the originals: an interrupt comes before or after such a call, never inside it. So here the originals are kept, in a
subclass made before any of them is replaced.
"""

from __future__ import annotations

from labkit.comm.mpi import MPI

__all__ = ["Plain", "real"]


class Plain(MPI.Intracomm):
    """An intracommunicator that is not watched: ``Plain(comm)`` is another Python object with the same handle."""


for _kind in (MPI.Comm, MPI.Intracomm):
    for _name, _method in tuple(vars(_kind).items()):
        if callable(_method) and (_name == "__reduce__" or not _name.startswith("__")):
            setattr(Plain, _name, _method)

real = Plain(MPI.COMM_WORLD)
"""MPI's own world, whatever stands behind `MPI.COMM_WORLD` later."""
