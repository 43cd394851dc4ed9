"""Processes of a lab: recognised again, found all, ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["ProcessMark", "await_end", "lives", "marked", "members", "send", "stopped", "tied_to_parent"]


@dataclass(frozen=True)
class ProcessMark:
    """One process of a lab, recognised again by pid and creation time (seconds since the epoch)."""

    pid: int
    created: float
    role: str

    @classmethod
    def of(cls, pid: int, role: str) -> ProcessMark | None:
        """The mark of a living process, None when there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time(), role)
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """The process while it lives; None when it is gone, a zombie, or its pid is somebody else's by now."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.created) < 1.0 and lives(process) else None
        except psutil.NoSuchProcess:
            return None


def members(cluster_id: str) -> list[psutil.Process]:
    """Every living process of yours that was started in cluster `cluster_id`, whoever its parent is by now.

    ipyparallel names the cluster in the environment of controller and launcher, and all that they start inherits it:
    the controller's helpers, ranks that never registered, programs that a cell started.
    """
    return marked("IPP_CLUSTER_ID", cluster_id)


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Every living process of yours, besides this one, that has `value` for `variable` in its environment."""
    name = f"{variable}={value}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        # A process that is gone by now, or another user's, cannot be read.
        with contextlib.suppress(OSError, psutil.Error):
            if name in file.read_bytes().split(b"\0"):
                found.append(psutil.Process(int(file.parent.name)))
    return [process for process in found if process.pid != os.getpid() and lives(process)]


def lives(process: psutil.Process) -> bool:
    """Whether a process still runs; one that ended but was not reaped by its parent does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stopped(process: psutil.Process) -> bool:
    """Whether a signal has stopped a process (SIGSTOP)."""
    try:
        return bool(process.is_running() and process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def await_end(processes: Iterable[psutil.Process], limit_s: float) -> bool:
    """Wait until none of `processes` lives; False when some still do after `limit_s` seconds."""
    waiting = list(processes)
    deadline = time.monotonic() + limit_s
    while any(map(lives, waiting)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tied_to_parent() -> list[str]:
    """Command prefix under which a process gets SIGTERM when the process that started it dies.

    Without it a killed kernel leaves controller, launcher, ranks and their shared memory behind.  Empty where
    util-linux' ``setpriv`` is missing.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []
