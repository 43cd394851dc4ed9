"""torch's DistributedDataParallel in the place of labkit's own ways to reduce gradients, to compare with them."""

from __future__ import annotations

import inspect
import os
import socket
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .replicas import TrainError
from .settings import SettingError
from .transport import Transport

__all__ = ["BACKENDS", "DDPGradients"]

BACKENDS = ("mpi", "gloo", "nccl")
"""What can carry the gradients."""
_NEW = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}
"""Each rank keeps its own, as in the other ways. torch 2.15 has a new name for it."""


class DDPGradients:
    """A model under torch's DistributedDataParallel, in the shape of `FlatGradients`. Made by all ranks together.

    The default process group is used if it has that back end; else a group of all ranks is made, and destroyed by
    `release`. Where no default group is there, one is made: ranks and size come from MPI.

    Parameters
    ----------
    model
        The replica. All parameters must take part in each step.
    over
        What carries everything else.
    op
        ``"mean"``, or ``"sum"`` of the ranks' gradients.
    backend
        One of `BACKENDS`.

    Raises
    ------
    ValueError
        When there is no such back end.
    TrainError
        When it cannot be used here.
    """

    def __init__(self, model: nn.Module, over: Transport, op: str, backend: str) -> None:
        check_backend(backend)
        self.copies = 0
        self._model, self._op, self._size = model, op, over.size
        self._group, self._made = _process_group(backend, over)
        try:
            self._wrapped = nn.parallel.DistributedDataParallel(
                model,
                process_group=self._group,
                init_sync=False,  # rank 0's weights are there already, unless other ones were asked for
                gradient_as_bucket_view=True,
                **_BUFFERS,
            )
        except BaseException:
            self._leave()
            raise

    def forward(self, images: Tensor) -> Any:
        """The model's output; its backward reduces the gradients, with every rank's."""
        return self._wrapped(images)

    def without_samples(self, images: Tensor) -> None:
        """Take part with gradients of 0, on a rank that has none of the step's samples: of shape 0×… `images`.

        The others' backward waits for this rank's. Not in training mode: no random number is drawn for dropout, and
        no statistics change.
        """
        was_training = self._model.training
        self._model.eval()
        try:
            (self.forward(images.new_zeros((1, *images.shape[1:]))) * 0).sum().backward()
        finally:
            self._model.train(was_training)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._model.zero_grad()

    def all_reduce(self, over: Transport, op: str) -> None:
        """Finish what backward has not done."""
        if self._op == "sum":  # DistributedDataParallel knows the mean alone
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self._size

    def release(self) -> None:
        """Give up the gradients, what watches for them, and the process group if it was made here."""
        self._wrapped._remove_autograd_hooks()
        self._model.zero_grad()
        del self._wrapped
        self._leave()

    def _leave(self) -> None:
        if self._made:
            distributed.destroy_process_group(self._group)
        self._group = None


def check_backend(backend: str) -> None:
    """Refuse a back end that is unknown, or that this machine has no device for."""
    if backend not in BACKENDS:
        raise SettingError(f'backend must be "mpi", "gloo" or "nccl", not {backend!r}')
    if backend == "nccl" and not torch.cuda.is_available():
        raise TrainError('backend="nccl" needs an NVIDIA GPU, and there is none here: use backend="mpi" or "gloo"')


def _process_group(backend: str, over: Transport) -> tuple[Any, bool]:
    """A group of all ranks with that back end, and whether it was made for this."""
    group: Any
    if not distributed.is_initialized():
        if backend == "gloo" and len(set(over.all_gather_object(socket.gethostname()))) == 1:
            # gloo would look its own host's name up, which not every machine can without a network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(backend, init_method="mpi://")
        group, made = distributed.group.WORLD, True
    elif distributed.get_backend() == backend:
        group, made = distributed.group.WORLD, False
    else:
        group, made = distributed.new_group(backend=backend), True
    size = distributed.get_world_size(group)
    if size != over.size:
        if made:
            distributed.destroy_process_group(group)
        raise TrainError(
            f"torch.distributed's group has {size} ranks, but {over.size} train: let all ranks of the group train, "
            'or use another sync than "ddp"'
        )
    return group, made
