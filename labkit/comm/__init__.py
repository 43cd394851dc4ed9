"""How ranks talk: tensors and numpy arrays over MPI, by calls that cannot hang.

Every function takes the tensor first; `group` (default: all ranks) and `timeout` (seconds, default: none) are given
by keyword. Each name is loaded when it is first used, so that importing this package starts no MPI.

>>> import torch
>>> from labkit import comm
>>> x = torch.ones(3) * comm.rank
>>> comm.all_reduce(x, op="mean")               # the same on all ranks
>>> if comm.rank == 0: comm.send(x, dst=1)
>>> if comm.rank == 1: comm.recv(x, src=0)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.comm.algorithms import ALGORITHMS
    from labkit.comm.collectives import all_gather, all_to_all, barrier, broadcast, gather, scatter
    from labkit.comm.communicator import Communicator, adopt, renew, world
    from labkit.comm.errors import ArgumentError, CommError, DeadlineError, MismatchError, RankDiedError
    from labkit.comm.objects import (
        all_gather_object,
        broadcast_object,
        gather_object,
        recv_object,
        scatter_object,
        send_object,
    )
    from labkit.comm.p2p import irecv, isend, probe, recv, send, sendrecv
    from labkit.comm.reductions import all_reduce, reduce, reduce_scatter, scan
    from labkit.comm.requests import Message, Request
    from labkit.comm.surviving import survivors
    from labkit.comm.variable import all_gatherv, gatherv, scatterv
    from labkit.comm.waiting import Spent, Wait, deadline, spent, waiting_now
    from labkit.comm.windows import shared_zeros

    rank: int
    size: int

__all__ = [
    "ALGORITHMS",
    "ArgumentError",
    "CommError",
    "Communicator",
    "DeadlineError",
    "Message",
    "MismatchError",
    "RankDiedError",
    "Request",
    "Spent",
    "Wait",
    "adopt",
    "all_gather",
    "all_gather_object",
    "all_gatherv",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "deadline",
    "gather",
    "gather_object",
    "gatherv",
    "irecv",
    "isend",
    "probe",
    "rank",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "renew",
    "scan",
    "scatter",
    "scatter_object",
    "scatterv",
    "send",
    "send_object",
    "sendrecv",
    "shared_zeros",
    "size",
    "spent",
    "survivors",
    "waiting_now",
    "world",
]

_HOME = {
    "algorithms": ["ALGORITHMS"],
    "collectives": ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"],
    "errors": ["ArgumentError", "CommError", "DeadlineError", "MismatchError", "RankDiedError"],
    "objects": [
        "all_gather_object",
        "broadcast_object",
        "gather_object",
        "recv_object",
        "scatter_object",
        "send_object",
    ],
    "p2p": ["irecv", "isend", "probe", "recv", "send", "sendrecv"],
    "requests": ["Message", "Request"],
    "reductions": ["all_reduce", "reduce", "reduce_scatter", "scan"],
    "surviving": ["survivors"],
    "variable": ["all_gatherv", "gatherv", "scatterv"],
    "waiting": ["Spent", "Wait", "deadline", "spent", "waiting_now"],
    "windows": ["shared_zeros"],
    "communicator": ["Communicator", "adopt", "renew", "world"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "rank" or name == "size":  # never kept: a renewed world may have others
        from labkit.comm.communicator import rank_and_size

        return rank_and_size()[name == "size"]
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
