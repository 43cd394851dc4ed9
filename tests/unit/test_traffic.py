"""Communicators are revoked only once nothing moves between ranks that talk by TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from labkit.cluster.traffic import QUIET_BYTES, QUIET_LIMIT_S, Traffic
from tests.conftest import eventually

# Stands for a rank: moves some bytes each time it is told to.
MOVER = f"""
import os, sys
nowhere = os.open(os.devnull, os.O_WRONLY)
for line in sys.stdin:
    os.write(nowhere, bytes({2 * QUIET_BYTES}))
    print("moved", flush=True)
"""


class Mover:
    """A process and what is asked about it."""

    def __init__(self) -> None:
        self.pipe = subprocess.Popen(
            [sys.executable, "-c", MOVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.process = psutil.Process(self.pipe.pid)

    def move(self) -> None:
        """Returns when it has."""
        assert self.pipe.stdin is not None
        assert self.pipe.stdout is not None
        self.pipe.stdin.write("\n")
        self.pipe.stdin.flush()
        assert self.pipe.stdout.readline() == "moved\n"


@pytest.fixture
def mover() -> Iterator[Mover]:
    """One that has begun."""
    one = Mover()
    one.move()
    yield one
    one.pipe.kill()
    one.pipe.communicate()


def test_it_waits_until_nothing_moves_but_not_for_ever(mover: Mover) -> None:
    traffic = Traffic([mover.process, None], by_tcp=True)
    assert not traffic.allows_revoking(0.0)
    for _ in range(5):
        mover.move()
        assert not traffic.allows_revoking(0.0)
    assert traffic.allows_revoking(QUIET_LIMIT_S + 0.1)
    assert eventually(lambda: traffic.allows_revoking(0.0))
    mover.move()
    assert not traffic.allows_revoking(0.0)


def test_never_beside_a_stopped_rank(mover: Mover) -> None:
    traffic = Traffic([mover.process], by_tcp=True)
    assert eventually(lambda: traffic.allows_revoking(0.0))
    os.kill(mover.process.pid, signal.SIGSTOP)
    assert eventually(lambda: mover.process.status() == psutil.STATUS_STOPPED)
    assert not traffic.allows_revoking(QUIET_LIMIT_S + 0.1)
    assert Traffic([mover.process], by_tcp=False).allows_revoking(0.0)
    os.kill(mover.process.pid, signal.SIGCONT)
    assert eventually(lambda: traffic.allows_revoking(0.0))


def test_a_rank_that_is_gone_moves_nothing(mover: Mover) -> None:
    traffic = Traffic([mover.process], by_tcp=True)
    mover.pipe.kill()
    mover.pipe.wait()
    assert eventually(lambda: traffic.allows_revoking(0.0))
