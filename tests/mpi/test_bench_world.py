"""A benchmark's ranks, and their shared memory, end with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from labkit.bench.world import _show, measure
from labkit.cluster import worlds
from labkit.cluster.probe import mapped_segments
from labkit.cluster.worlds import running
from tests.conftest import eventually

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = 2
ENDLESS = "tests.mpi.endless_ranks"
MEASURING = [
    sys.executable,
    "-c",
    f"from labkit.bench.world import measure as m; m('{ENDLESS}', 2, quick=True, limit_s=99)",
]
LABKIT = str(Path(sys.executable).parent / "labkit")


def ranks_of(parent: int) -> list[psutil.Process]:
    """The ranks below process `parent` that have met: all of them have shared memory mapped."""
    below = psutil.Process(parent).children(recursive=True)
    launcher = [process for process in below if process.name() in ("prterun", "mpiexec.hydra")]
    try:
        ranks = [process for each in launcher for process in each.children() if mapped_segments(process.pid)]
    except (OSError, psutil.Error):
        return []
    return ranks if len(ranks) == RANKS else []


def up(parent: int) -> tuple[list[psutil.Process], set[str]]:
    """Wait until the ranks are up; all processes below `parent`, and the ranks' segments."""
    assert eventually(lambda: bool(ranks_of(parent)), 60)
    segments = {segment for rank in ranks_of(parent) for segment in mapped_segments(rank.pid)}
    assert len(segments) >= RANKS
    return psutil.Process(parent).children(recursive=True), segments


def gone(processes: list[psutil.Process], segments: set[str]) -> bool:
    """Whether nothing of them is there."""
    living = [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return not living and not any(map(os.path.exists, segments))


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ([LABKIT, "bench", "allreduce"], signal.SIGKILL),
        ([LABKIT, "train", "--world-size", "2", "--epochs", "1000", "--dataset", "digits"], signal.SIGKILL),
        (MEASURING, signal.SIGTERM),
        (MEASURING, signal.SIGINT),
    ],
    ids=["bench, kill -9", "train, kill -9", "kill", "Ctrl-C"],
)
def test_it_ends_with_the_command(root: Path, tmp_path: Path, command: list[str], number: signal.Signals) -> None:
    nothing = subprocess.DEVNULL
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(command, cwd=root, env=environment, stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        processes, segments = up(bench.pid)
        bench.send_signal(number)
        bench.wait(20)
        # The record of labs may stay, which is empty.
        assert eventually(
            lambda: gone(processes, segments) and {*os.listdir(tmp_path)} <= {f"labkit-{os.geteuid()}"}, 20
        )
    finally:
        bench.kill()
        bench.wait()


@pytest.mark.parametrize("number", [None, signal.SIGSTOP, signal.SIGKILL], ids=["", "stopped", "killed"])
def test_it_ends_with_an_error_also_when_its_launcher_does_nothing(
    number: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "GRACE_S", 1.0)
    with contextlib.suppress(InterruptedError), running(RANKS, [sys.executable, "-m", ENDLESS]):
        processes, segments = up(os.getpid())
        (launcher,) = {rank.parent() for rank in ranks_of(os.getpid())}
        if number is not None:
            launcher.send_signal(number)
        raise InterruptedError
    assert gone(processes, segments)


@pytest.mark.parametrize("limit_s", [0.02, 1.0])
def test_it_ends_at_its_limit_also_while_it_starts(limit_s: float) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        measure(ENDLESS, RANKS, quick=True, limit_s=limit_s)
    assert not psutil.Process().children(recursive=True)


# The second byte of a character follows only when the first one has been read.
HALVES = """
import fcntl, os, termios
first, second = "µ".encode()[:1], "µ".encode()[1:]
os.write(1, first)
while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):
    os.sched_yield()
os.write(1, second)
"""


def test_a_character_that_is_read_in_two_parts_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", HALVES], stdout=subprocess.PIPE, text=True) as world:
        _show(world, 10)
    assert capsys.readouterr().err == "µ"
