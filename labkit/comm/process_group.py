"""torch.distributed's "mpi" back end, which PyTorch's wheels come without: a process group over labkit's communicators.

The default group is labkit's world itself, so it goes on after a freed cell: the world is then another communicator
of the same ranks. Groups of some ranks have a communicator of their own, which a renewal of the world makes void.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Backend

from labkit.comm import communicator as comm
from labkit.comm.communicator import Communicator
from labkit.comm.dist_calls import DistCalls
from labkit.comm.errors import ArgumentError, CommError
from labkit.comm.other_groups import OtherGroups
from labkit.comm.raising import end_all_with_an_error
from labkit.comm.retired import leave
from labkit.comm.subgroup import communicator_of
from labkit.comm.works import seconds
from labkit.torch_backend import NAMES

__all__ = ["MPIBackend", "MPIProcessGroup", "create"]

DEVICES = ("cpu", "cuda")


class _Place:
    """Where a group's calls go.

    Parameters
    ----------
    ranks
        World ranks of the group, in its order; None: all ranks.
    name
        The group's, the same on all its ranks.
    timeout
        Seconds to wait for the other members.
    """

    def __init__(self, ranks: Sequence[int] | None, name: str, timeout: float | None) -> None:
        world = _world()
        self._base = comm.base()
        self._own = None if ranks is None else communicator_of(ranks, name, timeout)
        self.rank = (self._own or world).rank
        self.size = (self._own or world).size

    def communicator(self) -> Communicator:
        """The communicator, if the group can still be used."""
        own = self._own
        if comm.base() is not self._base:
            raise CommError(
                "Ranks were lost or started again since this process group was made. Call "
                "dist.destroy_process_group() and then dist.init_process_group('mpi') on every rank; a rank that was "
                "started again needs only the second."
            )
        if own is None:
            return comm.world()
        if own.generation != comm.known_generation():
            raise CommError(
                f"rank {self.rank} of process group '{own.name}': it was made before the last cell that was ended. "
                "Make it again on every rank: dist.new_group(…), or dist.destroy_process_group() and "
                "dist.init_process_group('mpi'). (The default group goes on by itself.)"
            )
        return own

    def leave(self) -> None:
        """The group is not used any more."""
        if self._own is not None:
            leave(self._own)


def _world() -> Communicator:
    """The world, renewed where a rank had given up a collective on it."""
    world = comm.world()
    return comm.renew() if world.abandoned else world


class _Placed(DistCalls):
    """What process group and back end have in common.

    Parameters
    ----------
    place
        Where the calls go.
    timeout
        Seconds that each has.
    name
        Of the back end: "mpi", or "labkit".
    """

    def __init__(self, place: _Place, timeout: float | None, name: str) -> None:
        self._place, self._name, self.default_timeout = place, name, timeout

    def communicator(self) -> Communicator:
        """The communicator, if it can still be used."""
        return self._place.communicator()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name under which it was asked for."""
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later calls so much time."""
        self.default_timeout = seconds(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """It is counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        """End it, on this rank."""
        self._place.leave()

    abort = shutdown


class MPIBackend(_Placed, Backend):
    """The calls as torch's C++ reaches them, for one kind of device of a process group."""

    def __init__(self, place: _Place, timeout: float | None, name: str) -> None:
        Backend.__init__(self, place.rank, place.size)
        _Placed.__init__(self, place, timeout, name)

    supports_coalescing = False
    supports_splitting = False


class MPIProcessGroup(_Placed, dist.ProcessGroup):
    """A process group whose calls go straight to labkit: Python calls them without a way through C++."""

    def __init__(self, place: _Place, timeout: float | None, name: str) -> None:
        dist.ProcessGroup.__init__(self, place.rank, place.size)
        _Placed.__init__(self, place, timeout, name)
        self._rank, self._size = place.rank, place.size
        self._others = OtherGroups()
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.MPI if name == "mpi" else kinds.CUSTOM
        self._set_default_backend(kind)
        inner = MPIBackend(place, timeout, name)
        for device in DEVICES:
            self._register_backend(torch.device(device), kind, inner)

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    getRank = rank  # noqa: N815 - torch's name
    getSize = size  # noqa: N815

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        group_name: str = "",
        group_desc: str | None = None,
        **_: Any,
    ) -> dist.ProcessGroup | None:
        """A group of some ranks; None on the others (`torch.distributed.new_group` calls it).

        One of "mpi" is made by its members alone; for one of another back end all ranks must call.
        """
        limit, group = seconds(timeout), None
        asked = {kind.rpartition(":")[2] for kind in (backend or self._name).split(",")}  # also "cpu:mpi"
        if not asked <= {*NAMES}:
            group = self._others.make(str(backend), ranks, self._rank, timeout, group_name)
        elif self._rank in ranks:
            group = MPIProcessGroup(_Place(ranks, f"group {group_name}", limit), limit, min(asked))
        if group is not None:
            group._set_group_name(group_name)  # type: ignore[arg-type]
            group._set_group_desc(group_desc or "undefined")
        return group

    _start_coalescing = DistCalls.start_coalescing  # type: ignore[assignment]
    _end_coalescing = DistCalls.end_coalescing  # type: ignore[assignment]
    # Names that torch had for them before 2.15.
    _allgather_base = DistCalls.all_gather_single
    allgather_into_tensor_coalesced = DistCalls.all_gather_single_coalesced
    _reduce_scatter_base = DistCalls.reduce_scatter_single
    reduce_scatter_tensor_coalesced = DistCalls.reduce_scatter_single_coalesced
    alltoall_base = DistCalls.all_to_all_single


def create(options: Any, name: str) -> MPIBackend | MPIProcessGroup:
    """What `torch.distributed` asks for when a process group is made.

    Parameters
    ----------
    options
        torch's: ranks, name and timeout of the group.
    name
        Of the back end. "mpi" beside another back end (``"cpu:mpi,cuda:nccl"``) is one of several in torch's own
        process group; by itself it is the group.
    """
    end_all_with_an_error()
    limit = seconds(options.timeout)
    ranks = list(options.global_ranks_in_group) or None
    place = _Place(ranks, f"group {options.group_id}", limit)
    if options.group_size not in (-1, place.size):
        raise ArgumentError(
            f"init_process_group(world_size={options.group_size}, rank={options.group_rank}): MPI has started "
            f"{place.size} ranks, and this is rank {place.rank}. Leave both out, and use init_method='mpi://'."
        )
    alone = name != "mpi" or options.group_size == -1 or isinstance(dist.group.WORLD, MPIProcessGroup)
    return MPIProcessGroup(place, limit, name) if alone else MPIBackend(place, limit, name)
