"""Nothing of a lab is left when its controller, its launcher or its owner ends unexpectedly.

A small process of its own, the guard, waits for that and then removes the rest of the lab: it outlives a kernel that is
killed, and is there before the first process that it may have to end.  In each notebook a thread waits for the same
and tells its user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from labkit.cluster.processes import ProcessMark
from labkit.cluster.sessions import Session

__all__ = ["Alarm", "main", "post"]

# How soon the guard looks again at the record of a lab that is just starting or stopping; one that is up costs nothing.
AGAIN_S = 0.1
# Where the kernel cannot tell that a process ended (Linux before 5.3).
POLL_S = 0.5

_posted: list[subprocess.Popen[bytes]] = []


def post(session: Session) -> None:
    """Start the guard of `session` and put it on record."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "labkit.cluster.guard", str(session.folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to the notebook's group is not for the guard
    )
    _posted[:] = [earlier for earlier in _posted if earlier.poll() is None] + [guard]
    session.guard = ProcessMark.of(guard.pid, "guard")
    session.save()


def main(folder: Path) -> None:
    """The guard's whole life."""
    while session := Session.load(folder):
        if session.closing and session.closing.process():
            time.sleep(AGAIN_S)  # an orderly end; should it break off, the rest is ours
        elif any(mark.process() is None for mark in pillars(session)):
            session.remove(grace_s=1.0)
            return
        else:
            await_fall(session, None if session.ready else AGAIN_S)


def pillars(session: Session) -> list[ProcessMark]:
    """The processes without which the lab cannot stand."""
    if not session.ready:
        return [session.owner]  # it sees by itself when the start fails, and says why
    needed = [mark for mark in (session.mark("controller"), session.mark("mpiexec")) if mark]
    return needed if session.detached else [session.owner, *needed]


def await_fall(session: Session, limit_s: float | None, wake: int | None = None) -> ProcessMark | None:
    """Wait until one of the pillars ends; None after `limit_s` seconds, or when `wake` can be read."""
    marks = pillars(session)
    poll = select.poll()
    if wake is not None:
        poll.register(wake, select.POLLIN)
    with contextlib.ExitStack() as opened:
        opens = True
        for mark in marks:
            try:
                descriptor = os.pidfd_open(mark.pid)
            except OSError as error:
                opens = opens and error.errno == errno.ESRCH
            else:
                opened.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
        turn_s = None if opens else POLL_S
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            fallen = next((mark for mark in marks if mark.process() is None), None)
            left_s = None if deadline is None else deadline - time.monotonic()
            if fallen or (left_s is not None and left_s <= 0):
                return fallen
            waits = [seconds for seconds in (turn_s, left_s) if seconds is not None]
            events = poll.poll(min(waits) * 1000 if waits else None)
            if any(descriptor == wake for descriptor, _ in events):
                return None


class Alarm:
    """A thread that tells when the lab ends without having been stopped from here.

    Parameters
    ----------
    session
        The lab's record; its start is over.
    on_end
        Called in that thread, once, with a sentence: what ended, and the cure.

    Attributes
    ----------
    reason
        That sentence as soon as the lab has ended, None before: a cell that waits can look at it at no cost.
    """

    def __init__(self, session: Session, on_end: Callable[[str], None]) -> None:
        self.reason: str | None = None
        self._session = session
        self._on_end = on_end
        self._asleep, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="labkit-alarm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        gone = await_fall(self._session, None, self._asleep)
        if gone is None:
            return
        now = Session.load(self._session.folder)
        guarded = now is not None and now.guard is not None and now.guard.process() is not None
        stopped_by = now.closing if now and now.closing != now.guard else None
        if gone == self._session.owner:
            cause = f"its notebook (process {gone.pid}) ended"
        elif stopped_by is not None:
            cause = f"process {stopped_by.pid} stopped it"
        else:
            cause = f"its {gone.role} (process {gone.pid}) ended"
        self.reason = f"The lab has ended: {cause}. The rest of it is removed. Cure: lab.restart()"
        self._on_end(self.reason)
        if not guarded and stopped_by is None:  # a lab of JupyterLab's cluster tab has no guard
            self._session.remove(grace_s=1.0)

    def stop(self) -> None:
        """Wait no longer; the lab is about to be stopped in an orderly way."""
        if self._wake < 0:
            return
        os.close(self._wake)  # the other end reads as closed, and the thread wakes
        self._wake = -1
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._asleep)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
