"""Python objects reach the other ranks."""

from __future__ import annotations

import pytest

from labkit import comm

THINGS = [None, {"rank": [1, 2.5, "three"]}, "x" * 1_000_000]


@pytest.mark.parametrize("number", range(len(THINGS)))
def test_objects_arrive_as_they_were(number: int) -> None:
    thing = THINGS[number]
    for root in range(comm.size):
        assert comm.broadcast_object(thing if comm.rank == root else "nothing", root) == thing
        gathered = comm.gather_object((comm.rank, thing), root)
        assert gathered == ([(rank, thing) for rank in range(comm.size)] if comm.rank == root else None)
        things = [(rank, thing) for rank in range(comm.size)] if comm.rank == root else None
        assert comm.scatter_object(things, root) == (comm.rank, thing)
    assert comm.all_gather_object((comm.rank, thing)) == [(rank, thing) for rank in range(comm.size)]


def test_an_object_goes_from_rank_to_rank() -> None:
    if comm.size == 1:
        pytest.skip("needs 2 ranks")
    for thing in THINGS:
        if comm.rank == 0:
            comm.send_object(thing, 1, tag=4)
        elif comm.rank == 1:
            assert comm.recv_object(0, 4) == thing


def test_what_cannot_be_pickled_is_refused_before_it_is_sent() -> None:
    with pytest.raises(comm.ArgumentError, match="cannot be pickled"):
        comm.send_object(lambda: 0, 0)
    with pytest.raises(comm.ArgumentError, match="cannot be pickled"):
        comm.broadcast_object(lambda: 0, comm.rank)
    comm.barrier()
