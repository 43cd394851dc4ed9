"""The notebook's end of the wire: a thread that reads steps and passes wishes on."""

from __future__ import annotations

import math
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from time import time

import zmq

from .store import Store
from .wire import Endpoints, decode, encode_control

__all__ = ["Collector", "Counts"]

HIGH_WATER = 10_000
"""Batches that may wait in the kernel: minutes of a busy notebook."""
DRAIN_AT_ONCE = 1000
"""Batches read before the reader looks for wishes again."""
LONGEST_PATH = 100
"""A Unix socket's path has room for 107 bytes on Linux and 103 on macOS; ZeroMQ would only say
"name too long"."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many steps came through.

    Attributes
    ----------
    announced
        Steps that ranks say they put on the wire.
    received
        Steps that arrived.
    dropped
        Steps that ranks could not send because the queue was full.
    malformed
        Messages that were not ours, or broken.
    """

    announced: int
    received: int
    dropped: int
    malformed: int

    @property
    def lost(self) -> int:
        """Steps announced that never arrived: 0 unless a connection broke."""
        return self.announced - self.received


class Collector:
    """Reads all ranks' steps into `store` and sends the notebook's wishes to rank 0.

    Parameters
    ----------
    ranks
        Ranks in the world.
    folder
        A folder only its owner may enter, for the two Unix sockets; made (mode 0700) if missing.
    host
        Bind two free TCP ports at this address instead, for ranks on other hosts.
    capacity
        Steps kept for each rank, see `Store`.

    Raises
    ------
    ValueError
        If the folder's path is too long for a Unix socket.
    PermissionError
        If others may enter the folder.
    """

    def __init__(
        self, ranks: int, folder: str | os.PathLike[str], *, host: str | None = None, capacity: int = 4096
    ) -> None:
        self.store = Store(ranks, capacity)
        self.error: BaseException | None = None
        self._counts: dict[bytes, list[int]] = {}  # by emitter: announced, received, dropped
        self._malformed = 0
        self._wish = encode_control(False, None, 0.0)
        self._paths: list[Path] = []
        addresses = self._addresses(Path(folder), host)
        self._context = zmq.Context()
        try:
            self._metrics = self._context.socket(zmq.PULL)
            self._metrics.rcvhwm = HIGH_WATER
            self._metrics.bind(addresses[0])
            # XPUB tells when somebody subscribes: a wish made before rank 0 was there is then sent again.
            self._control = self._context.socket(zmq.XPUB)
            self._control.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._control.linger = 0
            self._control.bind(addresses[1])
            self.endpoints = Endpoints(_bound(self._metrics), _bound(self._control))
            # Sockets belong to the reader's thread; others wake it through this pair.
            self._wakeup, self._woken = self._pair()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"cannot listen at {addresses[0]}: {error}") from error
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="labkit-collector", daemon=True)
        self._thread.start()

    def send_control(self, stop: bool = False, lr: float | None = None) -> None:
        """Tell rank 0 to stop, or to train on with another learning rate; safe from any thread.

        Raises
        ------
        ValueError
            If the learning rate is not a finite number above 0.
        RuntimeError
            If the collector is closed.
        """
        if lr is not None and not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the learning rate must be a finite number above 0, not {lr}")
        with self._lock:
            if self._closed:
                raise RuntimeError("the collector is closed; open a new one with labkit.live()")
            self._wish = encode_control(stop, lr, time())
            self._wakeup.send(b"wish")

    @property
    def counts(self) -> Counts:
        """Steps announced, received and dropped, over all ranks and all runs."""
        totals = [sum(column) for column in zip(*list(self._counts.values()), strict=True)] or [0, 0, 0]
        return Counts(totals[0], totals[1], totals[2], self._malformed)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Read what has arrived, then close the sockets and remove them; harmless the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wakeup.send(b"close")
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)
        for path in self._paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _addresses(self, folder: Path, host: str | None) -> tuple[str, str]:
        if host is not None:
            return f"tcp://{host}:*", f"tcp://{host}:*"
        folder = folder.absolute()
        # A name of its own: ZeroMQ takes over a path that is in use without a word.
        token = secrets.token_hex(3)
        self._paths = [folder / f"m-{token}", folder / f"c-{token}"]
        length = len(os.fsencode(self._paths[0]))
        if length >= LONGEST_PATH:
            raise ValueError(
                f"the socket path {self._paths[0]} has {length} bytes, a Unix socket takes less than "
                f"{LONGEST_PATH}: choose a shorter folder, such as one that tempfile.mkdtemp() makes"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
        if mode & 0o077:
            raise PermissionError(f"{folder} has mode {mode:o}: others could send steps or read them; chmod 700 it")
        return f"ipc://{self._paths[0]}", f"ipc://{self._paths[1]}"

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        sending, receiving = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        sending.linger = receiving.linger = 0
        receiving.bind("inproc://wakeup")
        sending.connect("inproc://wakeup")
        return sending, receiving

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for socket in (self._metrics, self._control, self._woken):
                poller.register(socket, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._metrics in ready:
                    self._drain()
                if self._control in ready:
                    self._control.recv()
                    self._control.send(self._wish)
                if self._woken in ready:
                    if self._woken.recv() == b"close":
                        self._drain()
                        return
                    self._control.send(self._wish)
        except Exception as error:  # shown by the chart's status line and by whoever asks
            self.error = error

    def _drain(self) -> None:
        # Not without end: a flood of steps must not keep a click waiting.
        for _ in range(DRAIN_AT_ONCE):
            try:
                self._take(self._metrics.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _take(self, frames: list[bytes]) -> None:
        try:
            header, rows = decode(frames)
            self.store.add(header.rank, rows, header.run)
        except ValueError:  # MalformedMessageError, or a rank outside the world
            self._malformed += 1
            return
        counts = self._counts.setdefault(header.emitter, [0, 0, 0])
        counts[0] = max(counts[0], header.sent)
        counts[1] += header.steps
        counts[2] = max(counts[2], header.dropped)
        self.store.dropped = sum(count[2] for count in self._counts.values())


def _bound(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
