"""Groups of another back end beside a default group of "mpi", such as ``dist.new_group(backend="gloo")``.

Those find each other through a store, which "mpi" does without. The first such group makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from labkit.torch_backend import rendezvous

__all__ = ["OtherGroups"]


class OtherGroups:
    """Makes them for one default group."""

    def __init__(self) -> None:
        self._store: Any = None

    def make(
        self, backend: str, ranks: Sequence[int], rank: int, timeout: timedelta | None, name: str
    ) -> dist.ProcessGroup | None:
        """A group of `ranks`; None on a rank that is not one of them. All ranks of the world must call it.

        Parameters
        ----------
        backend
            Such as "gloo", or "cpu:gloo,cuda:nccl".
        ranks
            World ranks, in the group's order.
        rank
            This one.
        timeout
            What its calls have.
        name
            The group's.
        """
        if self._store is None:
            self._store, _, _ = next(rendezvous("mpi://"))
        if rank not in ranks:
            return None
        store = PrefixStore(f"{name}/", self._store)
        config = c10d.BackendConfig(dist.Backend(backend))
        group = dist.ProcessGroup(store, list(ranks).index(rank), len(ranks))
        for device, each in config.get_device_backend_map().items():
            kind = dist.Backend.backend_type_map.get(each, dist.ProcessGroup.BackendType.CUSTOM)
            group._set_default_backend(kind)
            made = _create(each, device, ranks, rank, timeout, name, store, group)
            group._register_backend(torch.device(device), kind, made)
        return group


def _create(
    backend: str,
    device: str,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta | None,
    name: str,
    store: Any,
    group: dist.ProcessGroup,
) -> Any:
    dist.Backend._ensure_backend_registered(backend)
    plugin = dist.Backend._plugins[backend.upper()]
    place = PrefixStore(f"{device}/", store), list(ranks).index(rank), len(ranks)
    limit = timeout or c10d._get_default_timeout(dist.Backend(backend))
    if not plugin.extended_api:
        return plugin.creator_fn(*place, limit)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = place
    options.timeout, options.global_ranks_in_group = limit, list(ranks)
    options.group_id = name  # type: ignore[assignment]
    options.process_group = group
    return plugin.creator_fn(options, None)
