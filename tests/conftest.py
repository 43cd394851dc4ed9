"""Fixtures that every test shares: nothing of ours may be left when a test ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Every process that a test starts inherits this, however it is started: that is how ours are told from others'.
MARK = f"{os.getpid()}-{time.time():.0f}"
os.environ["LABKIT_TEST_RUN"] = MARK


def unused_segments() -> set[str]:
    """Shared-memory files of Open MPI, MPICH or labkit that no process has mapped."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith(("sm_segment", "mpich_shm", "labkit"))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


def our_processes() -> dict[int, str]:
    """Living processes that tests started: pid and command line."""
    found = {}
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        with contextlib.suppress(psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get("LABKIT_TEST_RUN") == MARK:
                found[process.pid] = " ".join(process.info["cmdline"] or [])[:120]
    return found


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Wait until `condition` holds; False when it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Fails when a process or a shared-memory segment of ours is left behind."""
    from labkit.cluster.sessions import sessions

    processes, shared, records = set(our_processes()), unused_segments(), {s.cluster_id for s in sessions()}
    yield
    eventually(lambda: set(our_processes()) <= processes and unused_segments() <= shared)
    assert not {pid: line for pid, line in our_processes().items() if pid not in processes}
    assert not unused_segments() - shared
    mine = {s.cluster_id for s in sessions() if s.owner.process() is None or s.owner.pid == os.getpid()}
    assert mine <= records


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves a process or a shared-memory segment of ours behind."""
    with leaves_nothing():
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]
