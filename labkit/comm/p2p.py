"""Messages between two ranks: send, receive, probe.

A receive must fit its message: another dtype or another length is an error that names both sides, and the message
stays there (see `labkit.comm.requests` and `labkit.comm.inbox` for how).

`send` and `recv` are the same as `isend` and `irecv` with `Request.wait`, without the objects: for a small message
these would cost more than the message.
"""

from __future__ import annotations

import time
from itertools import starmap
from typing import Any

from labkit.comm.buffers import KINDS, Array, Buffer, reading, writing
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError
from labkit.comm.lost import fault
from labkit.comm.mpi import MPI
from labkit.comm.requests import (
    CODES,
    Message,
    Receive,
    Request,
    find,
    message_of,
    plain,
    receiving,
    stranger_for,
    wait_for,
    wrong_kind,
    wrong_length,
)
from labkit.comm.waiting import Wait, clock, until

__all__ = ["Message", "Request", "irecv", "isend", "probe", "recv", "send", "sendrecv"]

_ANY_SOURCE, _ANY_TAG, _BYTE = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.BYTE
_message = tuple.__new__  # what a NamedTuple's own constructor comes to, without its cost
_LOOKS = range(300)
"""How often a rank looks before it asks for the time and gives its core away: some 50 µs, which 64 KB need.
Where ranks outnumber cores, Open MPI itself gives the core away at each look."""
WHOLE_BYTES = 2048
"""A message of so many bytes has come with its announcement: receiving it cannot block."""
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
    communicator = current(group)
    if type(dst) is not int or not 0 <= dst < communicator.size:
        communicator.check_rank(dst, "send", "dst")
    if type(tag) is not int or not 0 <= tag <= LARGEST_TAG:
        check_tag(communicator, tag, "send")
    buffer = reading(x, communicator.who("send"))
    began = time.perf_counter_ns()
    moving = communicator.moving
    moving.append(buffer)
    try:
        # Begun and remembered within one call of a C function: an interrupt must not free memory that MPI still reads.
        moving.extend(starmap(communicator.mpi.Isend, ((buffer.spec, dst, tag * CODES + buffer.kind.code),)))
        request = moving[-1]
        test = request.Test
        for _ in _LOOKS:
            if test():
                del moving[-2:]
                clock.transfer_ns += time.perf_counter_ns() - began
                return
    except MPI.Exception as error:
        raise fault(communicator, "send", error) from error
    sending = Request(communicator, "send", buffer, dst, tag, request)
    del moving[-2:]
    sending.wait(timeout)


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
    communicator = current(group)
    if communicator.inbox.waiting:  # receives that were made before have the first choice
        request = _recv(communicator, x, src, tag, "recv")
        try:
            message = request.wait(timeout)
        except BaseException:
            request.give_up()
            raise
        assert message is not None
        return message
    if src is not None and (type(src) is not int or not 0 <= src < communicator.size):
        communicator.check_rank(src, "recv", "src")
    if tag is not None and (type(tag) is not int or not 0 <= tag <= LARGEST_TAG):
        check_tag(communicator, tag, "recv")
    buffer = writing(x, communicator.who("recv"))
    began = time.perf_counter_ns()
    try:
        message = _receive(communicator, buffer, src, tag, timeout)
    except MPI.Exception as error:
        raise fault(communicator, "recv", error) from error
    finally:
        clock.wait_ns += time.perf_counter_ns() - began
    if buffer.holder is not x:
        buffer.restore()
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
        if all(each.Test() for each in group.moving if isinstance(each, MPI.Request)):
            group.moving.clear()
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


def _receive(group: Communicator, buffer: Buffer, src: int | None, tag: int | None, timeout: float | None) -> Message:
    """Wait for the message, see whether it fits, and only then let MPI have the buffer."""
    kind, status, probe = buffer.kind, group.status, group.mpi.Iprobe
    source = _ANY_SOURCE if src is None else src
    wire_tag = _ANY_TAG if tag is None else tag * CODES + kind.code
    for _ in _LOOKS:
        if probe(source, wire_tag, status):
            break
    else:
        _wait_for_message(group, buffer, src, tag, timeout)
    source, wire_tag, nbytes = status.Get_source(), status.Get_tag(), status.Get_count(_BYTE)
    if KINDS[wire_tag % CODES] is not kind:
        raise wrong_kind(group, receiving("recv", src, tag, buffer), message_of(status), kind)
    if nbytes != buffer.count * kind.itemsize:
        raise wrong_length(group, receiving("recv", src, tag, buffer), message_of(status), buffer)
    if nbytes <= WHOLE_BYTES:
        group.mpi.Recv(buffer.spec, source, wire_tag)
    else:
        moving = group.moving
        moving.append(buffer)
        moving.extend(starmap(group.mpi.Irecv, ((buffer.spec, source, wire_tag),)))
        test = moving[-1].Test
        for _ in _LOOKS:
            if test():
                break
        else:
            until(test, lambda: _about(group, buffer, source, tag), timeout)
        del moving[-2:]  # an interrupt leaves them there: the message is received to the end
    return _message(Message, (source, wire_tag // CODES, buffer.count, nbytes, kind.name))


def _wait_for_message(
    group: Communicator, buffer: Buffer, src: int | None, tag: int | None, timeout: float | None
) -> None:
    """Wait until `group.status` tells of a message that this receive matches, or of one that shows it never will."""
    kind, status, probe = buffer.kind, group.status, group.mpi.Iprobe
    source = _ANY_SOURCE if src is None else src
    wire_tag = _ANY_TAG if tag is None else tag * CODES + kind.code

    def look() -> None:
        stranger = stranger_for(group, src, tag, kind)
        if stranger is not None:
            raise wrong_kind(group, receiving("recv", src, tag, buffer), stranger, kind)

    until(lambda: probe(source, wire_tag, status), lambda: _about(group, buffer, src, tag), timeout, look)


def _about(group: Communicator, buffer: Buffer, src: int | None, tag: int | None) -> Wait:
    return wait_for(group, "recv", src, tag, buffer, receiving("recv", src, tag, buffer))


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
