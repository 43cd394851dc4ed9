"""What keeps a rank's core busy does so, and ends with the rank, also after kill -9."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from labkit.train.busy import Busy
from tests.conftest import eventually

pytestmark = pytest.mark.usefixtures("nothing_left")

HOLDER = """
import torch
from labkit.train.busy import Busy
torch.set_num_threads(1)
print(*Busy(2).pids, flush=True)
input()
"""


def test_it_computes_on_the_ranks_own_core_until_it_is_closed() -> None:
    before = os.sched_getaffinity(0)
    busy = Busy(1)
    try:
        children = [psutil.Process(pid) for pid in busy.pids]
        cores = [os.sched_getaffinity(child.pid) for child in children]
        assert set.union(*cores) == os.sched_getaffinity(0) and all(len(core) == 1 for core in cores)
        assert eventually(lambda: all(child.cpu_times().user > 0.05 for child in children), 30)
    finally:
        busy.close()
    assert not any(child.is_running() for child in children)
    assert os.sched_getaffinity(0) == before


def test_it_ends_when_its_rank_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        children = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(children) == 2 and all(child.status() != psutil.STATUS_ZOMBIE for child in children)
        rank.kill()
        rank.wait(20)
        assert eventually(
            lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        )


def test_where_it_cannot_be_started_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.train.busy.PROGRAM", "raise SystemExit('no core for you')")
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="load this rank's core could not be started: no core for you"):
        Busy(1)
    assert os.sched_getaffinity(0) == before
