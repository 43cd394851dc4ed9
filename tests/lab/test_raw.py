"""Plain mpi4py in a lab: a raw call that can never end is named and ended, and the ranks go on with a fresh world."""

from __future__ import annotations

import re

import pytest

from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError, RankFailure
from labkit.cluster.implementations import find
from labkit.cluster.lab import Lab
from tests.conftest import eventually

pytestmark = pytest.mark.skipif(not find().ulfm, reason="only an MPI with ULFM can end a raw blocking call")

PREPARE = (
    "import time\nimport numpy as np\nfrom mpi4py import MPI\nfrom labkit import comm\n"
    "world = MPI.COMM_WORLD\nme, size = world.rank, world.size\nkept = f'rank {me}'"
)
CHECK = (
    "assert world is MPI.COMM_WORLD and kept == f'rank {mpi_rank}'\n"
    "print(MPI.COMM_WORLD.allreduce(1), comm.all_reduce(np.ones(1)).item())"
)


@pytest.fixture(autouse=True)
def _prepared(lab: Lab) -> None:
    lab.run(PREPARE, show=False)


def works(lab: Lab) -> None:
    """Every rank has its variables, and both kinds of all-reduce are right."""
    cell = lab.run(CHECK, show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["3 3.0\n"] * 3


def failure(lab: Lab, code: str) -> RankFailure:
    """The first rank's failure in a cell that fails."""
    with pytest.raises(CellError) as caught:
        lab.run(code, show=False)
    assert caught.value.first is not None and not caught.value.stuck
    return caught.value.first


def deadlock(lab: Lab, code: str) -> str:
    """What the lab says of a cell in which ranks can never go on."""
    with pytest.raises(DeadlockError) as caught:
        lab.run(code, show=False)
    assert not caught.value.stuck
    return str(caught.value)


def test_raw_calls_that_can_never_end_are_named_and_ended_again_and_again(lab: Lab) -> None:
    lab.run("part = world.Dup()\npart.Barrier()", show=False)
    text = deadlock(lab, "x = np.zeros(1)\nMPI.COMM_WORLD.Recv(x, source=(me + 1) % size, tag=7)")
    assert text.startswith("no rank can go on.\n  rank 0  Recv(source=1, tag=7)")
    assert text.count("cell line 2   waiting") == 3
    assert "Cycle 0 → 1 → 2 → 0." in text and "Sendrecv()" in text
    works(lab)

    stale = failure(lab, "part.Barrier()")
    assert stale.name == "StaleError"
    assert re.search(r"made before the last recovery.*Make it again", stale.message)
    assert "watched" not in stale.traceback
    works(lab)

    exchange = (
        "x, y = np.ones({count}, 'f4'), np.zeros({count}, 'f4')\n"
        "world.Send(x, dest=(me + 1) % size)\nworld.Recv(y, source=(me - 1) % size)"
    )
    lab.run(exchange.format(count=10), show=False)
    text = deadlock(lab, exchange.format(count=11_000_000))
    assert "rank 2  Send(dest=0, tag=0)   cell line 2   waiting" in text
    assert "large ones wait for their receiver" in text
    works(lab)

    text = deadlock(lab, "if me: world.Barrier()")
    assert "rank 1  Barrier()" in text and "ank 0 finished the cell without it" in text
    works(lab)

    code = "part = world.Split(0)\nx = np.zeros(10)\npart.Bcast(x, root=0) if me == 2 else part.Barrier()"
    text = deadlock(lab, code)
    assert "rank 2 calls Bcast(root=0, float64 × 10)" in text and "ranks 0 and 1 call Barrier()" in text
    works(lab)

    text = deadlock(lab, "if me == 0: world.recv(source=1)\nelif me == 1: comm.recv(np.zeros(1), src=0)")
    assert "recv(source=1, tag=any)" in text and "recv(src=0" in text
    works(lab)


def test_ranks_in_a_raw_call_come_back_when_another_fails_and_at_an_interrupt(lab: Lab) -> None:
    code = "if me == 1: raise ValueError('no data')\nx = np.ones(11_000_000, 'f4')\nworld.Allreduce(MPI.IN_PLACE, x)"
    with pytest.raises(CellError) as caught:
        lab.run(code, show=False)
    assert caught.value.first is not None and (caught.value.first.rank, caught.value.first.name) == (1, "ValueError")
    assert caught.value.states[0] == "interrupted in Allreduce(op=SUM, float32 × 11000000)"
    assert any("Allreduce(op=SUM, float32 × 11000000)   cell line 3" in line for line in caught.value.seen)
    works(lab)

    lab.run("if me == 2: time.sleep(600)\nworld.allgather(me)", block=False)
    assert eventually(lambda: [row.state for row in lab.status()] == ["waiting", "waiting", "computing"])
    assert lab.status()[0].doing.startswith("allgather(), cell line 2")
    lab.interrupt()
    assert [row.state for row in lab.status()] == ["ready"] * 3
    works(lab)


def test_where_mpi_cannot_end_a_raw_call_it_is_told_and_a_restart_is_offered(lab: Lab) -> None:
    lab.run("from labkit.comm import warden\nwarden.REVOKES = False", show=False)
    with pytest.raises(DeadlockError) as caught:
        lab.run("world.recv(source=(me + 1) % size)", show=False)
    assert list(caught.value.stuck) == [0, 1, 2]
    text = str(caught.value)
    assert "Rank 0 did not come back: blocked in recv(source=1, tag=any), a raw mpi4py call, which this MPI" in text
    assert "lab.restart()" in text
    lab.restart()
    lab.run(PREPARE, show=False)
    works(lab)


def test_deadlines_hold_for_raw_calls(lab: Lab) -> None:
    with pytest.raises(CellDeadlineError) as caught:
        lab.run("if me == 0: time.sleep(600)\nworld.barrier()", show=False, deadline=1)
    assert "rank 1  Barrier()" in str(caught.value) and not caught.value.stuck
    works(lab)

    alone = "with comm.deadline(0.2):\n        world.recv(source=1, tag=3)\n"
    for others in ("time.sleep(600)", "world.Barrier()"):
        first = failure(lab, f"if me == 0:\n    {alone}else:\n    {others}")
        assert (first.rank, first.name) == (0, "DeadlineError")
        assert "recv(source=1, tag=3) on communicator 'MPI.COMM_WORLD' (cell line 3)" in first.message
        works(lab)

    renewing = (
        "try:\n    with comm.deadline(0.2):\n        world.recv(source=me, tag=3)\n"
        "except comm.CommError:\n    comm.renew()\nprint(world.allreduce(1))"
    )
    cell = lab.run(renewing, show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["3\n"] * 3
    works(lab)


def test_a_rank_that_hears_late_that_it_is_to_be_freed_leaves_the_fresh_world_alone(lab: Lab) -> None:
    late = """if me == 1:
        from labkit.comm import warden
        free = warden._warden._actions["free"]
        warden._warden._actions["free"] = lambda: (time.sleep(0.7), free())[1]
    """
    lab.run(late, show=False)
    for _ in range(2):
        deadlock(lab, "world.Recv(np.zeros(1), source=(me + 1) % size)")
        works(lab)
    lab.run('if me == 1: warden._warden._actions["free"] = free', show=False)
