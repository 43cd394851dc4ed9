"""A rank whose process ends costs its own variables alone: the others go on without it, or it is started again."""

from __future__ import annotations

import os
import signal

import pytest

import labkit
from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError
from labkit.cluster.errors import ClusterError
from labkit.cluster.lab import Lab
from tests.conftest import eventually

PREPARE = "import numpy as np\nfrom labkit import comm\nkept = 10 * mpi_rank"
SUM = "print(comm.rank, comm.all_reduce(np.full(3, mpi_rank + 1.0)).tolist()[2], globals().get('kept'))"
DIE = "import os, signal\nif comm.rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()"


def said(lab: Lab, code: str = SUM) -> list[str]:
    cell = lab.run(code, show=False)
    return [cell.text(rank, "stdout").strip() for rank in range(lab.size)]


def test_a_killed_rank_is_healed_under_its_number_with_setup_cells_and_copied_variables(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("import numpy as np\nfrom labkit import comm", setup=True)
    lab.run("kept = 10 * mpi_rank\nmodel = np.ones(5) * 7")
    pids = [info.pid for info in lab.ranks]
    with pytest.raises(CellError) as caught:
        lab.run(DIE.format(rank=1), show=False)
    assert caught.value.first is not None
    assert (caught.value.first.rank, caught.value.first.name) == (1, "RankDiedError")
    assert not caught.value.stuck
    assert lab.heal(copy="model") == [1]
    assert "rank 1 started again" in capsys.readouterr().out
    assert [info.rank for info in lab.ranks] == [0, 1, 2]
    assert [new.pid == old for new, old in zip(lab.ranks, pids, strict=True)] == [True, False, True]
    assert said(lab) == ["0 6.0 0", "1 6.0 None", "2 6.0 20"]
    assert lab.pull("float(model.sum())") == [35.0] * 3
    assert [row.state for row in lab.status()] == ["ready"] * 3
    assert lab.heal() == []
    with pytest.raises(DeadlockError, match="Cycle 0 → 1 → 0"):
        lab.run("if comm.rank < 2: comm.recv(np.zeros(1), src=1 - comm.rank)", show=False)
    # The one that was started again dies, together with rank 0.
    for rank in (0, 1):
        os.kill(lab.ranks[rank].pid, signal.SIGKILL)
    assert eventually(lambda: [row.state for row in lab.status()] == ["gone", "gone", "ready"])
    assert lab.heal() == [0, 1]
    assert said(lab) == ["0 6.0 None", "1 6.0 None", "2 6.0 20"]


@pytest.mark.parametrize("end", ["os._exit(3)", "os._exit(0)", "import ctypes; ctypes.string_at(0)"])
def test_a_rank_that_ends_itself_is_named_and_the_others_go_on_without_it(lab: Lab, end: str) -> None:
    lab.run(PREPARE)
    with pytest.raises(CellError) as caught:
        lab.run(f"import os\nif comm.rank == 0:\n    {end}\ncomm.barrier()", show=False)
    assert caught.value.first is not None
    assert (caught.value.first.rank, caught.value.first.name) == (0, "RankDiedError")
    lost = "RankDiedError: rank {rank}, barrier: the process of rank 0 has ended"
    assert all(caught.value.states[rank].startswith(lost.format(rank=rank)) for rank in (1, 2))
    assert lab.shrink() == [0]
    assert lab.size == 2
    assert said(lab) == ["0 3.0 10", "1 3.0 20"]
    assert [row.rank for row in lab.status()] == [0, 1]


def test_a_lab_can_heal_itself() -> None:
    with labkit.start(3, on_death="heal") as lab:
        lab.run(PREPARE, setup=True)
        with pytest.raises(CellError):
            lab.run(DIE.format(rank=2), show=False)
        assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]
        os.kill(lab.ranks[0].pid, signal.SIGKILL)
        assert eventually(lambda: lab.status()[0].state == "gone")
        assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]


def test_a_stopped_rank_can_be_resumed_or_replaced(lab: Lab) -> None:
    lab.run(PREPARE, setup=True)
    os.kill(lab.ranks[1].pid, signal.SIGSTOP)
    assert eventually(lambda: lab.status()[1].state == "stopped")
    lab.resume(1)
    assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]
    ring = "MPI.COMM_WORLD.Sendrecv(x, (comm.rank + 1) % 3, 0, y, (comm.rank + 2) % 3)"
    stop = "if comm.rank == 1: threading.Timer(0.2, os.kill, (os.getpid(), 19)).start()"
    lab.run("import os, threading\nfrom mpi4py import MPI\nx = np.ones(11_000_000, np.float32)\ny = x.copy()")
    with pytest.raises(CellDeadlineError) as caught:
        lab.run(f"{stop}\nwhile True: {ring}", show=False, deadline=1.0)
    assert 1 in caught.value.stuck
    assert all("SIGSTOP" in why for why in caught.value.stuck.values())
    assert lab.replace(1) == [1]
    assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]
    # The new rank talks by TCP, piece by piece: nobody is freed while it is stopped in the middle of a message.
    lab.run("import os, threading\nfrom mpi4py import MPI\nx = np.ones(11_000_000, np.float32)")
    with pytest.raises(CellDeadlineError) as caught:
        lab.run(f"{stop}\nwhile True: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)", show=False, deadline=1.0)
    assert 1 in caught.value.stuck
    assert all("SIGSTOP" in why for why in caught.value.stuck.values())
    lab.resume(1)
    lab.interrupt()
    assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]


def test_a_stopped_rank_that_comes_back_by_itself_is_on_a_fresh_communicator() -> None:
    with labkit.start(3) as lab:  # no rank of which has been started again: the others are freed meanwhile
        lab.run(PREPARE + "\nimport os, signal, time\nfrom mpi4py import MPI\nx = np.ones(10)")
        # Rank 1 never reaches the call in which the others wait.
        stop = "if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n    while True: time.sleep(0.01)"
        cell = lab.run(f"{stop}\nMPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)", block=False)
        assert eventually(lambda: [row.state for row in lab.status()] == ["waiting", "stopped", "waiting"]), lab
        with pytest.raises(ClusterError, match=r"(?s)rank 1 is stopped by a signal.*Cure: lab\.resume\(1\)"):
            lab.interrupt()
        assert eventually(lambda: cell.pending == [1]), lab
        lab.resume(1)
        assert eventually(lambda: not cell.pending), lab
        assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]


def test_healing_waits_for_nobody_who_is_at_work(lab: Lab) -> None:
    lab.run("import time; time.sleep(600)", ranks=[0], block=False)
    os.kill(lab.ranks[2].pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"Rank 0 is still at work"):
        lab.heal()
    lab.interrupt()
    assert eventually(lambda: lab.heal() == [2])
    with pytest.raises(ClusterError, match="There is no rank 3"):
        lab.replace(3)


def test_arrays_in_shared_memory_outlive_a_rank_that_dies_while_they_are_reduced(lab: Lab) -> None:
    lab.run(PREPARE + "\nimport os, threading\nbucket = comm.shared_zeros(3_000_000)", setup=True)
    kill = "if comm.rank == 1: threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()"
    with pytest.raises(CellError) as caught:
        lab.run(f"{kill}\nwhile True: comm.all_reduce(bucket, 'max')", show=False)
    assert caught.value.first is not None
    assert (caught.value.first.rank, caught.value.first.name) == (1, "RankDiedError")
    # A setup cell must not need the other ranks: this one's array is made together below.
    lab.setup = [(PREPARE, None)]
    assert lab.heal() == [1]
    assert said(lab) == ["0 6.0 0", "1 6.0 10", "2 6.0 20"]
    lab.run("if comm.rank != 1: bucket[:] = 1  # what is left of the old one")
    lab.run("bucket = comm.shared_zeros(3_000_000)\nbucket += comm.rank + 1\ncomm.all_reduce(bucket);")
    assert lab.pull("(float(bucket[0]), float(bucket[-1]))") == [(6.0, 6.0)] * 3
    lab.run("del bucket")
    with pytest.raises(CellError):  # Python keeps the last error, and that the arrays it came through
        lab.run("raise ValueError", show=False)
    count = "import gc; gc.collect(); print(open('/proc/self/maps').read().count('labkit-window'))"
    assert said(lab, count) == ["0"] * 3
