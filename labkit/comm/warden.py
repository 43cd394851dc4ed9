"""The thread that answers for a rank whose main thread computes or is blocked, and that frees it.

It listens on a socket file in the lab's private folder. A question is a JSON object ``{"id": …, "do": …}``, its answer
``{"id": …, "rank": …, "answer": …}``:

- ``state``: what the rank is doing (`labkit.telemetry.RankState`);
- ``stack``: where its main thread is, line by line;
- ``interrupt``: Ctrl-C in its main thread, if a cell is running there;
- ``free``: this rank's communicators are revoked (MPI's user-level fault mitigation), so that a call that is blocked
  inside MPI returns. To be asked after ``interrupt``: Ctrl-C is then what that call ends with. The communicators must
  be replaced afterwards: `renew`.

It also ends a raw MPI call in which a `deadline` passes. While there is nothing to do it sleeps. It needs the
interpreter lock to answer: a rank in C code that keeps the lock is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from labkit.comm import watched
from labkit.comm.communicator import communicators, rank_and_size
from labkit.comm.mpi import MPI, REVOKES
from labkit.comm.states import running, state
from labkit.comm.waiting import clock, is_cell, main_frame, on_deadline

__all__ = ["start", "stop"]

PROGRESS_S = 2.0
"""How long MPI is driven after a revocation: a rank that is not in MPI makes no progress by itself."""
PROGRESS_PERIOD_MS = 2
OVERDUE_PERIOD_MS = 20

_warden: _Warden | None = None


def start(path: str) -> None:
    """Let this rank answer at the socket file `path`. A second call does nothing while the first one's thread lives."""
    global _warden
    if _warden is None or not _warden.is_alive():
        _warden = _Warden(path)
        _warden.start()
        on_deadline[:] = [_warden.wake]


@atexit.register
def stop() -> None:
    """End the thread and remove its socket file."""
    global _warden
    if _warden is not None:
        on_deadline.clear()
        _warden.end()
        _warden = None


class _Warden(threading.Thread):
    """The thread; everything below `run` happens in it."""

    def __init__(self, path: str) -> None:
        super().__init__(name="labkit warden", daemon=True)
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._drive_until = 0.0
        self._actions: dict[str, Callable[[], Any]] = {
            "state": self._state,
            "stack": stack,
            "interrupt": interrupt,
            "free": self._free,
        }

    def wake(self) -> None:
        """Look at once whether there is something to do."""
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Leave the loop."""
        self._ending = True
        self.wake()
        self.join(timeout=2)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def run(self) -> None:
        """Answer until the process ends."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._ending:
            ready = dict(poller.poll(self._pause_ms()))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            if self._socket in ready:
                self._answer()
            if time.perf_counter() >= clock.deadline and revokes() and watched.break_overdue():
                self._drive_until = time.monotonic() + PROGRESS_S
            if time.monotonic() < self._drive_until:
                drive()
        self._socket.close()
        self._context.term()

    def _pause_ms(self) -> int | None:
        """How long to sleep at most: briefly while MPI must be driven, to the next deadline, or for ever."""
        if time.monotonic() < self._drive_until:
            return PROGRESS_PERIOD_MS
        left = clock.deadline - time.perf_counter()
        return None if left == math.inf else max(OVERDUE_PERIOD_MS, int(left * 1e3) + 1)

    def _answer(self) -> None:
        client, *_, body = self._socket.recv_multipart()
        try:
            question = json.loads(body)
            action = self._actions[question["do"]]
        except (ValueError, KeyError, TypeError):
            return  # not ours; whoever asked gets no answer
        try:
            answer = action()
        except Exception as error:  # the thread must live on; the rank is then shown as one that does not answer
            logging.getLogger("labkit").warning("no answer to %r", question["do"], exc_info=error)
            return
        reply = {"id": question.get("id"), "rank": rank_and_size()[0], "answer": answer}
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([client, json.dumps(reply).encode()], zmq.NOBLOCK)

    def _state(self) -> dict[str, Any]:
        if not running.busy:  # nobody else lets messages of this rank go on
            drive()
        return state().as_json()

    def _free(self) -> bool:
        revoked = revoke()
        self._drive_until = time.monotonic() + PROGRESS_S
        return revoked


def interrupt() -> bool:
    """Ctrl-C in the main thread, if it is in a cell's code; says whether it is.

    Before and after that code IPython is at work, and a Ctrl-C would cost the error message it is about to write.
    """
    frame = main_frame()
    while frame is not None and not is_cell(frame):
        frame = frame.f_back
    main = threading.main_thread().ident
    if frame is None or main is None:
        return False
    signal.pthread_kill(main, signal.SIGINT)
    return True


def revokes() -> bool:
    """Whether a call that is blocked inside MPI can be ended from another thread."""
    return REVOKES and bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def revoke() -> bool:
    """Let every call on this rank's communicators fail, here and on their other ranks; False where MPI cannot do it."""
    if not revokes():
        return False
    for group in communicators():
        for mpi in (group.mpi, group.private):
            with contextlib.suppress(MPI.Exception):
                if not mpi.Is_revoked():
                    mpi.Revoke()
    watched.revoke()
    return True


def drive() -> None:
    """Let MPI handle what has arrived."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_SELF.Iprobe()


def stack() -> list[str]:
    """The main thread's frames, outermost first, as Python prints them."""
    frame = main_frame()
    return traceback.format_stack(frame) if frame is not None else []
