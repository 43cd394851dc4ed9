"""Messages between two ranks: send, receive, probe.

A receive must fit its message: another dtype or another length is an error that names both sides, and the message
stays there (see `labkit.comm.requests` and `labkit.comm.inbox` for how).
"""

from __future__ import annotations

import time
from typing import Any

from labkit.comm.buffers import Array, reading, writing
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError
from labkit.comm.mpi import MPI
from labkit.comm.requests import CODES, Message, Receive, Request, fault, find, message_of, plain, wait_for
from labkit.comm.waiting import clock, until

__all__ = ["Message", "Request", "irecv", "isend", "probe", "recv", "send", "sendrecv"]

LARGEST_TAG: int = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // CODES - 1


def send(x: Array, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None) -> None:
    """Send tensor or array `x` to rank `dst`; return when `x` may be changed again.

    Small messages leave at once; large ones (over about 4 KB on one host) wait for the receiver.

    Raises
    ------
    ArgumentError
        For a rank, tag or tensor that cannot be used.
    DeadlineError
        When `dst` does not receive in time.
    """
    request = _send(current(group), x, dst, tag, "send")
    try:
        request.wait(timeout)
    except BaseException:
        request.give_up()
        raise


def recv(
    x: Array,
    src: int | None = None,
    tag: int | None = None,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Message:
    """Fill `x` with a message from rank `src` under `tag` (None: any).

    Raises
    ------
    MismatchError
        When the message has another dtype or another number of elements than `x`. It can still be received.
    DeadlineError
        When no message comes in time. The communicator stays good.
    """
    request = _recv(current(group), x, src, tag, "recv")
    try:
        message = request.wait(timeout)
    except BaseException:
        request.give_up()
        raise
    assert message is not None
    return message


def isend(x: Array, dst: int, tag: int = 0, *, group: Communicator | None = None) -> Request:
    """Begin to send `x`; do not change it before `Request.wait` returns."""
    return _send(current(group), x, dst, tag, "isend")


def irecv(x: Array, src: int | None = None, tag: int | None = None, *, group: Communicator | None = None) -> Request:
    """Begin to receive into `x`; it is filled when `Request.wait` returns."""
    return _recv(current(group), x, src, tag, "irecv")


def sendrecv(
    x: Array,
    dst: int,
    y: Array,
    src: int | None = None,
    sendtag: int = 0,
    recvtag: int | None = None,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Message:
    """Send `x` to `dst` and fill `y` from `src` at the same time: two ranks can exchange without a deadlock.

    `x` and `y` must not share memory. `recvtag` None takes any tag.
    """
    communicator = current(group)
    incoming = _recv(communicator, y, src, recvtag, "recv")
    try:
        outgoing = _send(communicator, x, dst, sendtag, "send")
    except BaseException:
        incoming.give_up()
        raise
    try:
        message = incoming.wait(timeout)
        outgoing.wait(timeout)
    except BaseException:
        incoming.give_up()
        raise
    assert message is not None
    return message


def probe(
    src: int | None = None, tag: int | None = None, *, group: Communicator | None = None, timeout: float | None = None
) -> Message:
    """Wait for a message without receiving it; tells sender, tag, number of elements, bytes and dtype."""
    return message_of(first(current(group), src, tag, "probe", timeout))


def check_tag(group: Communicator, tag: Any, operation: str) -> None:
    """Raise `ArgumentError` unless `tag` is a usable number."""
    if not isinstance(tag, int) or not 0 <= tag <= LARGEST_TAG:
        raise ArgumentError(f"{group.who(operation)}: tag={tag!r} must be a whole number from 0 to {LARGEST_TAG}.")


def track(group: Communicator) -> None:
    """Forget finished sends that nobody waited for, once many have gathered."""
    if len(group.in_flight) >= group.sweep_at:
        for request in list(group.in_flight):
            request.sweep()
        group.sweep_at = max(64, 2 * len(group.in_flight))


def _send(group: Communicator, x: Array, dst: int, tag: int, operation: str) -> Request:
    group.check_rank(dst, operation, "dst")
    check_tag(group, tag, operation)
    buffer = reading(x, group.who(operation))
    track(group)
    try:
        request = group.mpi.Isend(buffer.spec, dst, tag * CODES + buffer.kind.code)
    except MPI.Exception as error:
        raise fault(group, operation, error) from error
    return Request(group, operation, buffer, dst, tag, request)


def _recv(group: Communicator, x: Array, src: int | None, tag: int | None, operation: str) -> Receive:
    if src is not None:
        group.check_rank(src, operation, "src")
    if tag is not None:
        check_tag(group, tag, operation)
    buffer = writing(x, group.who(operation))
    return Receive(group, operation, buffer, src, tag)


def first(group: Communicator, src: int | None, tag: int | None, operation: str, timeout: float | None) -> MPI.Status:
    """Wait for the first message from `src` under `tag` that no receive claims, and leave it where it is."""
    if src is not None:
        group.check_rank(src, operation, "src")
    if tag is not None:
        check_tag(group, tag, operation)
    found: list[MPI.Status] = []

    def look() -> bool:
        group.inbox.advance()
        status = find(group, src, tag)
        if status is not None:
            found.append(status)
        return bool(found)

    began = time.perf_counter_ns()
    try:
        until(look, lambda: wait_for(group, operation, src, tag, None, plain(operation, src, tag)), timeout)
    except MPI.Exception as error:
        raise fault(group, operation, error) from error
    finally:
        clock.wait_ns += time.perf_counter_ns() - began
    return found[0]
