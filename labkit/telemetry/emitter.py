"""A rank's end of the wire: steps go out in batches and never make training wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import time

import numpy as np
import zmq

from .events import COLUMNS
from .wire import Header, encode

__all__ = ["Emitter"]

INTERVAL = 0.1
"""Seconds between two batches: the chart draws four times a second, so more often shows nothing more."""
HIGH_WATER = 1000
"""Batches that may wait for a slow or absent reader: 100 s of steps, about 1.3 MB at 200 steps a second."""
LINGER_MS = 1000
"""How long a closing rank lets the last batch go out."""


class Emitter:
    """Sends a rank's steps to the notebook.

    `log` appends to a list; about every 100 ms the list goes out as one message. A full queue drops the
    batch and counts its steps rather than block the training step.

    Parameters
    ----------
    address
        ZeroMQ address of the collector's metrics socket.
    rank
        This rank.
    interval
        Seconds between two batches.
    high_water
        Batches that may wait to be read before steps are dropped.
    on_begin
        Called by `begin_run` with the time the run began.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        interval: float = INTERVAL,
        high_water: int = HIGH_WATER,
        on_begin: Callable[[float], None] | None = None,
    ) -> None:
        self.rank = rank
        self.address = address
        self.sent = 0
        self.dropped = 0
        self._interval = interval
        self._on_begin = on_begin
        self._id = os.urandom(8)
        self._run = 0.0
        self._sequence = 0
        self._rows: list[tuple[float, ...]] = []
        self._flushed = time()
        self._due = self._flushed + interval
        self._lock = threading.Lock()
        # A context of its own: the engine's (Context.instance()) is not ours to close or to wait for.
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.sndhwm = high_water
            self._socket.linger = LINGER_MS
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"rank {rank}: cannot send steps to {address!r} ({error}); "
                "pass the addresses a Collector gives as .endpoints"
            ) from error

    def log(
        self,
        *,
        step: int,
        epoch: int = 0,
        loss: float = float("nan"),
        compute_s: float = 0.0,
        wait_s: float = 0.0,
        transfer_s: float = 0.0,
        samples: int = 0,
    ) -> None:
        """Note one step; see `labkit.telemetry.Step` for the meaning and the units of each number."""
        now = time()
        self._rows.append((step, epoch, now, float(loss), compute_s, wait_s, transfer_s, samples))
        # Before the last batch as well as after the next: a clock set back must not silence the chart.
        if not self._flushed <= now < self._due:
            self._send(now, wait_ms=0)

    def begin_run(self, run: float | None = None) -> float:
        """Say that a new run begins: the chart starts afresh and earlier clicks no longer count.

        Parameters
        ----------
        run
            When the run began, in seconds since the epoch; default: now. Where the clocks of hosts differ,
            pass what rank 0's call returned to the others, so that all ranks name the same run.

        Returns
        -------
        float
            When the run began.
        """
        self.flush()
        self._run = time() if run is None else run
        if self._on_begin is not None:
            self._on_begin(self._run)
        self._send(time(), wait_ms=0, empty=True)
        return self._run

    def flush(self, timeout: float = 1.0) -> None:
        """Send what is left, waiting at most `timeout` seconds for room; call it when training ends."""
        self._send(time(), wait_ms=int(timeout * 1000))

    def close(self) -> None:
        """Send what is left and close, within about a second."""
        self._send(time(), wait_ms=0)
        with self._lock:
            if not self._context.closed:
                self._context.destroy(linger=LINGER_MS)

    @property
    def closed(self) -> bool:
        """Whether the emitter was closed; steps logged afterwards count as dropped."""
        return bool(self._context.closed)

    def _send(self, now: float, wait_ms: int, empty: bool = False) -> None:
        with self._lock:
            self._flushed, self._due = now, now + self._interval
            rows, self._rows = self._rows, []
            count = len(rows)
            if not (count or empty):
                return
            # Counted as dropped until the message is away, so that an interrupt in between loses no count.
            dropped = self.dropped
            self.dropped += count
            if self._context.closed or not self._room(wait_ms):
                return
            table = np.array(rows, dtype=np.float64).reshape(count, len(COLUMNS))
            header = Header(self._id, self.rank, count, self._sequence, self.sent + count, dropped, self._run)
            try:
                self._socket.send_multipart(encode(header, table), zmq.NOBLOCK)
            except zmq.Again:
                return
            self._sequence += 1
            self.dropped -= count
            self.sent += count

    def _room(self, wait_ms: int) -> bool:
        return wait_ms <= 0 or bool(self._socket.poll(wait_ms, zmq.POLLOUT))
