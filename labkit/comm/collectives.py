"""Collectives that move data without combining it, for parts of equal size on all ranks.

All of them first agree that every rank makes the same call (see `labkit.comm.agreement`): root, dtype and shape must
be the same everywhere, or every rank gets a `MismatchError` that lists each rank's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.comm.agreement import Call, collective
from labkit.comm.buffers import Array, Buffer, empty_like, reading, writing
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "parts_of", "scatter"]


def barrier(*, group: Communicator | None = None, timeout: float | None = None) -> None:
    """Return once every rank has called `barrier`."""
    communicator = current(group)
    collective(communicator, communicator.call("barrier"), timeout)


def broadcast(x: Array, src: int = 0, *, group: Communicator | None = None, timeout: float | None = None) -> Array:
    """Copy rank `src`'s `x` into every rank's `x`, and return it.

    Parameters
    ----------
    x
        Tensor or array, of the same dtype and shape on all ranks.
    src
        The rank whose values count.
    group, timeout
        See `labkit.comm`.
    """
    communicator = current(group)
    communicator.check_rank(src, "broadcast", "src")
    who = communicator.who("broadcast")
    sends = communicator.rank == src
    buffer = reading(x, who) if sends else writing(x, who)
    call = _call(communicator, "broadcast", f"src={src}", buffer)
    collective(communicator, call, timeout, communicator.mpi.Bcast, (buffer.spec, src))
    if not sends:
        buffer.restore()
    return x


def scatter(
    out: Array,
    parts: Array | Sequence[Array] | None = None,
    src: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Array:
    """Give each rank its part of what rank `src` has: rank r's `out` becomes ``parts[r]``.

    Parameters
    ----------
    out
        Same dtype and shape on all ranks; for unequal parts use `scatterv`.
    parts
        On rank `src` a list of `size` tensors shaped like `out`, or one tensor of shape ``(size, *out.shape)``
        (or whose first dimension is `size` times that of `out`). Ignored on the other ranks.
    src
        The rank that gives.
    group, timeout
        See `labkit.comm`.
    """
    communicator = current(group)
    communicator.check_rank(src, "scatter", "src")
    who = communicator.who("scatter")
    into = writing(out, who)
    whole: Buffer | None = None
    if communicator.rank == src:
        whole = reading(_stacked(parts, out, communicator, who), who)
        whole.spec[1] = into.count
    call = _call(communicator, "scatter", f"src={src}", into)
    collective(communicator, call, timeout, communicator.mpi.Scatter, (whole and whole.spec, into.spec, src))
    into.restore()
    return out


def gather(
    x: Array, dst: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> list[Array] | None:
    """Collect every rank's `x` at rank `dst`: a list in rank order there, None elsewhere.

    The list's entries are views of one new tensor of shape ``(size, *x.shape)``.
    """
    communicator = current(group)
    communicator.check_rank(dst, "gather", "dst")
    who = communicator.who("gather")
    part = reading(x, who)
    call = _call(communicator, "gather", f"dst={dst}", part)
    if communicator.rank != dst:
        collective(communicator, call, timeout, communicator.mpi.Gather, (part.spec, None, dst))
        return None
    stack: Any = empty_like(x, (communicator.size, *part.shape))
    whole = writing(stack, who).spec
    whole[1] = part.count
    collective(communicator, call, timeout, communicator.mpi.Gather, (part.spec, whole, dst))
    return [stack[rank, ...] for rank in range(communicator.size)]


def all_gather(x: Array, *, group: Communicator | None = None, timeout: float | None = None) -> list[Array]:
    """Collect every rank's `x` on every rank, as a list in rank order.

    The list's entries are views of one new tensor of shape ``(size, *x.shape)``.
    """
    communicator = current(group)
    who = communicator.who("all_gather")
    part = reading(x, who)
    stack: Any = empty_like(x, (communicator.size, *part.shape))
    whole = writing(stack, who).spec
    whole[1] = part.count
    call = _call(communicator, "all_gather", "", part)
    collective(communicator, call, timeout, communicator.mpi.Allgather, (part.spec, whole))
    return [stack[rank, ...] for rank in range(communicator.size)]


def all_to_all(out: Array, x: Array, *, group: Communicator | None = None, timeout: float | None = None) -> Array:
    """Rank r's s-th part of `x` becomes rank s's r-th part of `out`: a transposition across ranks.

    Parameters
    ----------
    out, x
        Same dtype and shape; the first dimension is a multiple of `size` and is cut into `size` equal parts.
        They must not share memory.
    group, timeout
        See `labkit.comm`.
    """
    communicator = current(group)
    who = communicator.who("all_to_all")
    source, into = reading(x, who), writing(out, who)
    if tuple(source.shape) != tuple(into.shape) or source.kind is not into.kind:
        raise ArgumentError(
            f"{who}: out is {into.kind} of shape {tuple(into.shape)} and x is {source.kind} of shape "
            f"{tuple(source.shape)}; both must be alike."
        )
    if not source.shape or source.shape[0] % communicator.size:
        raise ArgumentError(
            f"{who}: shape {tuple(source.shape)} cannot be cut into {communicator.size} equal parts along the first "
            "dimension."
        )
    call = _call(communicator, "all_to_all", "", source)
    part = source.count // communicator.size
    source.spec[1] = into.spec[1] = part
    collective(communicator, call, timeout, communicator.mpi.Alltoall, (source.spec, into.spec))
    into.restore()
    return out


def parts_of(parts: Any, communicator: Communicator, who: str) -> Sequence[Array]:
    """`parts` as something with one entry a rank, or an `ArgumentError`."""
    if parts is None:
        raise ArgumentError(f"{who}: this rank is the source and must give the parts, one for each rank.")
    if not hasattr(parts, "__len__") or len(parts) != communicator.size:
        number = len(parts) if hasattr(parts, "__len__") else f"a {type(parts).__name__}"
        raise ArgumentError(f"{who}: {number} parts for {communicator.size} ranks: give one part for each rank.")
    return parts  # type: ignore[no-any-return]


def _stacked(parts: Any, out: Array, communicator: Communicator, who: str) -> Array:
    """The parts as one tensor, in rank order."""
    size, shape = communicator.size, tuple(out.shape)
    if hasattr(parts, "dtype") and hasattr(parts, "shape"):
        cut = bool(shape) and tuple(parts.shape) == (size * shape[0], *shape[1:])
        if tuple(parts.shape) != (size, *shape) and not cut:
            raise ArgumentError(
                f"{who}: parts has shape {tuple(parts.shape)}, but {size} parts of shape {shape} need "
                f"{(size, *shape)}. Use scatterv() for unequal parts."
            )
        if parts.dtype != out.dtype:
            raise ArgumentError(f"{who}: parts is {parts.dtype}, out is {out.dtype}: use one dtype.")
        given: Array = parts
        return given
    stack: Any = empty_like(out, (size, *shape))
    for rank, part in enumerate(parts_of(parts, communicator, who)):
        if type(part) is not type(out) and not hasattr(part, "dtype"):
            raise ArgumentError(f"{who}: part {rank} is a {type(part).__name__}, not a tensor or array.")
        if tuple(part.shape) != shape or part.dtype != out.dtype:
            raise ArgumentError(
                f"{who}: part {rank} is {part.dtype} of shape {tuple(part.shape)}, out is {out.dtype} of shape "
                f"{shape}: all parts must be alike. Use scatterv() for unequal parts."
            )
        stack[rank] = part.detach() if hasattr(part, "detach") else part
    filled: Array = stack
    return filled


def _call(communicator: Communicator, operation: str, detail: str, buffer: Buffer) -> Call:
    key = (operation, detail, buffer.kind, buffer.shape)
    call = communicator.calls.get(key)
    if call is None:
        kind, shape = buffer.kind.name, tuple(buffer.shape)
        text = f"{detail}, {kind}, shape {shape}" if detail else f"{kind}, shape {shape}"
        call = communicator.remember(key, Call(communicator, operation, text, count=buffer.count, dtype=kind))
    return call
