"""Ranks that are killed for real under plain mpiexec: those that are left find each other and go on."""

from __future__ import annotations

import sys
import textwrap

import pytest

from labkit.cluster.implementations import find, mpiexec_command
from tests.mpi.test_program import run

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not find().ulfm, reason="only an MPI with ULFM survives the death of a rank"),
]

BEGIN = """
import os, signal
import numpy as np
from labkit import comm
from labkit.comm import surviving

me = comm.world().rank
def die():
    os.kill(os.getpid(), signal.SIGKILL)

def sums(group):
    "Whether small and large all-reduces are right, in ordinary and in shared memory."
    for x in (np.ones(5), np.ones(400_000), comm.shared_zeros(400_000, group=group)):
        x[:] = me + 1
        comm.all_reduce(x, group=group)
        assert x.min() == x.max() == sum(rank + 1 for rank in group.members), x
"""


def said(ranks: int, program: str) -> list[str]:
    """What each rank that is left printed, in no order."""
    command, environment = mpiexec_command(ranks)
    status, out, err = run([*command, sys.executable, "-c", BEGIN + textwrap.dedent(program)], environment, limit_s=60)
    assert status == 0, err
    return sorted(out.splitlines())


def test_a_death_in_the_middle_of_a_sum_leaves_the_others_a_communicator() -> None:
    out = said(
        4,
        """
        from labkit.comm.windows import Window
        x = comm.shared_zeros(400_000)
        if me == 1:  # in the middle of the data: the others have agreed that all are in the call
            Window.finish = lambda *_: die()
        try:
            comm.all_reduce(x)
        except comm.CommError:
            assert surviving.death_in(comm.world())
        left = comm.survivors()
        sums(left)
        again = comm.survivors(left)  # nobody more has died
        sums(again)
        assert surviving.part(again) is None
        print(me, left.members, left.rank, again.size, surviving.without())
        """,
    )
    assert out == ["0 (0, 2, 3) 0 3 (1,)", "2 (0, 2, 3) 1 3 (1,)", "3 (0, 2, 3) 2 3 (1,)"]


def test_another_death_while_the_survivors_come_together_is_borne_too() -> None:
    out = said(
        4,
        """
        from labkit.comm.making import Making
        if me == 1:
            die()
        try:
            comm.barrier()
        except comm.CommError:
            pass
        if me == 2:  # has shrunk with the others, and makes the communicator with them
            Making.over = lambda *_: die()
        left = comm.survivors()
        sums(left)
        print(me, left.members, surviving.without())
        """,
    )
    assert out == ["0 (0, 3) (1, 2)", "3 (0, 3) (1, 2)"]


def test_ranks_that_think_they_are_done_wait_for_those_that_must_go_on() -> None:
    out = said(
        3,
        """
        comm.barrier()
        if me == 1:
            die()
        # Rank 0 has what it wanted; rank 2 has seen the death.
        left = surviving.part(comm.world()) if me == 0 else comm.survivors()
        sums(left)
        print(me, left.members, surviving.part(left))
        """,
    )
    assert out == ["0 (0, 2) None", "2 (0, 2) None"]


def test_an_error_that_is_no_death_is_told_from_one() -> None:
    out = said(
        2,
        """
        try:
            if me == 0:
                comm.barrier(timeout=0.1)
        except comm.DeadlineError:
            print(surviving.death_in(comm.world()))
        """,
    )
    assert out == ["False"]


def test_only_the_world_has_survivors() -> None:
    out = said(
        2,
        """
        try:
            comm.survivors(comm.world().dup())
        except comm.ArgumentError as error:
            print(error)
        """,
    )
    assert all("only the world has survivors" in line for line in out) and len(out) == 2


def test_where_a_death_ends_all_ranks_elastic_training_refuses_with_the_cure() -> None:
    command, environment = mpiexec_command(2)
    plain = [word for word in command if word not in ("--with-ft", "ulfm")]
    program = """
        from labkit import data, train
        try:
            train.elastic(train.LeNet(), data.load("digits", size=100))
        except train.TrainError as error:
            print(error)
        """
    source = BEGIN + textwrap.dedent(program)
    status, out, err = run([*plain, sys.executable, "-c", source], environment, limit_s=60)
    assert status == 0, err
    assert out.count("Cure: Open MPI from version 5 on, started by mpiexec --with-ft ulfm") == 2
