"""What carries tensors between the replicas: labkit's MPI, or torch.distributed (gloo, NCCL).

Training needs little of it, so that the same loop runs over either and the two can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from labkit import comm

__all__ = ["Alone", "MPITransport", "TorchTransport", "Transport"]

T = TypeVar("T")


class Transport(Protocol):
    """What the training loop asks of a transport. Tensors are contiguous, on the CPU or a GPU."""

    @property
    def name(self) -> str:
        """What it is, for the history."""
        ...

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to `dst`."""
        ...

    def recv(self, x: Tensor, src: int) -> None:
        """Fill `x` with what `src` sends."""
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Fill `x` on every rank with that of `src`."""
        ...

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        """Replace `x` on every rank by the ranks' ``"sum"`` or ``"mean"``."""
        ...

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `count` zeros, where `all_reduce` is fastest. All ranks call it alike."""
        ...

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return every rank's `thing`, by rank."""
        ...

    def spent(self) -> tuple[float, float]:
        """Return the seconds this rank has waited for others and moved data, since it began."""
        ...


class MPITransport:
    """labkit's own communication, `labkit.comm`.

    Tensors on a GPU go through host memory, so that it works with every MPI, CUDA-aware or not.

    Parameters
    ----------
    group
        The ranks that train together; default: all.
    """

    def __init__(self, group: comm.Communicator | None = None) -> None:
        self.group = group

    @property
    def name(self) -> str:
        """The MPI library's name and version."""
        from labkit.comm.mpi import MPI

        return MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return (self.group or comm.world()).rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return (self.group or comm.world()).size

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to `dst`."""
        comm.send(x.cpu(), dst, group=self.group)

    def recv(self, x: Tensor, src: int) -> None:
        """Fill `x` with what `src` sends."""
        _through_host(x, lambda host: comm.recv(host, src, group=self.group))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Fill `x` on every rank with that of `src`."""
        _through_host(x, lambda host: comm.broadcast(host, src, group=self.group))

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        """Replace `x` on every rank by the ranks' sum or mean."""
        _through_host(x, lambda host: comm.all_reduce(host, op, group=self.group))

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in memory that the ranks of a host share; on a GPU ordinary ones."""
        if device.type != "cpu":
            return torch.zeros(count, dtype=dtype, device=device)
        return torch.as_tensor(comm.shared_zeros(count, dtype, group=self.group))

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return every rank's `thing`, by rank."""
        return list(comm.all_gather_object(thing, group=self.group))

    def spent(self) -> tuple[float, float]:
        """Return the seconds this rank has waited for others and moved data."""
        spent = comm.spent()
        return spent.wait_s, spent.transfer_s


class TorchTransport:
    """`torch.distributed`'s default group, whatever its back end.

    It does not tell waiting from moving data: all time counts as moving.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def name(self) -> str:
        """The back end's name."""
        return f"torch.distributed, {torch.distributed.get_backend()}"

    @property
    def rank(self) -> int:
        """This rank in the default group."""
        return torch.distributed.get_rank()

    @property
    def size(self) -> int:
        """Ranks in the default group."""
        return torch.distributed.get_world_size()

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to `dst`."""
        self._timed(lambda: torch.distributed.send(x, dst))

    def recv(self, x: Tensor, src: int) -> None:
        """Fill `x` with what `src` sends."""
        self._timed(lambda: torch.distributed.recv(x, src))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Fill `x` on every rank with that of `src`."""
        self._timed(lambda: torch.distributed.broadcast(x, src))

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        """Replace `x` on every rank by the ranks' sum or mean."""
        self._timed(lambda: torch.distributed.all_reduce(x))
        if op == "mean":  # gloo knows no mean
            x /= self.size

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(count, dtype=dtype, device=device)

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return every rank's `thing`, by rank."""
        things: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(things, thing)
        return things

    def spent(self) -> tuple[float, float]:
        """Return 0 and the seconds this rank has spent in calls."""
        return 0.0, self._seconds

    def _timed(self, call: Callable[[], T]) -> T:
        begun = time.perf_counter()
        try:
            return call()
        finally:
            self._seconds += time.perf_counter() - begun


class Alone:
    """One rank and nobody else: the same training without communication, to compare with."""

    name, rank, size = "one process", 0, 1

    def send(self, x: Tensor, dst: int) -> None:
        """Refuse: there is nobody to send to."""
        raise ValueError(f"there is no rank {dst} in a training of one process")

    def recv(self, x: Tensor, src: int) -> None:
        """Refuse: there is nobody to receive from."""
        raise ValueError(f"there is no rank {src} to receive from in a training of one process")

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Leave `x` as it is."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        """Leave `x` as it is: sum and mean of one."""

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(count, dtype=dtype, device=device)

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return `thing` in a list."""
        return [thing]

    def spent(self) -> tuple[float, float]:
        """Return 0, 0."""
        return 0.0, 0.0


def _through_host(x: Tensor, call: Callable[[Tensor], Any]) -> None:
    if x.device.type == "cpu":
        call(x)
    else:
        host = x.cpu()
        call(host)
        x.copy_(host)
