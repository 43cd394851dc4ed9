"""What torch.distributed's calls are given, as labkit takes it: operations by name, tensors as vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from labkit.comm.communicator import Communicator
from labkit.comm.errors import ArgumentError

__all__ = ["factor", "flat_of", "operation", "put_back", "rows", "same_sizes", "scaled"]

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "bitwise_and",
    dist.ReduceOp.BOR: "bitwise_or",
    dist.ReduceOp.BXOR: "bitwise_xor",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
}
_BOOL_OPS = {"sum": "max"}
"""As in torch's other back ends: true + true is true."""


def operation(opts: Any, dtype: torch.dtype) -> str:
    """labkit's name of the operation that is asked for; "premul_sum" for the sum of scaled tensors."""
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    name = _OPS[getattr(op, "op", op)]
    return _BOOL_OPS.get(name, name) if dtype is torch.bool else name


def factor(opts: Any) -> Any:
    """What ``PREMUL_SUM`` multiplies by."""
    return opts.reduceOp.__getstate__()[1]


def scaled(flat: torch.Tensor, x: torch.Tensor, opts: Any) -> torch.Tensor:
    """`flat` times the factor that is asked for; not in place where `flat` is `x`'s own memory."""
    return flat * factor(opts) if flat.data_ptr() == x.data_ptr() else flat.mul_(factor(opts))


def flat_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as a vector: a view of its memory where that is contiguous, or a copy."""
    data = x.detach()
    return data.view(-1) if data.is_contiguous() else data.reshape(-1)


def put_back(flat: torch.Tensor, x: torch.Tensor) -> None:
    """Copy the result into `x` where `flat_of` had to make a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.detach().copy_(flat.view(x.shape))


def rows(x: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """How many elements each rank's part of `x` has, by its rows (equally many where none are given)."""
    length = x.shape[0] if x.dim() else 0
    row = x.numel() // length if length else 0
    return [size * row for size in (sizes or [length // ranks] * ranks)]


def same_sizes(many: Sequence[torch.Tensor], one: torch.Tensor, group: Communicator, call: str) -> None:
    """Refuse a list that does not hold as many tensors like `one` as the group has ranks."""
    wrong = [number for number, x in enumerate(many) if x.numel() != one.numel() or x.dtype != one.dtype]
    if wrong or len(many) != group.size:
        raise ArgumentError(
            f"{group.who(call)}: the list must hold {group.size} tensors of {one.numel()} × {one.dtype}, "
            f"it holds {[(x.numel(), str(x.dtype)) for x in many]}."
        )
