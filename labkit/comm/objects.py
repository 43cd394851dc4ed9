"""Python objects between ranks, by pickle. For tensors the other functions are much faster."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from labkit.comm.agreement import collective
from labkit.comm.buffers import OBJECT
from labkit.comm.collectives import parts_of
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError
from labkit.comm.link import PrivateLink
from labkit.comm.lost import fault
from labkit.comm.mpi import MPI
from labkit.comm.p2p import check_tag, first, track
from labkit.comm.requests import CODES, Receive, Request, message_of, plain, raw_buffer, wrong_kind

__all__ = [
    "all_gather_object",
    "broadcast_object",
    "gather_object",
    "recv_object",
    "scatter_object",
    "send_object",
]


def send_object(
    thing: Any, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Send a Python object to rank `dst`, which takes it by `recv_object`."""
    communicator = current(group)
    communicator.check_rank(dst, "send_object", "dst")
    check_tag(communicator, tag, "send_object")
    buffer = raw_buffer(_pickled(thing, communicator, "send_object"))
    track(communicator)
    try:
        request = communicator.mpi.Isend(buffer.spec, dst, tag * CODES + OBJECT.code)
    except MPI.Exception as error:
        raise fault(communicator, "send_object", error) from error
    Request(communicator, "send_object", buffer, dst, tag, request).wait(timeout)


def recv_object(
    src: int | None = None,
    tag: int | None = None,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Any:
    """Return the Python object that rank `src` sent under `tag` (None: any).

    Only unpickle what your own ranks sent: a pickle can run code.
    """
    communicator = current(group)
    status = first(communicator, src, tag, "recv_object", timeout)
    if status.Get_tag() % CODES != OBJECT.code:
        raise wrong_kind(communicator, plain("recv_object", src, tag), message_of(status), OBJECT)
    peer, data = status.Get_source(), bytearray(status.Get_count(MPI.BYTE))
    arriving = Receive(communicator, "recv_object", raw_buffer(data), peer, status.Get_tag() // CODES)
    try:
        arriving.wait(timeout)
    except BaseException:
        arriving.give_up()
        raise
    return pickle.loads(data)


def broadcast_object(
    thing: Any = None, src: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """Return rank `src`'s `thing` on every rank."""
    communicator = current(group)
    communicator.check_rank(src, "broadcast_object", "src")
    at_source = communicator.rank == src
    data = _pickled(thing, communicator, "broadcast_object") if at_source else b""
    call = communicator.call("broadcast_object", f"src={src}")
    link = PrivateLink(communicator, call, timeout)
    received: list[bytearray] = []

    def move() -> None:
        if at_source:
            link.send_all([(rank, data) for rank in range(link.size) if rank != src])
        else:
            received.append(link.recv_unknown(src))

    collective(communicator, call, timeout, move, atomic=False)
    return thing if at_source else pickle.loads(received[0])


def scatter_object(
    things: Sequence[Any] | None = None,
    src: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Any:
    """Return ``things[r]`` of rank `src`'s list on rank r."""
    communicator = current(group)
    communicator.check_rank(src, "scatter_object", "src")
    at_source = communicator.rank == src
    messages: list[tuple[int, bytes]] = []
    mine: Any = None
    if at_source:
        parts = parts_of(things, communicator, communicator.who("scatter_object"))
        mine = parts[src]
        messages = [
            (rank, _pickled(part, communicator, "scatter_object")) for rank, part in enumerate(parts) if rank != src
        ]
    call = communicator.call("scatter_object", f"src={src}")
    link = PrivateLink(communicator, call, timeout)
    received: list[bytearray] = []

    def move() -> None:
        if at_source:
            link.send_all(messages)
        else:
            received.append(link.recv_unknown(src))

    collective(communicator, call, timeout, move, atomic=False)
    return mine if at_source else pickle.loads(received[0])


def gather_object(
    thing: Any, dst: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> list[Any] | None:
    """Return every rank's `thing` as a list in rank order on rank `dst`, None elsewhere."""
    communicator = current(group)
    communicator.check_rank(dst, "gather_object", "dst")
    at_destination = communicator.rank == dst
    data = b"" if at_destination else _pickled(thing, communicator, "gather_object")
    call = communicator.call("gather_object", f"dst={dst}")
    link = PrivateLink(communicator, call, timeout)
    received: dict[int, bytearray] = {}

    def move() -> None:
        if not at_destination:
            link.send(data, dst)
            return
        for rank in range(link.size):
            if rank != dst:
                received[rank] = link.recv_unknown(rank)

    collective(communicator, call, timeout, move, atomic=False)
    if not at_destination:
        return None
    return [thing if rank == dst else pickle.loads(received[rank]) for rank in range(communicator.size)]


def all_gather_object(thing: Any, *, group: Communicator | None = None, timeout: float | None = None) -> list[Any]:
    """Return every rank's `thing` as a list in rank order, on every rank."""
    gathered = gather_object(thing, 0, group=group, timeout=timeout)
    return list(broadcast_object(gathered, 0, group=group, timeout=timeout))


def _pickled(thing: Any, communicator: Communicator, operation: str) -> bytes:
    try:
        return pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ArgumentError(
            f"{communicator.who(operation)}: a {type(thing).__name__} cannot be pickled: {error}"
        ) from error
