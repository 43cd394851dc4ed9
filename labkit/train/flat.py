"""Gradients laid side by side, so that one all-reduce carries them all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .transport import Alone, Transport

__all__ = ["FlatGradients"]


class FlatGradients:
    """A model's gradients as views into one flat buffer for each dtype.

    A loop over parameters pays the latency of an all-reduce for each of them. Here autograd adds straight
    into the buffers, so one all-reduce a buffer sends all gradients, and nothing is copied.

    Parameters
    ----------
    model
        Its trainable parameters get their ``.grad``.
    over
        Makes the buffers, where its all-reduce is fastest; all ranks make theirs together. Default: ordinary memory.

    Attributes
    ----------
    buffers
        One flat tensor for each dtype and device.
    copies
        Gradients that something had replaced by a tensor of its own (``zero_grad(set_to_none=True)`` does)
        and that had to be copied back. 0 unless a model or an optimizer does so.
    """

    def __init__(self, model: nn.Module, over: Transport | None = None) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.buffers: list[Tensor] = []
        self.copies = 0
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        for (dtype, device), parameters in kinds.items():
            buffer = (over or Alone()).zeros(sum(p.numel() for p in parameters), dtype, device)
            pieces = buffer.split([p.numel() for p in parameters])
            self._views += [(p, piece.view(p.shape)) for p, piece in zip(parameters, pieces, strict=True)]
            self.buffers.append(buffer)
        self.zero()

    def zero(self) -> None:
        """Set all gradients to 0, in place of ``optimizer.zero_grad()``, which would drop the views."""
        for buffer in self.buffers:
            buffer.zero_()
        for parameter, view in self._views:
            if parameter.grad is not view:
                parameter.grad = view

    def all_reduce(self, over: Transport, op: str = "mean") -> None:
        """Replace every rank's gradients by the ranks' mean (or ``"sum"``)."""
        self.gather()
        for buffer in self.buffers:
            over.all_reduce(buffer, op)

    def gather(self) -> None:
        """Copy back the gradients that something replaced by tensors of their own."""
        for parameter, view in self._views:
            if parameter.grad is not view:
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view
                self.copies += 1

    def release(self) -> None:
        """Give the parameters' gradients up, as after ``zero_grad(set_to_none=True)``."""
        for parameter, _ in self._views:
            parameter.grad = None
