"""All-reduce of sparse tensors: ranks exchange what they hold, and each adds it up."""

from __future__ import annotations

from typing import cast

import torch

from labkit.comm.communicator import Communicator
from labkit.comm.errors import ArgumentError
from labkit.comm.variable import all_gatherv

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(x: torch.Tensor, op: str, group: Communicator, timeout: float | None) -> None:
    """Add up every rank's sparse (COO) tensor, in place; `x` is coalesced afterwards.

    The ranks may hold different entries, and differently many.

    Raises
    ------
    ArgumentError
        For another `op` than "sum".
    """
    if op != "sum":
        raise ArgumentError(f"{group.who('all_reduce')}: sparse tensors can be summed, op={op!r} cannot be done.")
    own = x.detach().coalesce()
    entries = all_gatherv(own.indices().t().contiguous(), group=group, timeout=timeout)
    values = all_gatherv(own.values(), group=group, timeout=timeout)
    together = torch.sparse_coo_tensor(
        torch.cat(cast("list[torch.Tensor]", entries)).t(),
        torch.cat(cast("list[torch.Tensor]", values)),
        own.shape,
    )
    with torch.no_grad():  # not on x.detach(), which would keep the new entries for itself
        x.copy_(together.coalesce())
