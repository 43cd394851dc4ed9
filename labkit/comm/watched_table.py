"""Which methods of mpi4py can wait, and for what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from labkit.comm.mpi import MPI

__all__ = ["DATA", "Entry", "entries"]

Kind = Literal["receive", "send", "both", "collective", "other"]
Way = Literal["call", "start", "make"]
"""A call that waits; one that gives a request; one that gives a communicator (and perhaps a request)."""


class Entry(NamedTuple):
    """One method: where it is, what a rank in it waits for, and what it gives."""

    owner: type
    name: str
    kind: Kind
    way: Way
    counted: bool = False
    """Whether it is one of the communicator's collectives, which all ranks must make in the same order."""


_MESSAGES: dict[Kind, tuple[str, str]] = {
    "receive": ("Recv recv Probe probe Mprobe mprobe", "Irecv irecv Recv_init Precv_init"),
    "send": (
        "Send Ssend Bsend Rsend send ssend bsend",
        "Isend Issend Ibsend Irsend isend issend ibsend Send_init Ssend_init Bsend_init Rsend_init Psend_init",
    ),
    "both": ("Sendrecv Sendrecv_replace sendrecv", "Isendrecv Isendrecv_replace"),
}
_COLLECTIVES = (
    "Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter_block Reduce_scatter Scan Exscan Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall "
    "Neighbor_alltoallv Neighbor_alltoallw Agree"
)
_MAKERS = (
    "Dup Dup_with_info Clone Idup Idup_with_info Create Split Split_type Create_cart Create_graph Create_dist_graph "
    "Create_dist_graph_adjacent Sub Shrink Merge"
)
_MAKERS_WITH_OTHERS = "Spawn Spawn_multiple Accept Connect"
"""Collective here, but what they wait for is outside the communicator."""
_MAKERS_BY_SOME = "Create_group Create_intercomm"
"""Made by some of the ranks only, or on one of them by other arguments."""

_WINDOWS = (
    "Create Create_dynamic Allocate Allocate_shared Free Fence Lock Lock_all Unlock Unlock_all Flush Flush_all "
    "Flush_local Flush_local_all Start Complete Post Wait"
)
_FILES = "Open Close Sync Set_size Preallocate Set_view"
_FILE_ENDINGS = ("_all", "_all_begin", "_all_end", "_ordered", "_ordered_begin", "_ordered_end")

DATA: dict[str, tuple[tuple[str, bool], ...]] = {
    "bcast": (("buf", False),),
    "gather": (("sendbuf", False), ("recvbuf", True)),
    "scatter": (("recvbuf", False), ("sendbuf", True)),
    "allgather": (("sendbuf", False), ("recvbuf", True)),
    "alltoall": (("sendbuf", True), ("recvbuf", True)),
    "reduce": (("sendbuf", False), ("recvbuf", False)),
    "allreduce": (("sendbuf", False), ("recvbuf", False)),
    "reduce_scatter_block": (("sendbuf", False),),
    "scan": (("sendbuf", False), ("recvbuf", False)),
    "exscan": (("sendbuf", False), ("recvbuf", False)),
}
"""The buffer whose type and count must be the same on all ranks, then the one that counts if that is IN_PLACE; and
whether the buffer as a whole holds a block for each rank. Collectives that are not here may differ from rank to rank.
"""


def entries() -> Iterator[Entry]:
    """Every method to watch, of those that this mpi4py has."""
    communicators = (MPI.Comm, MPI.Intracomm, MPI.Topocomm, MPI.Cartcomm, MPI.Intercomm)
    for kind, (calls, starts) in _MESSAGES.items():
        yield from _in(communicators, calls.split(), kind, "call")
        yield from _in(communicators, starts.split(), kind, "start")
    for name in _COLLECTIVES.split():
        yield from _in(communicators, (name, name.lower()), "collective", "call", True)
        yield from _in(communicators, (f"I{name.lower()}", f"{name}_init"), "collective", "start", True)
    yield from _in(communicators, _MAKERS.split(), "collective", "make", True)
    yield from _in(communicators, _MAKERS_WITH_OTHERS.split(), "other", "make", True)
    yield from _in(communicators, _MAKERS_BY_SOME.split(), "other", "make")
    yield from _in((MPI.Win,), _WINDOWS.split(), "other", "call")
    collective = [name for name in vars(MPI.File) if name.endswith(_FILE_ENDINGS) and not name.startswith("I")]
    yield from _in((MPI.File,), [*_FILES.split(), *collective], "other", "call")
    yield from _in((MPI.Message,), ("Recv", "recv"), "other", "call")


def _in(owners: tuple[type, ...], names: Any, kind: Kind, way: Way, counted: bool = False) -> Iterator[Entry]:
    for owner in owners:
        for name in names:
            if name in vars(owner):
                yield Entry(owner, name, kind, way, counted)
