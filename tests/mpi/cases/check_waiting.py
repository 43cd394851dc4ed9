"""Nothing hangs: deadlines and interrupts end every wait, and after a renewal the next result is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mpi4py import MPI

from labkit import comm


def raw_barrier() -> None:
    """Apart from labkit."""
    MPI.COMM_WORLD.Barrier()


def check_that_all_is_well() -> None:
    x = torch.full((5,), float(comm.rank))
    comm.all_reduce(x)
    assert x.tolist() == [sum(range(comm.size))] * 5
    assert [int(each) for each in comm.all_gather(torch.tensor(comm.rank))] == list(range(comm.size))


def start_over() -> None:
    comm.renew()
    check_that_all_is_well()


@contextmanager
def interrupted_once(waits: Callable[[], bool]) -> Iterator[list[comm.Wait]]:
    """Send this process SIGINT as soon as `waits()`; collects what the rank said it waited for."""
    seen: list[comm.Wait] = []

    def watch() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            now = comm.waiting_now()
            if now is not None and waits():
                seen.append(now)
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield seen
    finally:
        thread.join()
        signal.signal(signal.SIGINT, previous)


def needs(ranks: int) -> None:
    if comm.size < ranks:
        pytest.skip(f"needs {ranks} ranks")


def test_a_deadline_names_what_was_awaited_and_leaves_the_communicator_good() -> None:
    with pytest.raises(comm.DeadlineError) as caught:
        comm.recv(torch.ones(2), comm.rank, tag=7, timeout=0.05)
    text = str(caught.value)
    for piece in (f"rank {comm.rank}", f"src={comm.rank}", "tag=7", "float32 × 2", "'world'", "check_waiting.py:"):
        assert piece in text
    assert isinstance(caught.value, TimeoutError)
    check_that_all_is_well()  # without a renewal: the receive was cancelled
    y = torch.zeros(2)
    comm.sendrecv(torch.ones(2), comm.rank, y, comm.rank, 7, 7)
    assert y.tolist() == [1, 1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda: comm.recv(torch.ones(1)),
        lambda: comm.recv(torch.ones(1), comm.rank, 3),
        lambda: comm.irecv(torch.ones(1), comm.rank, 3).wait(),
        lambda: comm.probe(),
        lambda: comm.recv_object(comm.rank),
        lambda: comm.send(torch.ones(1_000_000), comm.rank),
        lambda: comm.sendrecv(torch.ones(1), comm.rank, torch.ones(1), comm.rank, 1, 2),
    ],
)
def test_a_deadline_ends_every_kind_of_message_wait(wait: Callable[[], Any]) -> None:
    with pytest.raises(comm.DeadlineError), comm.deadline(100), comm.deadline(0.03), comm.deadline(50):
        wait()
    start_over()


@pytest.mark.parametrize(
    "call",
    [
        lambda: comm.barrier(timeout=0.1),
        lambda: comm.all_reduce(torch.ones(3), timeout=0.0),
        lambda: comm.all_reduce(torch.ones(3), "sum", "ring", timeout=0.1),
        lambda: comm.broadcast(torch.ones(3), 0, timeout=0.1),
        lambda: comm.all_gather_object(3, timeout=0.1),
    ],
)
def test_a_missing_rank_is_a_deadline_error_and_the_communicator_says_what_to_do(call: Callable[[], Any]) -> None:
    needs(2)
    ended = ""
    if comm.rank != comm.size - 1:
        with pytest.raises(comm.CommError, match="every rank") as caught:
            call()
        ended = type(caught.value).__name__
        with pytest.raises(comm.CommError, match="gave up"):
            comm.barrier()
    # Ranks that share memory are freed by the first that gives up, the others by their own deadlines.
    assert "DeadlineError" in MPI.COMM_WORLD.allgather(ended)
    start_over()


def test_a_late_rank_does_not_run_into_a_call_that_was_given_up() -> None:
    needs(2)
    if comm.rank == 0:
        with pytest.raises(comm.DeadlineError):
            comm.all_reduce(torch.ones(3), timeout=0.1)
        raw_barrier()
    else:
        raw_barrier()  # rank 0 has given up by now; a vote of its own may still be on the way
        x = torch.ones(3)
        with pytest.raises(comm.CommError, match="gave up"):
            comm.all_reduce(x, timeout=0.3)
        assert x.tolist() == [1, 1, 1]
    raw_barrier()
    start_over()


def test_a_rank_that_comes_late_but_in_time_is_waited_for() -> None:
    needs(2)
    for _ in range(3):
        if comm.rank == 0:
            with pytest.raises(comm.DeadlineError):
                comm.recv(torch.ones(1), 0, timeout=0.06)
        before = comm.spent()
        check_that_all_is_well()
        assert comm.spent().wait_s > before.wait_s
        assert comm.spent().transfer_s > before.transfer_s


def test_an_interrupt_frees_a_receive_and_says_what_it_was() -> None:
    with interrupted_once(lambda: True) as seen, pytest.raises(KeyboardInterrupt):
        comm.recv(torch.ones(3), comm.rank, 11)
    wait = seen[0]
    assert (wait.operation, wait.rank, wait.peer, wait.tag) == ("recv", comm.rank, comm.rank, 11)
    assert (wait.count, wait.dtype, wait.communicator) == (3, "float32", "world")
    assert (wait.kind, wait.peer_in_world, wait.members) == ("receive", comm.rank, tuple(range(comm.size)))
    assert wait.place.startswith("check_waiting.py:")
    assert abs(wait.since - time.time()) < 60
    assert comm.waiting_now() is None
    start_over()


@pytest.mark.parametrize("call", [comm.barrier, lambda: comm.all_reduce(torch.ones(3)), lambda: comm.gather_object(1)])
def test_an_interrupt_frees_a_collective(call: Callable[[], Any]) -> None:
    needs(2)
    if comm.rank == 0:
        with interrupted_once(lambda: True) as seen, pytest.raises(KeyboardInterrupt):
            call()
        wait, world = seen[0], comm.world()
        assert (wait.peer, wait.kind, wait.members) == (None, "collective", tuple(range(comm.size)))
        assert wait.sequence == world.sequence
        assert wait.signature == wait.text == world.history[-1]
    raw_barrier()
    start_over()


@pytest.mark.parametrize("pause", [0.0007, 0.0031])
def test_interrupts_at_any_moment_leave_no_rank_behind(pause: float) -> None:
    """Rank 0 is interrupted again and again while sums run; each sum is completed on all ranks, or on none."""
    needs(2)
    comm.barrier()
    over = threading.Event()

    def pester() -> None:
        number = 0
        while not over.wait(pause * (1 + number % 5 / 7)):
            number += 1
            os.kill(os.getpid(), signal.SIGINT)

    def sums() -> tuple[int, int]:
        done = interrupts = 0
        while True:
            enough = float(comm.rank == 0 and (interrupts >= 30 or done >= 1_000_000))
            x = torch.tensor([1.0, enough])
            try:
                comm.all_reduce(x, timeout=3)
            except KeyboardInterrupt:
                interrupts += 1
            except comm.CommError:
                assert comm.world().abandoned
            assert x.tolist() in ([1, enough], [comm.size, 0], [comm.size, 1])
            done += x[0].item() == comm.size
            if x.tolist() == [comm.size, 1]:
                return done, interrupts
            if comm.world().abandoned:  # for all, then
                comm.renew(comm.world().generation + 1, timeout=30)

    if comm.rank:
        sums()
    else:
        previous = signal.signal(signal.SIGINT, lambda *_: None)
        thread = threading.Thread(target=pester)
        thread.start()
        try:
            signal.signal(signal.SIGINT, interrupt_inside_labkit)
            done, interrupts = sums()
            assert done
            assert interrupts
        finally:
            signal.signal(signal.SIGINT, lambda *_: None)
            over.set()
            thread.join()
            signal.signal(signal.SIGINT, previous)
    raw_barrier()
    start_over()


def interrupt_inside_labkit(_: int, frame: Any) -> None:
    """Like Python's own handler, but only while a call of labkit runs: the test itself is not to be interrupted."""
    while frame is not None:
        if frame.f_code.co_name == "all_reduce":
            raise KeyboardInterrupt
        frame = frame.f_back


def test_renewal_forgets_old_messages_and_receives() -> None:
    comm.isend(torch.full((1,), 666.0), comm.rank, 1)
    forgotten = comm.irecv(torch.zeros(1), comm.rank, 2)
    old = comm.world()
    twin = old.dup()
    assert comm.renew() is comm.world()
    assert comm.world().generation == old.generation + 1
    for stale in (old, twin):
        with pytest.raises(comm.CommError, match="before the last interrupt"):
            comm.barrier(group=stale)
    with pytest.raises(comm.CommError, match="before the last interrupt"):
        forgotten.wait()
    y = torch.zeros(1)
    comm.sendrecv(torch.ones(1), comm.rank, y, comm.rank, 1, 1)
    assert y.item() == 1


def test_an_interrupted_renewal_can_be_repeated() -> None:
    needs(2)
    generation = comm.world().generation + 1
    if comm.rank == 0:
        with pytest.raises(comm.DeadlineError, match=r"comm\.renew"):
            comm.renew(generation, timeout=0.05)
    raw_barrier()
    comm.renew(generation)
    assert comm.world().generation == generation
    check_that_all_is_well()


def test_a_world_can_be_made_of_another_communicator() -> None:
    comm.adopt(MPI.Intracomm(MPI.COMM_WORLD.Dup()))
    check_that_all_is_well()


def test_a_deadline_must_be_a_time() -> None:
    with pytest.raises(comm.ArgumentError), comm.deadline(-1):
        pass
