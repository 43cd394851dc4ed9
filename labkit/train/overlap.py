"""Gradients that are reduced in pieces while backward still computes the others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .replicas import TrainError
from .transport import Transport

__all__ = ["BUCKET_BYTES", "OverlappedGradients"]

BUCKET_BYTES = 32 << 20
"""A bucket is closed before it grows beyond so many bytes: a larger parameter has one of its own.

At each reduction the ranks wait for the slowest, and on a host's own cores it takes as long as it would later, so a few
large ones cost less than many small ones.
"""


class Bucket:
    """Gradients side by side in one flat tensor, and which of them backward has not computed yet."""

    def __init__(self, parameters: list[nn.Parameter], over: Transport) -> None:
        counts = [parameter.numel() for parameter in parameters]
        self.flat = over.zeros(sum(counts), parameters[0].dtype, parameters[0].device)
        pieces = self.flat.split(counts)
        self.views = {p: piece.view(p.shape) for p, piece in zip(parameters, pieces, strict=True)}
        self.missing: set[nn.Parameter] = set()

    def zero(self) -> None:
        """Begin a step in which autograd adds to the gradients here."""
        self.flat.zero_()
        for parameter, view in self.views.items():
            if parameter.grad is not view:
                parameter.grad = view

    def empty(self) -> None:
        """Begin a step in which autograd makes each gradient, and `take` brings it here.

        For large ones that is less work than to set them to 0 and then to add to them.
        """
        for parameter in self.views:
            parameter.grad = None
        self.missing = set(self.views)

    def take(self, parameter: nn.Parameter) -> bool:
        """Bring a gradient here that is elsewhere; where there is none, it is 0. Return whether one was copied."""
        view, gradient = self.views[parameter], parameter.grad
        if gradient is view:
            return False
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
        parameter.grad = view
        return gradient is not None


class OverlappedGradients:
    """A model's gradients in buckets, each reduced as soon as backward has filled it. Made by all ranks together.

    The buckets lie in memory that the ranks share where they can (`Transport.zeros`), and hold the parameters in
    reverse order, as backward computes them. They are reduced in their order, so all ranks make the same calls: a
    bucket that is full waits for one before it that is not, and what no gradient came for is reduced after backward.

    A model that fits into one bucket is reduced after backward: nothing is left to compute when the bucket is full.
    So are gradients on a GPU, where backward does not run in the thread that may communicate.

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
        Gradients that something other than autograd had replaced, as of `FlatGradients`.
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
            if len(self._buckets) > 1 and parameter.device.type == "cpu"
        ]
        self.zero()

    @property
    def buckets(self) -> list[Tensor]:
        """Flat tensors, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def zero(self) -> None:
        """Forget the gradients of the last step, in place of ``optimizer.zero_grad()``."""
        for bucket in self._buckets:
            if self._hooks:
                bucket.empty()
            else:
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
        """Backward has computed the gradient of `parameter`, which belongs to bucket `number`."""
        if number < self._next:
            raise TrainError(
                f"rank {self._over.rank}: backward computed the gradient of {self._names[parameter]} a second time, "
                'after the ranks had reduced it. Call backward once a step, or use sync="fused".'
            )
        bucket = self._buckets[number]
        bucket.take(parameter)
        bucket.missing.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self.copies += sum(map(bucket.take, bucket.views))
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
