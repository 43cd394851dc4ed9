"""The one wait: it can be interrupted, has a deadline, and can say what it waits for.

A blocking MPI call never returns to Python, so Ctrl-C and deadlines cannot reach it. Here every wait is a loop around
a non-blocking call's `Test`, which yields the core at first (short waits stay short) and then sleeps (long waits cost
next to nothing).
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from labkit.comm.errors import ArgumentError, DeadlineError
from labkit.telemetry.states import Wait

__all__ = [
    "Spent",
    "Wait",
    "clock",
    "deadline",
    "is_cell",
    "main_frame",
    "on_deadline",
    "place",
    "progress",
    "spent",
    "until",
    "waiting_now",
]

SPIN_S = 0.002
"""Time during which a wait only yields the core: shorter waits see no sleep's latency."""
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 50e-6, 5e-3
SLEEP_SHARE = 0.05
"""A sleep lasts this share of the time waited so far, so a late wake-up lengthens a wait by at most 5 %."""


class Spent(NamedTuple):
    """Seconds this rank has spent in labkit's calls since it started.

    `wait_s` is time until all ranks were in the same collective, or until a message came; `transfer_s` is time in
    which data moved (collectives after that point, and sends).
    """

    wait_s: float
    transfer_s: float


class _Clock:
    """Nanoseconds spent so far, and what the rank does at this moment. Plain attributes: they are on the fast path."""

    __slots__ = ("about", "began_ns", "broken", "deadline", "raw", "transfer_ns", "wait_ns")

    def __init__(self) -> None:
        self.wait_ns = 0
        self.transfer_ns = 0
        self.about: Callable[[], Wait] | None = None
        self.began_ns = 0
        self.deadline = math.inf
        self.raw: Any = None
        """The raw mpi4py call that the main thread is in (see `labkit.comm.watched`)."""
        self.broken: DeadlineError | None = None
        """Why that call was ended from another thread."""


clock = _Clock()

progress: list[Callable[[], None]] = []
"""What every wait must drive on meanwhile: receives that were begun and have no message yet."""

on_deadline: list[Callable[[], None]] = []
"""Called when a deadline was set: raw calls cannot watch the clock themselves."""


def spent() -> Spent:
    """Seconds this rank has spent waiting for others and moving data so far (take differences)."""
    return Spent(clock.wait_ns * 1e-9, clock.transfer_ns * 1e-9)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Let every wait inside the block raise `DeadlineError` once `seconds` have passed since its start.

    Deadlines nest: the nearest one counts. A collective across hosts gives up no sooner than 50 ms after it began.
    """
    if not seconds >= 0:
        raise ArgumentError(f"deadline({seconds!r}): give a number of seconds ≥ 0")
    outer = clock.deadline
    clock.deadline, clock.broken = min(outer, time.perf_counter() + seconds), None
    for tell in on_deadline:
        tell()
    try:
        yield
    finally:
        clock.deadline = outer
        broken, clock.broken = clock.broken, None
    if broken is not None:  # MPI may let a send that was ended return as if it had been received
        raise broken


def until(
    test: Callable[[], object],
    about: Callable[[], Wait],
    timeout: float | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Return as soon as ``test()`` is true.

    Parameters
    ----------
    test
        Usually a request's `Test`.
    about
        Makes the `Wait` that says what is awaited; called only when somebody asks.
    timeout
        Seconds from now; the surrounding `deadline` counts as well.
    look
        Called between sleeps; may raise if it sees that the wait can never end.

    Raises
    ------
    DeadlineError
        When the time is over, and not within the first 2 ms.
    """
    if test():
        return
    outer_about, outer_began = clock.about, clock.began_ns
    began_ns = time.perf_counter_ns()
    clock.about, clock.began_ns = about, began_ns
    try:
        spin_until = began_ns + int(SPIN_S * 1e9)
        while time.perf_counter_ns() < spin_until:
            if test():
                return
            if progress:
                _drive()
            os.sched_yield()
        began = began_ns * 1e-9
        limit = clock.deadline if timeout is None else min(clock.deadline, began + timeout)
        while not test():
            _drive()
            if look is not None:
                look()
            now = time.perf_counter()
            if now >= limit:
                raise DeadlineError(_overdue(about(), now - began))
            pause = min(LONGEST_SLEEP_S, max(SHORTEST_SLEEP_S, SLEEP_SHARE * (now - began)))
            time.sleep(min(pause, max(limit - now, 0.0)))
    finally:
        clock.about, clock.began_ns = outer_about, outer_began


def _drive() -> None:
    for advance in tuple(progress):
        advance()


def waiting_now() -> Wait | None:
    """What this rank is in at this moment, or None. May be asked from another thread while the main thread waits."""
    raw, about, began_ns = clock.raw, clock.about, clock.began_ns
    if raw is not None:
        wait: Wait = raw[0](raw)
        return replace(wait, place=place(main_frame()))
    if about is None:
        return None
    waited = (time.perf_counter_ns() - began_ns) * 1e-9
    return replace(about(), since=time.time() - waited, place=place(main_frame()))


def main_frame() -> FrameType | None:
    """The frame that the main thread is in."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_cell(frame: FrameType) -> bool:
    """Whether the frame is of code typed into a notebook's cell."""
    name = frame.f_code.co_filename
    return name.startswith("<ipython-input") or f"{os.sep}ipykernel_" in name


def place(frame: FrameType | None = None) -> str:
    """The user's innermost line: ``file.py:12``, or ``cell line 4`` in a notebook.

    Lines of labkit, of installed packages and of Python's own library are the user's only if there is nothing else.
    """
    inner = frame if frame is not None else sys._getframe(1)
    at: FrameType | None = inner
    while at is not None and at.f_code.co_filename.startswith(_NOT_THE_USERS):
        at = at.f_back
    if at is None or at.f_code.co_filename.startswith("<frozen"):
        at = inner
        while at.f_back is not None and at.f_code.co_filename.startswith(_NOT_THE_USERS[0]):
            at = at.f_back
    name, line = at.f_code.co_filename, at.f_lineno
    if is_cell(at):
        return f"cell line {line}"
    return f"{os.path.basename(name)}:{line}"


_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *{sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")},
)


def _overdue(wait: Wait, waited: float) -> str:
    if wait.peer is not None:
        cure = f"Let rank {wait.peer} make the matching call, check the tag, or allow more time."
    elif wait.operation in ("recv", "irecv", "probe", "recv_object"):
        cure = "Let some rank send to this one, check the tag, or allow more time."
    else:
        cure = (
            "Let every rank of the communicator make this call. "
            "Then run comm.renew() on every rank before the next collective."
        )
    where = place()
    return (
        f"rank {wait.rank} waited {waited:.2g} s in {wait.text} on communicator '{wait.communicator}' ({where}) "
        f"and gave up: its timeout is over. {cure}"
    )
