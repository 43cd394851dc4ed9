"""Raw mpi4py under the watch: right programs stay right."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from mpi4py import MPI

from labkit.comm import watched
from labkit.comm.plain import Plain

pytestmark = pytest.mark.usefixtures("watching")

WORLD = MPI.COMM_WORLD


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
