"""How ranks agree: a collective is completed on all ranks or on none, whoever gives up when, and nothing is left."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from labkit import comm
from labkit.comm.agreement import Call
from labkit.comm.board import Board
from labkit.comm.shared import suits

BOARDS = os.environ.get("LABKIT_BOARD") != "0"
WAYS: dict[str, Callable[[Any, float], object]] = {
    "shared": lambda x, timeout: comm.all_reduce(x, timeout=timeout),
    "library": lambda x, timeout: comm.all_reduce(x, algorithm="library", timeout=timeout),
}


def needs(ranks: int) -> None:
    if comm.size < ranks:
        pytest.skip(f"needs {ranks} ranks")


def boards() -> int:
    """How many boards this process has mapped. What errors of earlier tests still refer to is let go of before."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return sum("labkit-board" in line for line in lines)


def check_that_all_is_well(group: Any = None) -> None:
    size, rank = (group or comm.world()).size, (group or comm.world()).rank
    for length in (1, 5000):
        x = torch.full((length,), float(rank))
        comm.all_reduce(x, group=group)
        assert (x == sum(range(size))).all()


def all_or_none(attempt: Callable[[Any], BaseException | None]) -> bool:
    """Let every rank try to sum ones; check that all ranks have the sum or none has. Returns whether all have."""
    x = np.ones(1000, np.float32)
    error = attempt(x)
    everyone = MPI.COMM_WORLD.allgather((x.min(), x.max(), comm.world().abandoned is not None, repr(error)))
    assert {each[:2] for each in everyone} in ({(1, 1)}, {(comm.size, comm.size)}), everyone
    if any(abandoned for _, _, abandoned, _ in everyone):
        comm.renew(comm.world().generation + 1)
        check_that_all_is_well()
    elif all(error == "None" for *_, error in everyone):
        assert x[0] == comm.size
    return bool(x[0] == comm.size)


@pytest.mark.parametrize("way", WAYS)
def test_deadlines_that_race_with_the_last_rank_end_the_call_for_all_or_for_none(way: str) -> None:
    needs(2)
    comm.world()
    chance, outcomes = random.Random(comm.rank), set()
    for number in range(120):
        hasty = chance.random() < 0.4 or number % comm.size == comm.rank
        pause, timeout = chance.random() * 0.004, chance.random() * 0.004 if hasty else 20.0

        def attempt(x: Any, pause: float = pause, timeout: float = timeout) -> BaseException | None:
            time.sleep(pause)
            try:
                WAYS[way](x, timeout)
            except comm.CommError as error:
                return error
            return None

        outcomes.add(all_or_none(attempt))
    assert True in outcomes


@pytest.mark.parametrize("way", WAYS)
def test_interrupts_at_random_moments_end_the_call_for_all_or_for_none(way: str) -> None:
    needs(2)
    comm.world()
    chance, outcomes = random.Random(100 + comm.rank), set()

    def interrupt(_: int, frame: Any) -> None:
        if "/labkit/comm/" not in frame.f_code.co_filename:
            return  # such as pytest's own work on an exception that Python dropped, which must not have another
        while frame is not None:
            if frame.f_code.co_name == "all_reduce":
                raise KeyboardInterrupt
            frame = frame.f_back

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(120):
            pause = chance.random() * 0.002
            after = 1e-6 + chance.random() * 0.003 if number % comm.size == comm.rank else 0.0

            def attempt(x: Any, pause: float = pause, after: float = after) -> BaseException | None:
                time.sleep(pause)
                signal.setitimer(signal.ITIMER_REAL, after, 0.0004)  # again and again: while it settles, too
                try:
                    WAYS[way](x, 0.5)
                except (comm.CommError, KeyboardInterrupt) as error:
                    return error
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                return None

            outcomes.add(all_or_none(attempt))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert True in outcomes


def test_ranks_of_one_host_share_a_board_that_has_no_name_and_goes_with_its_communicator() -> None:
    comm.renew()
    before = boards()
    assert isinstance(comm.world().ballot, Board) == BOARDS
    assert before >= BOARDS
    for _ in range(5):
        comm.renew()
        check_that_all_is_well()
    assert boards() == before
    twin = comm.world().dup()
    check_that_all_is_well(twin)
    assert boards() == before + BOARDS
    twin.free()
    assert boards() == before
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("labkit")]


def test_parts_of_the_world_have_boards_of_their_own() -> None:
    part = comm.world().split(comm.rank % 2)
    assert part is not None
    check_that_all_is_well(part)
    assert isinstance(part.ballot, Board) == BOARDS
    again = part.dup()
    comm.barrier()
    if comm.rank % 2 == 0:
        for _ in range(5):
            check_that_all_is_well(again)
    check_that_all_is_well()
    check_that_all_is_well(again)
    again.free()
    part.free()


def test_collectives_are_counted_and_remembered() -> None:
    world = comm.world()
    before = world.sequence
    comm.barrier()
    comm.broadcast(torch.zeros(2), 0)
    assert world.sequence == before + 2
    assert world.history[-2:] == ("barrier()", "broadcast(src=0, float32, shape (2,))")
    for _ in range(20):
        comm.barrier()
    assert world.history == ("barrier()",) * 8
    MPI.COMM_WORLD.Barrier()  # nobody reads any more
    world.log.append((0xFFFC, "as if after many"))  # a board keeps 16 bits of the number
    for _ in range(10):
        check_that_all_is_well()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "complex64", "bool"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("length", [1, 700, 9000, 40_000])
def test_sums_in_shared_memory_are_those_of_the_library(length: int, op: str, dtype: str) -> None:
    needs(2)
    if (dtype == "complex64" and op in ("min", "max")) or (dtype == "bool" and op == "sum"):
        pytest.skip("has no meaning")
    mine = np.random.default_rng(comm.rank).integers(0, 2 if dtype == "bool" else 5, length).astype(dtype)
    ours, theirs = mine.copy(), mine.copy()
    comm.all_reduce(ours, op)
    comm.all_reduce(theirs, op, "library")
    assert ours.tolist() == theirs.tolist()


def test_the_librarys_way_and_the_default_are_different_calls() -> None:
    needs(2)
    x = np.ones(1000, np.float32)
    with pytest.raises(comm.MismatchError, match="algorithm=library"):
        comm.all_reduce(x, algorithm="library" if comm.rank == 0 else None)
    assert (x == 1).all()
    check_that_all_is_well()


def test_what_split_cannot_use_is_refused_before_anybody_waits() -> None:
    for arguments in ((-1,), ("a",), (2**40,), (0, "b")):
        with pytest.raises(comm.ArgumentError, match="split"):
            comm.world().split(*arguments)
    check_that_all_is_well()


def test_only_small_tensors_on_one_host_are_summed_in_shared_memory() -> None:
    from labkit.comm.buffers import reading

    world, small, large = comm.world(), np.ones(8192), np.ones(200_000)
    assert suits(world, reading(small, "")) == (BOARDS and comm.size > 1)
    assert not suits(world, reading(large, ""))


class Table:
    """Boards of several ranks over one piece of memory, in this process."""

    def __init__(self, ranks: int) -> None:
        memory = mmap.mmap(-1, 1 << 20)
        self.boards = [Board(memory, rank, ranks, False, lambda: None) for rank in range(ranks)]
        self.call = Call(comm.world(), "barrier", "")
        self.other = Call(comm.world(), "reduce", "")

    def enter(self, *ranks: int, sequence: int = 1) -> None:
        for rank in ranks:
            self.boards[rank].enter(self.call, sequence, 0)


def test_a_rank_that_leaves_while_others_are_missing_is_gone_for_good() -> None:
    table = Table(3)
    table.enter(0, 1)
    assert not table.boards[0].leave(table.call, 1, 0)
    table.enter(2)
    world = comm.world()
    try:
        for rank in (1, 2):
            with pytest.raises(comm.CommError, match="rank 0 gave up"):
                table.boards[rank].agree(table.call, 1, 1)
        assert not table.boards[0].leave(table.call, 1, 0)
    finally:
        world.abandoned = None


def test_a_rank_cannot_leave_when_all_are_there() -> None:
    table = Table(3)
    table.enter(0, 1, 2)
    assert table.boards[1].leave(table.call, 1, 0)
    assert table.boards[2].leave(table.call, 1, 0)
    for board in table.boards:
        assert board.agree(table.call, 1, 1)
    table.enter(0, sequence=2)
    assert not table.boards[1].entered(2)
    assert table.boards[1].agree(table.call, 1, 1)  # who is ahead does not disturb who is behind


def test_who_gives_up_after_all_had_agreed_is_not_awaited_in_the_next_call() -> None:
    table = Table(2)
    table.enter(0, 1)
    for board in table.boards:
        assert board.agree(table.call, 1, 1)
    table.boards[0].mark_left(1)
    table.enter(1, sequence=2)
    try:
        with pytest.raises(comm.CommError, match="rank 0 gave up"):
            table.boards[1].agree(table.call, 2, 20)
    finally:
        comm.world().abandoned = None


def test_different_calls_are_told_apart_and_may_be_left() -> None:
    table = Table(2)
    table.enter(0)
    table.boards[1].enter(table.other, 1, 0)
    for board, call in zip(table.boards, (table.call, table.other), strict=True):
        assert not board.agree(call, 1, 1)
    assert not table.boards[0].leave(table.call, 1, 0)


def test_the_number_counts_too() -> None:
    table = Table(2)
    table.enter(0, 1)
    assert table.boards[0].agree(table.call, 1, 1)
    table.enter(0, sequence=3)
    with pytest.raises(comm.DeadlineError):
        table.boards[0].agree(table.call, 3, 0.003)
