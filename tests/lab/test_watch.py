"""A cell that can never end is named and ended; whatever ends it, the ranks are back with their variables."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError
from labkit.cluster.lab import Lab
from tests.conftest import eventually

PREPARE = "import time\nimport torch\nfrom labkit import comm\nkept = mpi_rank"
CHECK = "print(kept, comm.all_reduce(torch.tensor([1.0])).item())"


@pytest.fixture(autouse=True)
def _prepared(lab: Lab) -> None:
    lab.run(PREPARE, show=False)


def works(lab: Lab) -> None:
    """Every rank has its variables, and the next all-reduce is right."""
    cell = lab.run(CHECK, show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == [f"{rank} 3.0\n" for rank in range(3)]


def test_a_cycle_of_receives_is_named_with_its_ranks_lines_and_cure(lab: Lab) -> None:
    with pytest.raises(DeadlockError) as caught:
        lab.run("x = torch.zeros(1)\ncomm.recv(x, src=(comm.rank + 1) % 3, tag=7)", show=False)
    proof = caught.value.verdict
    assert proof is not None
    assert (proof.kind, proof.ranks, proof.cycle) == ("deadlock", (0, 1, 2), (0, 1, 2))
    text = str(caught.value)
    assert text.startswith("no rank can go on.\n  rank 0  recv(src=1, tag=7")
    assert text.count("cell line 2   waiting") == 3
    assert "Cycle 0 → 1 → 2 → 0." in text
    assert not caught.value.stuck
    works(lab)


def test_large_sends_that_wait_for_each_other_are_a_deadlock_and_small_ones_are_not(lab: Lab) -> None:
    exchange = (
        "x, y = torch.zeros({count}), torch.zeros({count})\n"
        "comm.send(x, dst=(comm.rank + 1) % 3)\ncomm.recv(y, src=(comm.rank + 2) % 3)"
    )
    lab.run(exchange.format(count=10), show=False)
    with pytest.raises(DeadlockError, match="large ones wait for their receiver"):
        lab.run(exchange.format(count=1_000_000), show=False)
    works(lab)


def test_a_rank_that_left_without_a_collective_is_named(lab: Lab) -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 finished the cell without it") as caught:
        lab.run("if comm.rank: comm.barrier()", show=False)
    assert caught.value.verdict is not None
    assert caught.value.verdict.ranks == (1, 2)
    works(lab)


def test_ranks_that_cannot_go_on_are_named_while_another_still_computes(lab: Lab) -> None:
    code = "if comm.rank < 2: comm.recv(torch.zeros(1), src=1 - comm.rank)\nelse: time.sleep(600)"
    with pytest.raises(DeadlockError, match=r"ranks 0 and 1 cannot go on") as caught:
        lab.run(code, show=False)
    assert caught.value.states[2].startswith("interrupted")
    works(lab)


def test_a_rank_that_is_slow_is_not_taken_for_dead(lab: Lab) -> None:
    cell = lab.run("if comm.rank == 2: time.sleep(2)\ncomm.barrier()\nprint('through')", show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["through\n"] * 3


def test_mismatched_collectives_are_told_rank_by_rank(lab: Lab) -> None:
    with pytest.raises(CellError) as caught:
        lab.run("if comm.rank == 1: comm.all_reduce(torch.ones(2))\nelse: comm.barrier()", show=False)
    assert caught.value.first is not None
    assert caught.value.first.name == "MismatchError"
    assert "rank 1  all_reduce(sum, float32, shape (2,))" in caught.value.first.message
    works(lab)


def test_a_deadline_ends_a_cell_and_tells_what_the_ranks_were_doing(lab: Lab) -> None:
    with pytest.raises(CellDeadlineError) as caught:
        lab.run("if comm.rank == 0: time.sleep(600)\ncomm.barrier()", show=False, deadline=1)
    assert "rank 0  computing" in str(caught.value)
    assert "rank 1  barrier()" in str(caught.value)
    works(lab)
    lab.deadline = 1
    with pytest.raises(CellDeadlineError):
        lab.run("time.sleep(600)", show=False)
    works(lab)


def test_a_blocked_rank_tells_what_it_waits_for_and_where(lab: Lab) -> None:
    lab.run("if comm.rank == 2: time.sleep(600)\ncomm.barrier()", block=False)
    assert eventually(lambda: [row.state for row in lab.status()] == ["waiting", "waiting", "computing"])
    rows = lab.status()
    assert rows[0].doing.startswith("barrier(), cell line 2")
    assert rows[2].doing.startswith("cell line 1")
    shown = repr(lab.where())
    assert "rank 2" in shown and "time.sleep(600)" in shown and "comm.barrier()" in shown
    lab.interrupt()
    assert [row.state for row in lab.status()] == ["ready"] * 3
    assert repr(lab.where()).count("at its prompt") == 3
    works(lab)


def test_a_wait_in_torch_distributed_is_seen(lab: Lab, tmp_path: Path) -> None:
    code = f"""
import os
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=comm.rank, world_size=3)
x = torch.ones(1)
if comm.rank == 1:
    while not os.path.exists("{tmp_path}/go"): time.sleep(0.01)
    dist.send(x, dst=0)
if comm.rank == 0: dist.recv(x, src=1)
dist.barrier()
dist.destroy_process_group()
"""
    lab.run(code, block=False)
    try:
        seen = "torch.distributed.recv(src=1, tag=0), cell line 8", "", "torch.distributed.barrier(), cell line 9"
        assert eventually(
            lambda: all(row.doing.startswith(text) for row, text in zip(lab.status(), seen, strict=True)), 60
        )
        assert [row.state for row in lab.status()] == ["waiting", "computing", "waiting"]
    finally:
        (tmp_path / "go").touch()
    lab.wait()


def test_a_stopped_rank_does_not_keep_the_others(lab: Lab) -> None:
    lab.run("comm.barrier()\nif comm.rank == 1: time.sleep(600)\ncomm.barrier()", block=False)
    assert eventually(lambda: [row.state for row in lab.status()] == ["waiting", "computing", "waiting"])
    os.kill(lab.ranks[1].pid, signal.SIGSTOP)
    try:
        with pytest.raises(CellDeadlineError) as caught:
            lab.wait(deadline=0.5)
        assert list(caught.value.stuck) == [1]
        assert "SIGSTOP" in caught.value.stuck[1]
        assert [row.state for row in lab.status()] == ["failed", "stopped", "failed"]
    finally:
        os.kill(lab.ranks[1].pid, signal.SIGCONT)
    lab.interrupt()
    works(lab)
