"""torch.distributed on back end "mpi" in a lab: what can never end is named and ended, and dist goes on by itself."""

from __future__ import annotations

import re

import pytest

from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError
from labkit.cluster.implementations import find
from labkit.cluster.lab import Lab
from tests.conftest import eventually

pytestmark = pytest.mark.timeout(200)

PREPARE = """
import time
import torch
import torch.distributed as dist
if dist.is_initialized(): dist.destroy_process_group()
dist.init_process_group("mpi")
me, size = dist.get_rank(), dist.get_world_size()
"""
SUM = "x = torch.full((2,), dist.get_rank() + 1.0)\ndist.all_reduce(x)\nprint(x.tolist())"


def works(lab: Lab) -> None:
    """An all-reduce is right, with no call before it."""
    cell = lab.run(SUM, show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["[6.0, 6.0]\n"] * 3


def deadlock(lab: Lab, code: str) -> str:
    """What the lab says of a cell in which ranks can never go on."""
    with pytest.raises(DeadlockError) as caught:
        lab.run(code, show=False)
    assert not caught.value.stuck
    return str(caught.value)


def test_calls_that_can_never_end_are_named_and_ended_and_the_next_ones_work(lab: Lab) -> None:
    lab.run(PREPARE, show=False)
    works(lab)
    text = deadlock(lab, "x = torch.zeros(4)\ndist.recv(x, src=(me + 1) % size, tag=5)")
    assert re.search(r"rank 0  \w+\(src=1, tag=5, float32 × 4\) +cell line 2   waiting", text)
    assert "Cycle 0 → 1 → 2 → 0." in text
    works(lab)
    text = deadlock(lab, "x = torch.ones(4)\nif me: dist.all_reduce(x)")
    assert re.search(r"rank 1  all_reduce\(sum, float32, shape \(4,\)\) +cell line 2   waiting", text)
    assert "ank 0 finished the cell without it" in text
    works(lab)
    text = deadlock(lab, "if me == 0: dist.recv(torch.zeros(1))\nelif me == 1: dist.barrier()")
    assert "src=any" in text and "barrier()" in text
    works(lab)


def test_a_group_made_before_an_ended_cell_is_refused_with_the_cure(lab: Lab) -> None:
    lab.run(PREPARE + "pair = dist.new_group([0, 2])\nif me != 1: dist.barrier(group=pair)", show=False)
    text = deadlock(lab, "if me == 0: dist.all_reduce(torch.ones(1), group=pair)")
    assert "all_reduce" in text
    with pytest.raises(CellError) as caught:
        lab.run("if me != 1: dist.all_reduce(torch.ones(1), group=pair)", show=False)
    assert caught.value.first is not None
    assert "made before the last cell that was ended. Make it again" in caught.value.first.message
    cell = lab.run(
        "pair = dist.new_group([0, 2])\nx = torch.ones(1)\nif me != 1: dist.all_reduce(x, group=pair)\nprint(x.item())",
        show=False,
    )
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["2.0\n", "1.0\n", "2.0\n"]
    works(lab)


def test_an_error_in_a_cell_ends_no_process(lab: Lab) -> None:
    lab.run(PREPARE + "from labkit.comm import raising\nassert not raising._before", show=False)
    with pytest.raises(CellError, match="ValueError: no data here"):
        lab.run("if me == 1: raise ValueError('no data here')\ndist.barrier()", show=False)
    works(lab)


def test_interrupt_and_deadline(lab: Lab) -> None:
    lab.run(PREPARE, show=False)
    lab.run("if me == 2: time.sleep(600)\ndist.barrier()", block=False)
    assert eventually(lambda: [row.state for row in lab.status()] == ["waiting", "waiting", "computing"])
    assert lab.status()[0].doing.startswith("barrier(), cell line 2")
    lab.interrupt()
    assert [row.state for row in lab.status()] == ["ready"] * 3
    works(lab)
    with pytest.raises(CellDeadlineError) as caught:
        lab.run("if me == 0: time.sleep(600)\ndist.broadcast(torch.ones(3), src=0)", show=False, deadline=1)
    assert "rank 1  broadcast(src=0, float32, shape (3,))" in str(caught.value) and not caught.value.stuck
    works(lab)


@pytest.mark.skipif(not find().ulfm, reason="only an MPI with ULFM survives the death of a rank")
def test_after_a_rank_was_killed_and_healed_dist_says_what_to_call(lab: Lab) -> None:
    lab.run(PREPARE, show=False)
    with pytest.raises(CellError) as caught:
        lab.run("import os, signal\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", show=False)
    assert caught.value.first is not None
    assert (caught.value.first.rank, caught.value.first.name) == (1, "RankDiedError")
    assert lab.heal() == [1]
    lab.run("import torch\nimport torch.distributed as dist", ranks=[1], show=False)
    with pytest.raises(CellError) as caught:
        lab.run("if mpi_rank != 1: dist.all_reduce(torch.ones(1))", show=False)
    assert caught.value.first is not None
    message = caught.value.first.message
    assert "started again since this process group was made" in message
    assert "dist.destroy_process_group() and then dist.init_process_group('mpi') on every rank" in message
    lab.run("if mpi_rank != 1: dist.destroy_process_group()\ndist.init_process_group('mpi')", show=False)
    works(lab)
    deadlock(lab, "if dist.get_rank(): dist.all_reduce(torch.ones(1))")
    works(lab)
