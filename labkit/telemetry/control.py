"""A rank's ear for the notebook's Stop button and learning-rate slider."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import zmq

from .wire import MalformedMessageError, decode_control

__all__ = ["ControlReader", "ControlState"]

POLL_INTERVAL = 0.02
"""Seconds between two looks at the socket: a look costs some µs, and nobody clicks faster."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """What the notebook asks of the training.

    Attributes
    ----------
    stop
        Whether to stop after this step.
    lr
        The learning rate asked for; None: as the cell set it.
    """

    stop: bool = False
    lr: float | None = None


class ControlReader:
    """Reads the newest wish of the notebook; only rank 0 listens, and tells the others by a broadcast.

    Parameters
    ----------
    address
        ZeroMQ address of the collector's control socket; None (the ranks other than 0): hears nothing.
    """

    def __init__(self, address: str | None) -> None:
        self.malformed = 0
        self._state = ControlState()
        self._made = 0.0
        self._begun = 0.0
        self._next = 0.0
        self._socket: zmq.Socket[bytes] | None = None
        if address is None:
            return
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.linger = 0
            # Only the newest wish matters: without it a rank busy for a minute would act on the oldest.
            self._socket.setsockopt(zmq.CONFLATE, 1)
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"cannot listen for controls at {address!r} ({error}); "
                "pass the addresses a Collector gives as .endpoints"
            ) from error

    def latest(self) -> ControlState:
        """Return what the notebook asks now; cheap enough for every step (looks 50 times a second)."""
        now = monotonic()
        if self._socket is not None and now >= self._next:
            self._next = now + POLL_INTERVAL
            self._read(self._socket)
        return self._state if self._made >= self._begun else ControlState()

    def begin_run(self, begun: float) -> None:
        """Forget what was asked before `begun` (seconds since the epoch): it was meant for another run."""
        self._begun = begun
        self._next = 0.0

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._context.destroy(linger=0)
            self._socket = None

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        try:
            stop, lr, made = decode_control(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        except MalformedMessageError:
            self.malformed += 1
            return
        self._state, self._made = ControlState(stop, lr), made
