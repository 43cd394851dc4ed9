"""Raw mpi4py under the watch: right programs stay right, a blocked call is seen, ended and replaced."""

from __future__ import annotations

import copy
import os
import pickle
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
from labkit.comm.plain import Plain

WORLD: Any = MPI.COMM_WORLD
ANY = MPI.ANY_SOURCE

revokes = pytest.mark.skipif(not REVOKES, reason="this MPI cannot end a blocked call (it needs ULFM)")


@pytest.fixture(scope="module", autouse=True)
def _watched() -> Iterator[None]:
    watched.install()
    yield
    watched.remove()
    assert WORLD.handle == watched.base().handle


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


def test_the_world_is_the_same_object_of_the_same_class() -> None:
    assert MPI.COMM_WORLD is WORLD and type(WORLD) is MPI.Intracomm
    assert WORLD.handle != watched.base().handle
    assert (WORLD.rank, WORLD.size) == (watched.base().rank, watched.base().size)
    assert WORLD.Get_name() == "MPI_COMM_WORLD"
    assert MPI.Intracomm(WORLD) == WORLD and watched.base() != WORLD
    assert MPI.Comm.Compare(WORLD, WORLD) == MPI.IDENT
    assert MPI.Comm.Compare(WORLD, watched.base()) == MPI.CONGRUENT
    assert MPI.Comm.f2py(WORLD.py2f()) == WORLD
    watched.install()
    assert watched.world() is WORLD


def test_it_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(WORLD)) is WORLD
    assert copy.copy(WORLD) is WORLD and copy.deepcopy([WORLD])[0] is WORLD
    assert pickle.loads(pickle.dumps(MPI.Intracomm(WORLD))) == WORLD
    duplicate = WORLD.Dup()
    with pytest.raises(ValueError, match="cannot serialize"):
        pickle.dumps(duplicate)
    duplicate.Free()


def test_predefined_attributes_are_those_of_the_real_world() -> None:
    for name in ("TAG_UB", "IO", "WTIME_IS_GLOBAL", "UNIVERSE_SIZE", "APPNUM", "LASTUSEDCODE"):
        key = getattr(MPI, name)
        assert WORLD.Get_attr(key) == watched.base().Get_attr(key), name
    key = MPI.Comm.Create_keyval()
    WORLD.Set_attr(key, "mine")
    assert WORLD.Get_attr(key) == "mine"
    WORLD.Delete_attr(key)


@pytest.mark.parametrize("method", ["Free", "Disconnect"])
def test_the_world_cannot_be_freed(method: str) -> None:
    for world in (WORLD, MPI.Intracomm(WORLD)):
        with pytest.raises(MPI.Exception) as caught:
            getattr(world, method)()
        assert caught.value.Get_error_class() == MPI.ERR_COMM
    WORLD.free()
    assert WORLD.allreduce(1) == WORLD.size


def test_errors_are_still_returned_and_arguments_still_checked() -> None:
    with pytest.raises(TypeError):
        WORLD.Send()
    with pytest.raises(MPI.Exception) as caught:
        WORLD.Bcast(np.zeros(1), root=WORLD.size)
    assert caught.value.Get_error_class() == MPI.ERR_ROOT
    before = watched.entered()["MPI.COMM_WORLD"][0]
    with pytest.raises(MPI.Exception):
        WORLD.Bcast(np.zeros(1), root=WORLD.size)
    with pytest.raises(TypeError):
        WORLD.Allreduce(object(), np.zeros(1))
    assert watched.entered()["MPI.COMM_WORLD"][0] == before  # none of them was a collective


def test_derived_communicators_are_named_alike_on_all_ranks() -> None:
    before = set(watched.entered())
    made = [
        WORLD.Dup(),
        WORLD.Split(WORLD.rank % 2, -WORLD.rank),
        WORLD.Create_cart([WORLD.size], periods=[True]),
        WORLD.Create_group(WORLD.group, tag=3),
        WORLD.Create_group(WORLD.group, tag=3),
    ]
    made.append(made[0].Dup())
    for communicator in made:
        communicator.Barrier()
    names = [name for name in watched.entered() if name not in before]
    assert len(names) == len(made)
    everyone = watched.base().allgather(names)
    for number, communicator in enumerate(made):
        with_me = watched.base().allgather(number == 1 and WORLD.rank % 2)
        for rank, same in enumerate(with_me):
            if number != 1 or same == WORLD.rank % 2:
                assert everyone[rank][number] == names[number]
            else:
                assert everyone[rank][number] != names[number]
        assert names[number].startswith("MPI.COMM_WORLD/")
        communicator.Free()
    assert not set(names) & set(watched.entered())


def test_collectives_are_counted_and_signed() -> None:
    part = WORLD.Dup()
    part.Bcast(np.zeros((10, 10), "f4"), root=0)
    part.Allreduce(MPI.IN_PLACE, np.zeros(3), op=MPI.MAX)
    part.Gather([np.zeros(4, "i8"), MPI.INT64_T], np.zeros(4 * part.size, "i8"), root=part.size - 1)
    column = MPI.DOUBLE.Create_vector(2, 1, 3).Commit()
    part.Bcast([np.zeros(6), 1, column], 0)
    column.Free()
    part.bcast({"any": 1}, root=0)
    part.allreduce(2)
    part.Ibarrier().Wait()
    part.barrier()
    name, (count, signatures) = list(watched.entered().items())[-1]
    assert name.startswith("MPI.COMM_WORLD/Dup ")
    assert (count, signatures) == (
        8,
        (
            "Bcast(root=0, float32 × 100)",
            "Allreduce(op=MAX, float64 × 3)",
            f"Gather(root={part.size - 1}, int64 × 4)",
            "Bcast(root=0, float64 × 2)",
            "bcast(root=0)",
            "allreduce(op=SUM)",
            "Ibarrier()",
            "Barrier()",
        ),
    )
    for _ in range(10):
        part.Barrier()
    count, signatures = watched.entered()[name]
    assert count == 18 and signatures == ("Barrier()",) * 8
    part.Free()


def test_messages_requests_windows_threads_and_intercommunicators_work() -> None:
    rank, size = WORLD.rank, WORLD.size
    right, left = (rank + 1) % size, (rank - 1) % size
    into = np.zeros(3)
    requests = [WORLD.Irecv(into, left, 1), WORLD.Isend(np.full(3, float(rank)), right, 1), MPI.REQUEST_NULL]
    assert type(requests[0]) is MPI.Request
    statuses: list[MPI.Status] = []
    assert MPI.Request.Waitall(requests, statuses) is True
    assert statuses[0].Get_source() == left and len(statuses) == 3
    assert into.tolist() == [left] * 3 and not any(requests)
    pair = [WORLD.irecv(source=left, tag=2), WORLD.isend({"from": rank}, right, 2)]
    assert MPI.Request.waitall(pair) == [{"from": left}, None]
    one = WORLD.irecv(source=left, tag=3)
    WORLD.send(rank, right, 3)
    assert MPI.Request.waitany([one]) == (0, left)
    lasting = WORLD.Recv_init(into, left, 4)
    for value in (1.0, 2.0):
        lasting.Start()
        WORLD.Send(np.full(3, value), right, 4)
        lasting.Wait()
        assert into.tolist() == [value] * 3
    lasting.Free()
    assert watched.under_way() == ()

    window = MPI.Win.Allocate(8, comm=WORLD)
    window.Fence()
    window.Put(np.array([float(rank)]), right)
    window.Fence()
    assert np.frombuffer(window.tomemory(), "d")[0] == left
    window.Free()

    answer: list[int] = []
    aside = WORLD.Dup()
    thread = threading.Thread(target=lambda: answer.append(aside.allreduce(1)))
    thread.start()
    assert WORLD.allreduce(rank) == sum(range(size))
    thread.join()
    assert answer == [size]
    aside.Free()

    if size > 1:
        half = WORLD.Split(int(rank >= size // 2))
        across = half.Create_intercomm(0, WORLD, size // 2 if rank < size // 2 else 0, 7)
        assert type(across) is MPI.Intercomm
        assert sorted(across.allgather(rank)) == [r for r in range(size) if (r < size // 2) != (rank < size // 2)]
        whole = across.Merge(rank >= size // 2)
        assert whole.allgather(rank) == list(range(size))
        for each in (whole, across, half):
            each.Free()


def test_requests_that_are_dropped_are_forgotten() -> None:
    from labkit.comm.watched_calls import begun

    for _ in range(2000):
        WORLD.isend(None, WORLD.rank, 5)
        WORLD.recv(source=WORLD.rank, tag=5)
    assert len(begun) < 1000


def test_labkits_own_communicators_are_not_watched() -> None:
    mine = Plain(watched.base().Dup())
    before = watched.entered()
    assert mine.allreduce(1) == mine.size
    assert vars(Plain)["Allreduce"] is not vars(MPI.Comm)["Allreduce"]
    assert watched.entered() == before
    mine.Free()


@revokes
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
    assert wait.place.startswith("check_watched.py:")
    assert 0 <= time.time() - wait.since < 120


@revokes
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


@revokes
@pytest.mark.parametrize("method", ["Ssend", "Send"])
def test_a_blocked_send_is_told_and_ended(method: str) -> None:
    with freed_once_blocked() as seen, suppress(MPI.Exception):  # Open MPI may let a revoked send end without error
        getattr(WORLD, method)(np.zeros(1_000_000), WORLD.rank, 4)
    assert (seen[0].kind, seen[0].text) == ("send", f"{method}(dest={WORLD.rank}, tag=4)")
    assert (seen[0].dtype, seen[0].count) == ("float64", 1_000_000)


@revokes
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


@revokes
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


@revokes
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


@revokes
def test_an_interrupt_goes_first_and_names_the_call() -> None:
    with freed_once_blocked(interrupt=True), pytest.raises(KeyboardInterrupt, match=r"^recv\(source=any, tag=6\)$"):
        WORLD.recv(tag=6)


@revokes
def test_a_deadline_that_ended_a_raw_call_is_named() -> None:
    error = rf"rank {WORLD.rank} waited .* in Recv\(source={WORLD.rank}, tag=6\).*check_watched\.py:\d+"
    ending = freed_once_blocked(end=watched.break_overdue)
    with ending, pytest.raises(comm.DeadlineError, match=error), comm.deadline(0.01):
        WORLD.Recv(np.zeros(1), WORLD.rank, 6)


@revokes
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


@revokes
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
