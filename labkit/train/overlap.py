"""Gradients that are reduced in pieces while backward still computes the others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .replicas import TrainError
from .transport import Transport

__all__ = ["BUCKET_BYTES", "OverlappedGradients"]

BUCKET_BYTES = 8 << 20
"""A bucket is closed before it grows beyond so many bytes: a larger parameter has one of its own."""


class Bucket:
    """Gradients side by side in one flat tensor, and which of them backward has not computed yet."""

    def __init__(self, parameters: list[nn.Parameter], over: Transport) -> None:
        counts = [parameter.numel() for parameter in parameters]
        self.flat = over.zeros(sum(counts), parameters[0].dtype, parameters[0].device)
        pieces = self.flat.split(counts)
        self.views = {p: piece.view(p.shape) for p, piece in zip(parameters, pieces, strict=True)}
        self.missing: set[nn.Parameter] = set()

    def zero(self) -> None:
        """Begin a step."""
        self.flat.zero_()
        for parameter, view in self.views.items():
            if parameter.grad is not view:
                parameter.grad = view
        self.missing = set(self.views)

    def gather(self) -> int:
        """Bring gradients here that something has replaced by a tensor of its own; return how many."""
        replaced = [(p, view) for p, view in self.views.items() if p.grad is not view]
        for parameter, view in replaced:
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        return len(replaced)


class OverlappedGradients:
    """A model's gradients in buckets, each reduced as soon as backward has filled it. Made by all ranks together.

    The buckets lie in memory that the ranks share where they can (`Transport.zeros`), and hold the parameters in
    reverse order, as backward computes them. They are reduced in their order, so all ranks make the same calls: a
    bucket that is full waits for one before it that is not, and what no gradient came for is reduced after backward.

    Gradients on a GPU are reduced after backward: there, it does not run in the thread that may communicate.

    Parameters
    ----------
    model
        Its trainable parameters get their ``.grad``.
    over
        What carries them.
    op
        ``"mean"`` or ``"sum"``.
    bucket_bytes
        Default: `BUCKET_BYTES`.

    Attributes
    ----------
    buckets
        Flat tensors, in the order in which they are reduced.
    copies
        As of `FlatGradients`.
    """

    def __init__(self, model: nn.Module, over: Transport, op: str, bucket_bytes: int | None = None) -> None:
        self._over, self._op = over, op
        self._buckets = [Bucket(group, over) for group in _groups(model, bucket_bytes or BUCKET_BYTES)]
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._next = 0
        self.copies = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._computed, number))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.views
            # Without a second bucket there is nothing left to compute when the first is full.
            if len(self._buckets) > 1 and parameter.device.type == "cpu"
        ]
        self.zero()

    @property
    def buckets(self) -> list[Tensor]:
        """Flat tensors, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def zero(self) -> None:
        """Set all gradients to 0, in place of ``optimizer.zero_grad()``, which would drop the views."""
        for bucket in self._buckets:
            bucket.zero()
        self._next = 0

    def all_reduce(self, over: Transport, op: str) -> None:
        """Reduce what backward has left."""
        while self._next < len(self._buckets):
            self._reduce_next()

    def release(self) -> None:
        """Give the parameters' gradients up, and the memory."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            for parameter in bucket.views:
                parameter.grad = None
        self._buckets, self._hooks = [], []

    def _computed(self, number: int, parameter: nn.Parameter) -> None:
        """Backward has added to the gradient of `parameter`, which belongs to bucket `number`."""
        if number < self._next:
            raise TrainError(
                f"rank {self._over.rank}: backward computed the gradient of {self._names[parameter]} a second time, "
                'after the ranks had reduced it. Call backward once a step, or use sync="fused".'
            )
        self._buckets[number].missing.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self.copies += bucket.gather()
        self._over.all_reduce(bucket.flat, self._op)


def _groups(model: nn.Module, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The trainable parameters of each bucket, last ones first; those of one dtype and device lie together."""
    groups: list[list[nn.Parameter]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        kind = parameter.dtype, parameter.device
        group, filled = open_.get(kind, ([], 0))
        nbytes = parameter.numel() * parameter.element_size()
        if not group or filled + nbytes > bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(parameter)
        open_[kind] = group, filled + nbytes
    return groups
