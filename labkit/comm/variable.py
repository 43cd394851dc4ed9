"""Scatter and gather for parts whose first dimension differs from rank to rank.

Made of sends and receives between the root and the others (all_gatherv: of a ring), after the same agreement as every
collective. dtype and the shape beyond the first dimension must be the same on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from labkit.comm.agreement import Call, collective
from labkit.comm.buffers import Array, Buffer, empty_like, reading, writing
from labkit.comm.collectives import parts_of
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError, MismatchError
from labkit.comm.link import PrivateLink

__all__ = ["all_gatherv", "gatherv", "scatterv"]


def scatterv(
    out: Array,
    parts: Sequence[Array] | None = None,
    src: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Array:
    """Give each rank its part of what rank `src` has: rank r's `out` becomes ``parts[r]``; sizes may differ.

    Parameters
    ----------
    out
        On rank r shaped like ``parts[r]``.
    parts
        On rank `src` a list of `size` tensors, for instance ``x.tensor_split(size)``. Ignored on the other ranks.
    src
        The rank that gives.
    group, timeout
        See `labkit.comm`.

    Raises
    ------
    MismatchError
        On each rank whose `out` does not have its part's first dimension; the other ranks get theirs.
    """
    communicator = current(group)
    communicator.check_rank(src, "scatterv", "src")
    who = communicator.who("scatterv")
    into = writing(out, who)
    outgoing: list[Buffer] = []
    if communicator.rank == src:
        outgoing = [reading(part, who) for part in parts_of(parts, communicator, who)]
        for rank, part in enumerate(outgoing):
            if part.kind is not into.kind or tuple(part.shape[1:]) != tuple(into.shape[1:]):
                raise ArgumentError(
                    f"{who}: part {rank} is {part.kind} of shape {tuple(part.shape)}, out is {into.kind} of shape "
                    f"{tuple(into.shape)}: only the first dimension may differ."
                )
    call = _call(communicator, "scatterv", f"src={src}", into)
    link = PrivateLink(communicator, call, timeout)
    received: list[bytes | bytearray] = []

    def move() -> None:
        if communicator.rank == src:
            link.send_all([(rank, part.array()) for rank, part in enumerate(outgoing) if rank != src])
            received.append(outgoing[src].array().tobytes())
        else:
            received.append(link.recv_unknown(src))

    collective(communicator, call, timeout, move, atomic=False)
    if len(received[0]) != into.nbytes:
        raise MismatchError(
            f"{who}: rank {src}'s part for this rank holds {len(received[0])} bytes "
            f"({len(received[0]) // into.kind.itemsize} × {into.kind}), out holds {into.nbytes} "
            f"(shape {tuple(into.shape)}). Make out as long as the part."
        )
    _fill(into, received[0])
    into.restore()
    return out


def gatherv(
    x: Array, dst: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> list[Array] | None:
    """Collect every rank's `x` at rank `dst`, whatever its first dimension: a list there, None elsewhere."""
    communicator = current(group)
    communicator.check_rank(dst, "gatherv", "dst")
    part = reading(x, communicator.who("gatherv"))
    call = _call(communicator, "gatherv", f"dst={dst}", part)
    link = PrivateLink(communicator, call, timeout)
    gathered: list[Array] = []

    def move() -> None:
        if communicator.rank != dst:
            link.send(_shape_out(part), dst)
            link.send(part.array(), dst)
            return
        for rank in range(communicator.size):
            if rank == dst:
                gathered.append(_copy(x, part, part.array().tobytes(), tuple(part.shape)))
            else:
                shape = _shape_in(link.recv_unknown(rank))
                gathered.append(_copy(x, part, link.recv_unknown(rank), shape))

    collective(communicator, call, timeout, move, atomic=False)
    return gathered if communicator.rank == dst else None


def all_gatherv(x: Array, *, group: Communicator | None = None, timeout: float | None = None) -> list[Array]:
    """Collect every rank's `x` on every rank, whatever its first dimension, as a list in rank order.

    The parts travel round a ring: each rank sends p − 1 parts and as many shapes.
    """
    communicator = current(group)
    rank, size = communicator.rank, communicator.size
    part = reading(x, communicator.who("all_gatherv"))
    call = _call(communicator, "all_gatherv", "", part)
    link = PrivateLink(communicator, call, timeout)
    gathered: dict[int, Array] = {rank: _copy(x, part, part.array().tobytes(), tuple(part.shape))}

    def move() -> None:
        right, left = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            buffer = reading(gathered[(rank - step) % size], "all_gatherv")
            shape = bytearray(len(_shape_out(buffer)))
            link.exchange(_shape_out(buffer), right, shape, left)
            arriving = empty_like(x, _shape_in(shape))
            link.exchange(buffer.array(), right, reading(arriving, "all_gatherv").array(), left)
            gathered[(rank - step - 1) % size] = arriving

    collective(communicator, call, timeout, move, atomic=False)
    return [gathered[each] for each in range(size)]


def _call(communicator: Communicator, operation: str, detail: str, buffer: Buffer) -> Call:
    """Like other collectives' calls, but the first dimension is free."""
    beyond = tuple(buffer.shape[1:])
    key = (operation, detail, buffer.kind, beyond, len(buffer.shape))
    call = communicator.calls.get(key)
    if call is None:
        shape = ", ".join(["any", *map(str, beyond)]) if buffer.shape else ""
        kind = buffer.kind.name
        text = ", ".join(part for part in [detail, kind, f"shape ({shape})"] if part)
        call = communicator.remember(key, Call(communicator, operation, text, count=buffer.count, dtype=kind))
    return call


def _shape_out(buffer: Buffer) -> bytes:
    return struct.pack(f"={len(buffer.shape)}q", *buffer.shape)


def _shape_in(data: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"={len(data) // 8}q", data)


def _fill(buffer: Buffer, data: bytes | bytearray) -> None:
    if buffer.count:
        buffer.array().view("uint8")[:] = memoryview(data)


def _copy(like: Array, part: Buffer, data: bytes | bytearray, shape: tuple[int, ...]) -> Array:
    """A new tensor of `like`'s dtype with these bytes."""
    made = empty_like(like, shape)
    _fill(reading(made, part.kind.name), data)
    return made
