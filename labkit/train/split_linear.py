"""Linear layers of which each rank holds a part: M. Shoeybi et al., "Megatron-LM", 2019, section 3.

A layer computes Y = X·Wᵀ + b from N×n inputs, with weights W, m×n. Its weights can be cut in two ways:

- between outputs: rank r has some rows of W and of b, takes all of X and computes some columns of Y. `ColumnLinear`
  (W's rows are the columns of the matrix Wᵀ that the paper cuts).
- between inputs: rank r has some columns of W, takes the same columns of X, and computes a summand of Y, N×m.
  `RowLinear`.

One upon the other, with a function of single numbers between them, they pass on their columns without a word: the
ranks talk once forward, in the sum of the second, and once backward, in that of the first.

=============== =============================== ====================================
Between ranks   forward                         backward
=============== =============================== ====================================
`copy_to_ranks` nothing: all have X             all-reduce: ∂J/∂X is the ranks' sum
`sum_of_ranks`  all-reduce: Y is the ranks' sum nothing: all have ∂J/∂Y
`stack_columns` all-gather: Y's columns         each takes its columns of ∂J/∂Y
=============== =============================== ====================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from labkit import comm
from labkit.data import share

from .ranks import Ranks, ranks_of
from .transport import Alone

__all__ = ["ColumnLinear", "RowLinear", "SplitLinear", "copy_to_ranks", "stack_columns", "sum_of_ranks"]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Ranks) -> Tensor:
        ctx.over = over
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        ctx.over.all_reduce(whole)
        return whole, None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Ranks) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        over.all_reduce(whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _StackColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Ranks) -> Tensor:
        whole = gather_parts(part, -1, over)
        ctx.mine = slice(*share(whole.shape[-1], over.rank, over.size))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.mine], None


def copy_to_ranks(x: Tensor, over: Ranks) -> Tensor:
    """Return `x`, which all ranks have alike and each goes on with in its own way: its gradient is their sum."""
    copied: Tensor = _CopyToRanks.apply(x, over)
    return copied


def sum_of_ranks(part: Tensor, over: Ranks) -> Tensor:
    """Return the sum of all ranks' `part`, with which all go on alike."""
    whole: Tensor = _SumOfRanks.apply(part, over)
    return whole


def stack_columns(part: Tensor, over: Ranks) -> Tensor:
    """Return all ranks' columns, N×m, side by side, of which `part` has this rank's; all go on with them alike."""
    whole: Tensor = _StackColumns.apply(part, over)
    return whole


def gather_parts(part: Tensor, dimension: int, over: Ranks) -> Tensor:
    """Return the ranks' parts, joined along `dimension`, in which their sizes may differ."""
    if isinstance(over, Alone):
        return part.clone()
    parts = comm.all_gatherv(part.movedim(dimension, 0).contiguous(), group=over.group)  # on the CPU
    return torch.cat([torch.as_tensor(each, device=part.device).movedim(0, dimension) for each in parts], dim=dimension)


class SplitLinear(nn.Module):
    """This rank's part of a `torch.nn.Linear`, with the same names for its parameters.

    Parameters
    ----------
    linear
        The whole layer, the same on all ranks; it is not changed.
    over
        The ranks; default: all.
    """

    cut: ClassVar[Mapping[str, int]]
    """The dimension along which a parameter is cut; one that is not there is whole on all ranks."""
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, over: Ranks | None = None) -> None:
        super().__init__()
        self.over = over or ranks_of(None, "tensor")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name in ("weight", "bias"):
            whole: nn.Parameter | None = getattr(linear, name)
            part = None
            if whole is not None:
                part = nn.Parameter(self.part(name, whole.detach()).clone(), whole.requires_grad)
            self.register_parameter(name, part)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole layer's parameter `name`."""
        if name not in self.cut:
            return whole
        dimension = self.cut[name]
        first, last = share(whole.shape[dimension], self.over.rank, self.over.size)
        return whole.narrow(dimension, first, last - first)

    def whole(self) -> dict[str, Tensor]:
        """Return the whole layer's parameters; all ranks call it together."""
        return {
            name: gather_parts(part.detach(), self.cut[name], self.over) if name in self.cut else part.detach()
            for name, part in self.named_parameters()
        }

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.in_features} → {self.out_features}, part {self.over.rank} of {self.over.size}"


class ColumnLinear(SplitLinear):
    """Some of a linear layer's outputs: from N×n to N×m/R, or, `stacked`, all of them, N×m.

    Parameters
    ----------
    linear, over
        As of `SplitLinear`.
    stacked
        Whether the ranks' columns are put together after it; else the next layer must be a `RowLinear`.
    """

    cut: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, linear: nn.Linear, over: Ranks | None = None, stacked: bool = True) -> None:
        super().__init__(linear, over)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for `x`, N×n."""
        mine = functional.linear(copy_to_ranks(x, self.over), self.weight, self.bias)
        return stack_columns(mine, self.over) if self.stacked else mine


class RowLinear(SplitLinear):
    """A linear layer's outputs, N×m, from some of its inputs, N×n/R, on each rank.

    Every rank has the whole bias and adds it once, after the sum.
    """

    cut: ClassVar[Mapping[str, int]] = {"weight": 1}

    def forward(self, part: Tensor) -> Tensor:
        """Return the outputs for inputs of which `part`, N×n/R, are this rank's columns."""
        whole = sum_of_ranks(functional.linear(part, self.weight), self.over)
        return whole if self.bias is None else whole + self.bias
