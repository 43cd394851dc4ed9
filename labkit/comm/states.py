"""What this rank is doing, put together for whoever asks: usually a thread, while the main thread is busy."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from labkit.comm import surviving, watched
from labkit.comm.communicator import communicators, rank_and_size
from labkit.comm.requests import Request
from labkit.comm.torch_calls import torch_wait
from labkit.comm.waiting import clock, main_frame, place, waiting_now
from labkit.telemetry.states import RankState, Wait

__all__ = ["follow_cells", "running", "state"]


class _Running:
    """The cell that runs. A program that mpiexec started is one cell from its beginning to its end."""

    def __init__(self) -> None:
        self.cell = 1
        self.busy = True
        self.since = time.time()

    def begin(self, *_: Any) -> None:
        """A cell begins."""
        self.cell, self.busy, self.since = self.cell + 1, True, time.time()

    def end(self, *_: Any) -> None:
        """The cell is over."""
        self.busy, self.since = False, time.time()


running = _Running()


def follow_cells() -> None:
    """In an engine: know from IPython when a cell begins and ends."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or running.begin in shell.events.callbacks["pre_run_cell"]:
        return
    running.cell, running.busy = 0, False
    shell.events.register("pre_run_cell", running.begin)
    shell.events.register("post_run_cell", running.end)


def state() -> RankState:
    """What this rank is doing now. Costs nothing until it is asked."""
    rank = rank_and_size()[0]
    entered: dict[str, int] = {}
    history: dict[str, tuple[str, ...]] = {}
    under_way: list[Wait] = []
    for group in communicators():
        entered[group.name], history[group.name] = group.sequence, group.history
        under_way += [request.about() for request in tuple(group.in_flight) if isinstance(request, Request)]
    under_way += watched.under_way()
    for name, (count, signatures) in watched.entered().items():
        entered[name], history[name] = count, signatures
    frame = main_frame()
    wait, serial = waiting_now(), clock.began_ns
    if wait is None and "torch.distributed" in sys.modules:
        wait = torch_wait(frame, rank)
    if not running.busy:
        wait = None
    return RankState(
        rank,
        os.getpid(),
        "idle" if not running.busy else "waiting" if wait else "computing",
        running.cell,
        serial if wait else 0,
        cpu_time(),
        wait.since if wait else running.since,
        place(frame) if running.busy else "",
        wait,
        tuple(under_way),
        entered,
        history,
        surviving.bears(),
        surviving.without(),
    )


def cpu_time() -> float:
    """CPU time of the main thread in seconds."""
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
