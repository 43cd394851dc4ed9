"""Raw mpi4py under the watch: a blocked call is seen, ended, and its communicator replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from labkit import comm
from labkit.comm import waiting, watched
from labkit.comm.mpi import REVOKES

WORLD: Any = MPI.COMM_WORLD
ANY = MPI.ANY_SOURCE

pytestmark = [
    pytest.mark.usefixtures("watching"),
    pytest.mark.skipif(not REVOKES, reason="this MPI cannot end a blocked call (it needs ULFM)"),
]


def together() -> None:
    """All ranks have come here, whatever became of the world that is watched. Lets MPI go on meanwhile."""
    request = watched.base().Ibarrier()
    while not request.Test():
        time.sleep(0.001)


@contextmanager
def freed_once_blocked(interrupt: bool = False, end: Callable[[], Any] = watched.revoke) -> Iterator[list[Any]]:
    """Revoke the communicators once every rank waits; collects what this one said then. Then a fresh world."""
    seen: list[Any] = []
    over = threading.Event()

    def watch() -> None:
        since = time.monotonic()
        while time.monotonic() - since < 60 and not over.is_set():
            before = waiting.clock.raw
            over.wait(0.1)
            if before is not None and waiting.clock.raw is before:
                seen.extend((waiting.waiting_now(), watched.under_way(), watched.entered()))
                if interrupt:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                together()  # every rank has said what it waits for
                end()
                break
        while not over.wait(0.002):  # a rank that is not in MPI makes no progress by itself
            MPI.COMM_SELF.Iprobe()

    thread = threading.Thread(target=watch)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield seen
    finally:
        together()
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, previous)
        watched.replace(watched.base().Dup())
    assert WORLD.allreduce(1) == WORLD.size
    assert waiting.clock.raw is None


def blocked(call: Callable[[], Any]) -> list[Any]:
    with freed_once_blocked() as seen, pytest.raises(MPI.Exception):
        call()
    return seen


def test_a_blocked_receive_is_seen_and_ended() -> None:
    under_way = WORLD.Irecv(np.zeros(2), WORLD.rank, 8)
    assert [each.text for each in watched.under_way()] == [f"Irecv(source={WORLD.rank}, tag=8)"]
    del under_way
    wait, _, _ = blocked(lambda: WORLD.Recv([np.zeros(8), 4, MPI.DOUBLE], source=WORLD.rank, tag=9))
    assert (wait.operation, wait.kind, wait.rank, wait.peer, wait.peer_in_world) == (
        "Recv",
        "receive",
        *[WORLD.rank] * 3,
    )
    assert (wait.tag, wait.dtype, wait.count, wait.communicator) == (9, "float64", 4, "MPI.COMM_WORLD")
    assert wait.members == tuple(range(WORLD.size))
    assert wait.text == f"Recv(source={WORLD.rank}, tag=9)"
    assert wait.place.startswith("check_watched_blocked.py:")
    assert 0 <= time.time() - wait.since < 120


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: WORLD.recv(), "receive", "recv(source=any, tag=any)"),
        (lambda: WORLD.Probe(WORLD.rank, 3), "receive", "Probe(source={r}, tag=3)"),
        (lambda: WORLD.irecv(source=WORLD.rank).wait(), "receive", "wait of irecv(source={r}, tag=any)"),
    ],
)
def test_every_kind_of_message_wait_is_told_and_ended(call: Callable[[], Any], kind: str, text: str) -> None:
    wait, _, _ = blocked(call)
    assert (wait.kind, wait.text) == (kind, text.format(r=WORLD.rank))


@pytest.mark.parametrize("method", ["Ssend", "Send"])
def test_a_blocked_send_is_told_and_ended(method: str) -> None:
    with freed_once_blocked() as seen, suppress(MPI.Exception):  # Open MPI may let a revoked send end without error
        getattr(WORLD, method)(np.zeros(1_000_000), WORLD.rank, 4)
    assert (seen[0].kind, seen[0].text) == ("send", f"{method}(dest={WORLD.rank}, tag=4)")
    assert (seen[0].dtype, seen[0].count) == ("float64", 1_000_000)


def test_waits_for_several_are_told_by_what_is_missing() -> None:
    rank = WORLD.rank

    def all_of() -> None:
        done = WORLD.Irecv(np.zeros(1), rank, 1)
        WORLD.Send(np.zeros(1), rank, 1)
        MPI.Request.Waitall([done, WORLD.Irecv(np.zeros(1), rank, 2)])

    assert blocked(all_of)[0].text == f"Waitall of Irecv(source={rank}, tag=2)"
    wait = blocked(lambda: MPI.Request.Waitany([WORLD.Irecv(np.zeros(1), rank, t) for t in (3, 4)]))[0]
    assert (wait.kind, [part.tag for part in wait.parts]) == ("any", [3, 4])
    wait = blocked(lambda: WORLD.Sendrecv(np.zeros(300_000), rank, 5, np.zeros(1), ANY, 6))[0]
    sides = [(part.kind, part.dtype, part.count) for part in wait.parts]
    assert (wait.kind, sides) == ("any", [("send", "float64", 300_000), ("receive", None, None)])
    wait = blocked(lambda: WORLD.sendrecv(bytes(500_000), rank, 5, bytearray(9), ANY, 6))[0]
    outgoing, incoming = wait.parts
    assert 500_000 <= outgoing.count < 501_000 and incoming.count is None  # an object's size, pickled


def test_a_missing_rank_in_a_collective_is_seen() -> None:
    if WORLD.size < 2:
        pytest.skip("needs 2 ranks")
    part = WORLD.Dup()
    sub = "recv" if WORLD.rank == 0 else "Barrier"
    wait, _, entered = blocked(lambda: part.Barrier() if WORLD.rank else WORLD.recv(source=0, tag=1))
    assert wait.operation == sub
    if WORLD.rank:
        assert (wait.kind, wait.sequence, wait.signature) == ("collective", 1, "Barrier()")
        assert entered[wait.communicator] == (1, ("Barrier()",))


def test_what_was_made_before_a_recovery_says_so() -> None:
    part = WORLD.Dup()
    blocked(lambda: WORLD.recv(source=WORLD.rank))
    for call in (part.Barrier, part.Dup, lambda: part.Irecv(np.zeros(1))):
        with pytest.raises(watched.StaleError, match=r"before the last recovery.*Make it again") as caught:
            call()
        assert isinstance(caught.value, MPI.Exception) and isinstance(caught.value, comm.CommError)
    assert part.size == WORLD.size
    part.Free()
    again = WORLD.Dup()
    assert again.allreduce(1) == WORLD.size
    again.Free()


def test_an_interrupt_goes_first_and_names_the_call() -> None:
    with freed_once_blocked(interrupt=True), pytest.raises(KeyboardInterrupt, match=r"^recv\(source=any, tag=6\)$"):
        WORLD.recv(tag=6)


def test_a_deadline_that_ended_a_raw_call_is_named() -> None:
    error = rf"rank {WORLD.rank} waited .* in Recv\(source={WORLD.rank}, tag=6\).*check_watched_blocked\.py:\d+"
    ending = freed_once_blocked(end=watched.break_overdue)
    with ending, pytest.raises(comm.DeadlineError, match=error), comm.deadline(0.01):
        WORLD.Recv(np.zeros(1), WORLD.rank, 6)


def test_renewal_gives_a_fresh_world_to_raw_calls_too() -> None:
    before, part = WORLD.handle, WORLD.Dup()
    watched.base().Barrier()
    WORLD.Revoke()
    with pytest.raises(watched.RevokedError, match=r"Barrier\(\).*good again after comm\.renew\(\)"):
        WORLD.barrier()
    together()
    comm.renew()
    assert WORLD.handle != before
    assert WORLD.allreduce(1) == WORLD.size
    with pytest.raises(watched.StaleError):
        part.Barrier()


def test_a_hundred_recoveries_leave_no_memory_behind() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as lines:
            return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cycles(number: int) -> None:
        for _ in range(number):
            watched.base().Barrier()  # nobody is in the last cycle's calls any more
            WORLD.Revoke()
            with pytest.raises(MPI.Exception):
                WORLD.Barrier()
            watched.replace(watched.base().Dup())
            assert WORLD.allreduce(1) == WORLD.size

    cycles(30)
    before = resident()
    cycles(100)
    assert resident() - before < 8 * 2**20
