"""Sends and receives under way, and what they say when something does not fit.

The element type travels in the tag: MPI's tag is ``32 * tag + code of the dtype``. A receive of float64 therefore
never takes the bytes of an int64 message, and a rank that waits for a dtype that will not come can say so.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from labkit.comm.buffers import KINDS, OBJECT, Buffer, Kind
from labkit.comm.communicator import Communicator
from labkit.comm.errors import CommError, MismatchError
from labkit.comm.lost import fault
from labkit.comm.mpi import MPI
from labkit.comm.retired import ended
from labkit.comm.waiting import Wait, clock, place, until

__all__ = [
    "CODES",
    "Message",
    "Receive",
    "Request",
    "find",
    "message_of",
    "plain",
    "raw_buffer",
    "receiving",
    "stranger_for",
    "wait_for",
    "wrong_kind",
    "wrong_length",
]

CODES = 32
_SENDS = ("send", "isend", "send_object")
_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG


class Message(NamedTuple):
    """A message that has come: who sent it, under which tag, and how much it holds."""

    src: int
    tag: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    """Number of elements."""
    nbytes: int
    dtype: str = ""


class Request:
    """A send or receive under way. Call `wait` before touching the tensor."""

    def __init__(
        self, group: Communicator, operation: str, buffer: Buffer, peer: int | None, tag: int | None, request: Any
    ) -> None:
        self._group = group
        self._operation = operation
        self._buffer = buffer
        self._peer = peer
        self._tag = tag
        self._request = request
        """MPI's request; None for a receive that has no message yet."""
        self._message: Message | None = None
        self._error: CommError | None = None
        self._over = False
        group.in_flight.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._text()}: {'over' if self._over else 'under way'}>"

    @property
    def done(self) -> bool:
        """Whether it is over. Asking also lets MPI make progress."""
        return self.test()

    def test(self) -> bool:
        """Whether it is over, without waiting. True also means that a received tensor is filled.

        Raises
        ------
        MismatchError
            When the message does not fit the tensor.
        """
        if not self._over:
            self._group.check()
            if self._poll():
                self._finish()
        if self._error is not None:
            raise self._error
        return self._over

    def wait(self, timeout: float | None = None) -> Message | None:
        """Wait until it is over; return what came, or None for a send. A deadline leaves the request under way."""
        if not self._over:
            self._group.check()
            began = time.perf_counter_ns()
            try:
                until(self._poll, self.about, timeout, self._look)
            finally:
                self._account(time.perf_counter_ns() - began)
            self._finish()
        if self._error is not None:
            raise self._error
        return self._message

    def give_up(self) -> None:
        """Stop waiting. A send cannot be taken back: its memory is kept until MPI has done with it."""

    def ended(self) -> bool:
        """Whether MPI has done with its memory; for requests that nobody waits for any more."""
        return self._request is None or ended(self._request)

    def sweep(self) -> None:
        """Forget a finished send that nobody waits for."""
        if self._poll():
            self._finish()

    def about(self) -> Wait:
        """What this request waits for."""
        return wait_for(self._group, self._operation, self._peer, self._tag, self._buffer, self._text())

    def _text(self) -> str:
        return f"{self._operation}(dst={self._peer}, tag={self._tag}, {self._buffer.kind.name} × {self._buffer.count})"

    def _account(self, nanoseconds: int) -> None:
        clock.transfer_ns += nanoseconds

    def _poll(self) -> bool:
        try:
            return bool(self._request.Test())
        except MPI.Exception as error:
            self._error = fault(self._group, self._operation, error)
            return True

    def _look(self) -> None:
        """Asked in a long wait: can it still end well?"""

    def _finish(self) -> None:
        self._over = True
        self._group.in_flight.discard(self)


class Receive(Request):
    """A receive under way; MPI sees it as soon as its message is there and fits (see `labkit.comm.inbox`)."""

    def __init__(self, group: Communicator, operation: str, buffer: Buffer, src: int | None, tag: int | None) -> None:
        super().__init__(group, operation, buffer, src, tag, None)
        self.source = _ANY_SOURCE if src is None else src
        self.wire_tag = _ANY_TAG if tag is None else tag * CODES + buffer.kind.code
        try:
            group.inbox.add(self)
        except MPI.Exception as error:
            raise fault(group, operation, error) from error

    def take(self, status: MPI.Status) -> None:
        """Let MPI receive the message that `status` tells of, or fail if it does not fit."""
        message, buffer = message_of(status), self._buffer
        if KINDS[status.Get_tag() % CODES] is not buffer.kind:
            self._error = wrong_kind(self._group, self._text(), message, buffer.kind)
        elif message.nbytes != buffer.nbytes:
            self._error = wrong_length(self._group, self._text(), message, buffer)
        else:
            self._message = message
            self._request = self._group.mpi.Irecv(buffer.spec, message.src, status.Get_tag())

    def give_up(self) -> None:
        """Stop waiting for a message; one that is arriving already is received to the end."""
        if self._request is None:
            self._group.inbox.remove(self)
            self._group.in_flight.discard(self)

    def sweep(self) -> None:
        """Receives stay: somebody will want their message."""

    def _text(self) -> str:
        return receiving(self._operation, self._peer, self._tag, self._buffer)

    def _account(self, nanoseconds: int) -> None:
        clock.wait_ns += nanoseconds

    def _poll(self) -> bool:
        try:
            if self._request is None:
                if self._error is None:
                    self._group.inbox.advance()
                if self._request is None:
                    return self._error is not None
            return bool(self._request.Test())
        except MPI.Exception as error:
            self._error = fault(self._group, self._operation, error)
            return True

    def _look(self) -> None:
        if self._request is None and self._error is None:
            stranger = stranger_for(self._group, self._peer, self._tag, self._buffer.kind)
            if stranger is not None:
                self._group.inbox.remove(self)
                self._error = wrong_kind(self._group, self._text(), stranger, self._buffer.kind)

    def _finish(self) -> None:
        super()._finish()
        if self._error is None:
            self._buffer.restore()
        else:
            self._group.inbox.remove(self)


def message_of(status: MPI.Status) -> Message:
    """What `status` says, in labkit's terms."""
    tag, code = divmod(status.Get_tag(), CODES)
    kind, nbytes = KINDS[code], status.Get_count(MPI.BYTE)
    return Message(status.Get_source(), tag, nbytes // kind.itemsize, nbytes, kind.name)


def find(group: Communicator, src: int | None, tag: int | None) -> MPI.Status | None:
    """The first waiting message from `src` under `tag` (None: any), whatever its dtype."""
    status = MPI.Status()
    source = _ANY_SOURCE if src is None else src
    if not group.mpi.Iprobe(source, _ANY_TAG, status):
        return None
    if tag is None or status.Get_tag() // CODES == tag:
        return status
    for code in KINDS:
        if group.mpi.Iprobe(source, tag * CODES + code, status):
            return status
    return None


def stranger_for(group: Communicator, src: int | None, tag: int | None, kind: Kind) -> Message | None:
    """A waiting message that a receive under `tag` will never take, since it has another dtype."""
    if tag is None:
        return None
    status = find(group, src, tag)
    if status is None or status.Get_tag() % CODES == kind.code:
        return None
    return message_of(status)


def wrong_length(group: Communicator, text: str, message: Message, buffer: Buffer) -> MismatchError:
    """The error for a message of another size than the tensor that is to take it."""
    return MismatchError(
        f"rank {group.rank}, {text} ({place()}): the tensor holds {buffer.nbytes} bytes "
        f"(shape {tuple(buffer.shape)}), but rank {message.src} sent {message.nbytes} bytes "
        f"({message.count} × {message.dtype}, tag {message.tag}). "
        "Send and receive tensors of the same size; probe() tells the size beforehand. "
        "The message is still there for a receive that fits."
    )


def wrong_kind(group: Communicator, text: str, message: Message, kind: Kind) -> MismatchError:
    """The error for a message of another dtype than the one expected."""
    if message.dtype == OBJECT.name:
        cure = "Receive it with recv_object()."
    elif kind is OBJECT:
        cure = "Receive it with recv()."
    else:
        cure = "Use one dtype on both sides, as in x.to(torch.float32)."
    return MismatchError(
        f"rank {group.rank}, {text} ({place()}): expects {kind.name}, but rank {message.src} sent "
        f"{message.dtype} × {message.count} ({message.nbytes} bytes, tag {message.tag}). {cure}"
    )


def wait_for(
    group: Communicator, operation: str, peer: int | None, tag: int | None, buffer: Buffer | None, text: str
) -> Wait:
    """What a message call waits for, as `waiting_now` tells it."""
    return Wait(
        operation,
        group.rank,
        "send" if operation in _SENDS else "receive",
        communicator=group.name,
        members=group.members,
        peer=peer,
        peer_in_world=None if peer is None else group.members[peer],
        tag=tag,
        count=None if buffer is None else buffer.count,
        dtype=None if buffer is None else buffer.kind.name,
        text=text,
    )


def raw_buffer(data: bytes | bytearray) -> Buffer:
    """A pickle as a buffer."""
    return Buffer(data, data, OBJECT, (len(data),), len(data), [data, len(data), OBJECT.mpi])


def plain(operation: str, src: int | None, tag: int | None) -> str:
    """A receive or probe as a reader would write it."""
    return f"{operation}(src={'any' if src is None else src}, tag={'any' if tag is None else tag})"


def receiving(operation: str, src: int | None, tag: int | None, buffer: Buffer) -> str:
    """A receive into `buffer` as a reader would write it."""
    return plain(operation, src, tag)[:-1] + f", {buffer.kind.name} × {buffer.count})"
