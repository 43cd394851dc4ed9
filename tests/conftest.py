"""Fixtures that every test shares: nothing of ours may be left when a test ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest


def segments() -> set[str]:
    """Shared-memory files of Open MPI, MPICH or labkit."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sm_segment", "mpich_shm", "labkit", "vader"))}


def lab_processes() -> dict[int, str]:
    """Living processes that belong to labs: controllers, launchers, ranks."""
    marks = ("ipyparallel.controller", "labkit.cluster.engine", "mpiexec", "prterun")
    found = {}
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(mark in line for mark in marks):
            found[process.info["pid"]] = line[:120]
    return found


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Wait until `condition` holds; False when it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves a process or a shared-memory segment of ours behind."""
    from labkit.cluster.sessions import sessions

    processes, shared, records = set(lab_processes()), segments(), {s.cluster_id for s in sessions()}
    yield
    eventually(lambda: set(lab_processes()) <= processes and segments() <= shared)
    assert not {pid: line for pid, line in lab_processes().items() if pid not in processes}
    assert not segments() - shared
    assert {s.cluster_id for s in sessions()} <= records


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]
