"""After interrupts at any moment of any call, of a renewal too, all ranks move to a fresh world and sum rightly."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from labkit import comm

SOON = 0.3
"""Seconds after which a call gives up that another rank was kept from."""


def numbers(value: float, large: bool = False) -> Any:
    return np.full(200_000 if large else 10, float(value))


def check(x: Any, value: float) -> None:
    assert x.min() == x.max() == value


def sum_of(group: Any = None, large: bool = False, algorithm: str | None = None, timeout: float = SOON) -> None:
    members = group or comm.world()
    x = numbers(members.rank + 1, large)
    comm.all_reduce(x, algorithm=algorithm, group=group, timeout=timeout)
    check(x, members.size * (members.size + 1) / 2)


def broadcast() -> None:
    x = numbers(7 if comm.rank == 0 else 0, large=True)
    comm.broadcast(x, 0, timeout=SOON)
    check(x, 7)


def objects() -> None:
    assert comm.all_gather_object(comm.rank, timeout=SOON) == list(range(comm.size))


def duplicate() -> None:
    twin = comm.world().dup(timeout=SOON)
    sum_of(twin)
    with comm.deadline(SOON):  # another rank may have been interrupted before it comes here
        twin.free()


def part() -> None:
    sum_of(comm.world().split(comm.rank % 2, timeout=SOON))


def shift() -> None:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x, y = numbers(comm.rank, large=True), numbers(-1, large=True)
    comm.sendrecv(x, right, y, left, 5, 5, timeout=SOON)
    check(y, left)


def messages() -> None:
    for large in (True, False):
        x = numbers(3 * (comm.rank == 0), large)
        if comm.rank == 0:
            comm.send(x, 1, timeout=SOON)
        elif comm.rank == 1:
            comm.recv(x, 0, timeout=SOON)
            check(x, 3)


def mismatch() -> None:
    with pytest.raises(comm.MismatchError):
        comm.barrier(timeout=SOON) if comm.rank == 0 else comm.broadcast(numbers(1), 0, timeout=SOON)


CALLS: list[Callable[[], None]] = [
    sum_of,
    lambda: sum_of(large=True),
    lambda: sum_of(algorithm="library"),
    lambda: sum_of(large=True, algorithm="ring"),
    lambda: sum_of(algorithm="tree"),
    broadcast,
    objects,
    duplicate,
    part,
    shift,
    messages,
    mismatch,
]


@contextmanager
def interrupted(after: float, again: float) -> Iterator[None]:
    """KeyboardInterrupt where labkit's code is at work, again and again.

    Not in what it calls: Python drops an exception that is raised while an object is disposed of or a module found.
    """

    def interrupt(_: int, frame: Any) -> None:
        name = frame.f_code.co_filename
        if "/labkit/comm/" in name and not name.endswith("__init__.py"):
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def renewed(generation: int, chance: random.Random, interrupts: int) -> None:
    """Renew the world, interrupted so many times."""
    while comm.world().generation < generation:
        if not interrupts:
            comm.renew(generation, timeout=60)
            continue
        interrupts -= 1
        try:
            with interrupted(1e-6 + chance.random() * 0.004, 0):
                comm.renew(generation, timeout=60)
        except KeyboardInterrupt:
            continue


@pytest.mark.parametrize("seed", range(4))
def test_ranks_meet_again_whatever_was_interrupted(seed: int) -> None:
    if comm.size < 2:
        pytest.skip("needs 2 ranks")
    comm.world()
    same, own = random.Random(seed), random.Random(1000 * seed + comm.rank + 1)
    interrupts = rounds = 0
    while rounds < 12 or sum(MPI.COMM_WORLD.allgather(interrupts)) == 0:  # where calls are quick, few are hit
        rounds += 1
        program = same.choices(CALLS, k=4)
        victim = comm.rank in same.sample(range(comm.size), same.randint(1, comm.size))
        error: BaseException | None = None
        try:
            with interrupted(1e-6 + own.random() * 0.01 if victim else 0, own.choice([0.0007, 0.05])):
                for call in program:
                    call()
        except (KeyboardInterrupt, comm.CommError) as caught:
            error = caught
        interrupts += isinstance(error, KeyboardInterrupt)
        generation = max(MPI.COMM_WORLD.allgather(comm.world().generation)) + 1
        renewed(generation, own, 4 if victim else 0)
        for large in (False, True):
            sum_of(large=large, timeout=60)
