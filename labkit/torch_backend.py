"""Makes ``torch.distributed`` know its "mpi" back end, which PyTorch's wheels come without.

Loaded by ``import torch`` (entry point ``torch.backends``), so it must be light: MPI itself starts with the first
process group. See `labkit.comm.process_group` for the back end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

__all__ = ["NAMES", "register", "rendezvous"]

NAMES = ("mpi", "labkit")
"""Names of the back end; under the second it goes where PyTorch was built with an MPI back end of its own."""
LOOPBACK = "127.0.0.1"


def register() -> None:
    """Register the back end under its `NAMES` and the rendezvous ``mpi://``; a second call does nothing.

    A PyTorch that was built with MPI keeps its own "mpi".
    """
    if find_spec("mpi4py") is None:
        return
    from torch import distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import register_rendezvous_handler

    kind = dist.ProcessGroup.BackendType
    for name in NAMES:
        if name.upper() in dist.Backend._plugins or (name == "mpi" and c10d._MPI_AVAILABLE):
            continue
        dist.Backend.register_backend(
            name,
            partial(_create, name),
            extended_api=True,
            devices=["cpu", "cuda"],
            _backend_type=kind.MPI if name == "mpi" else kind.CUSTOM,
        )
        # torch's flight recorder cannot record a group whose size it is not told; labkit shows what ranks wait for.
        recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(name)
    c10d._MPI_AVAILABLE = True
    with suppress(RuntimeError):  # there already
        register_rendezvous_handler("mpi", rendezvous)


def _create(name: str, options: Any, _: Any) -> Any:
    from labkit.comm.process_group import create

    return create(options, name)


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """``init_method="mpi://"``: rank and world size from MPI, and a store that rank 0 serves on a free port."""
    from torch._C._distributed_c10d import TCPStore

    from labkit.comm.communicator import world
    from labkit.comm.objects import all_gather_object, broadcast_object

    group, limit = world(), timeout or timedelta(minutes=5)
    hosts = all_gather_object(socket.gethostname(), group=group)
    host = LOOPBACK if len(set(hosts)) == 1 else hosts[0]
    store = None
    if group.rank == 0:
        door = socket.create_server((host, 0))
        port = door.getsockname()[1]
        listens = door.detach()
        store = TCPStore(host, port, group.size, True, limit, wait_for_workers=False, master_listen_fd=listens)
    port = broadcast_object(store and store.port, group=group)
    yield store or TCPStore(host, port, group.size, False, limit), group.rank, group.size
