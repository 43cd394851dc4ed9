"""torch.distributed's groups on back end "mpi": made, destroyed and made again; and what goes wrong has a name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from labkit import comm

GPUS = "nccl" if torch.cuda.is_available() else "gloo"
"""nccl does not start without a GPU, whatever stands beside it."""
SHORT = timedelta(seconds=0.2)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """One process group for the module's tests."""
    dist.init_process_group("mpi")
    yield
    dist.destroy_process_group()


def ring() -> tuple[int, int]:
    """The ranks to the right and to the left."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_groups() -> None:
    size, rank = comm.size, comm.rank
    last = dist.new_group([size - 1])
    most = dist.new_group(range(max(1, size - 1)))  # disjoint from it where there are several ranks
    for group, ranks in ((last, [size - 1]), (most, list(range(max(1, size - 1))))):
        if rank in ranks:
            x = torch.tensor([rank + 1])
            dist.all_reduce(x, group=group)
            assert x.tolist() == [sum(r + 1 for r in ranks)]
            assert dist.get_process_group_ranks(group) == ranks
            assert dist.get_group_rank(group, rank) == ranks.index(rank)
            root = torch.tensor([rank])
            dist.broadcast(root, src=ranks[-1], group=group)
            assert root.tolist() == [ranks[-1]]
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            x = torch.ones(1)
            with pytest.warns(UserWarning, match="does not belong to"):
                dist.all_reduce(x, group=group)
            assert x.tolist() == [1]
    backwards = dist.new_group(list(range(size))[::-1])
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, rank, group=backwards)
    assert sorted(gathered) == list(range(size))
    mine, every = dist.new_subgroups(1)
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [rank] and len(every) == size
    whole, _ = dist.new_subgroups_by_enumeration([list(range(size))])
    dist.all_reduce(x, group=whole)
    assert x.tolist() == [sum(range(size))]
    for group in (last, most):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
            with pytest.raises(ValueError, match=r"[Ii]nvalid process group|not initialized"):
                dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(x)
    assert x.tolist() == [size * sum(range(size))]


def test_destroyed_and_made_again() -> None:
    for round_ in range(3):
        part_ = dist.new_group([0])
        dist.destroy_process_group()
        assert not dist.is_initialized() and part_ is not None
        dist.init_process_group("mpi")
        x = torch.tensor([round_])
        dist.all_reduce(x)
        assert x.tolist() == [round_ * comm.size]


@pytest.mark.parametrize("backend", [f"cpu:mpi,cuda:{GPUS}", "labkit", "cpu:labkit", "mpi"])
def test_with_the_rendezvous_that_needs_no_address(backend: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method="mpi://")
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    x = torch.full((3,), comm.rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(1, comm.size + 1))] * 3
    gathered = [torch.zeros(1) for _ in range(comm.size)]
    dist.all_gather(gathered, torch.tensor([float(comm.rank)]))
    assert [y.item() for y in gathered] == list(range(comm.size))
    several = dist.new_group(list(range(comm.size)))
    dist.all_reduce(x, group=several)
    assert x.tolist() == [comm.size * sum(range(1, comm.size + 1))] * 3
    right, left = ring()
    out = torch.zeros(2)
    sending = dist.isend(torch.full((2,), float(comm.rank)), right)
    dist.recv(out, left)
    assert sending is not None and sending.wait() and out.tolist() == [left] * 2
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("mpi")


def test_a_wait_that_is_too_long_names_itself_and_leaves_the_group_good() -> None:
    x = torch.zeros(3)
    work = dist.irecv(x, ring()[1], tag=9)
    assert work is not None and not work.is_completed()
    with pytest.raises(comm.DeadlineError, match=rf"rank {comm.rank}.*recv\(src={ring()[1]}, tag=9, float32 × 3\)"):
        work.wait(SHORT)
    dist.barrier()  # nobody sends before all have waited in vain
    dist.isend(torch.ones(3), ring()[0], tag=9)
    assert work.wait() and x.tolist() == [1, 1, 1]
    dist.barrier()


def test_a_collective_that_a_rank_leaves_out_ends_after_the_group_s_timeout() -> None:
    if comm.size > 1:
        group = dist.new_group(list(range(comm.size)), timeout=SHORT)
        if comm.rank:
            with pytest.raises(comm.CommError, match="all_reduce"):
                dist.all_reduce(torch.ones(2), group=group)
        dist.barrier()
    with pytest.raises(comm.ArgumentError, match=r"parts|tensors"):
        dist.all_gather([torch.zeros(1)] * (comm.size + 1), torch.zeros(1))
    dist.barrier()


def test_a_monitored_barrier_names_who_does_not_come() -> None:
    dist.monitored_barrier()
    last = comm.size - 1
    if comm.size == 1:
        return
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=f"Rank {last} failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=SHORT)
    elif comm.rank != last:
        with pytest.raises(RuntimeError, match=r"no answer|waiting for"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("mpi")


def test_calls_that_do_not_match_are_told_to_all_ranks() -> None:
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    for call in (
        lambda: dist.all_reduce(torch.ones(3 if odd else 2)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        lambda: dist.all_reduce(torch.ones(2), ReduceOp.MAX if odd else ReduceOp.SUM),
        lambda: dist.broadcast(torch.ones(2), src=1 if odd else 0),
        lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(2)),
        lambda: dist.all_gather([torch.zeros(1 + odd)] * comm.size, torch.zeros(1 + odd)),
        lambda: dist.all_to_all_single(
            torch.zeros(comm.size),
            torch.zeros(comm.size),
            [1] * comm.size,
            [2, 0] + [1] * (comm.size - 2) if odd else [1] * comm.size,
        ),
    ):
        with pytest.raises(comm.MismatchError) as caught:
            call()
        assert re.search(rf"rank {comm.size - 1}", str(caught.value))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.tolist() == [comm.size]


def test_a_message_of_another_size_or_dtype_is_named_and_kept() -> None:
    right, left = ring()
    sending = dist.isend(torch.arange(5.0), right, tag=2)
    with pytest.raises(comm.MismatchError, match=rf"holds 12 bytes .*rank {left} sent 20 bytes \(5 × float32, tag 2\)"):
        dist.recv(torch.zeros(3), left, tag=2)
    with pytest.raises(comm.MismatchError, match="expects int64, but"):
        dist.recv(torch.zeros(5, dtype=torch.int64), left, tag=2)
    x = torch.zeros(5)
    dist.recv(x, left, tag=2)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert sending is not None and sending.wait()


def test_gloo_groups_find_each_other_without_an_address() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(backend="gloo")
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=everyone)
    assert x.tolist() == [sum(range(size))] * 3
    assert (dist.get_backend(everyone), dist.get_backend()) == ("gloo", "mpi")

    last = dist.new_group([size - 1], backend="cpu:gloo")
    if rank == size - 1:
        y = torch.ones(2)
        dist.all_reduce(y, group=last)
        assert y.tolist() == [1, 1]
    else:
        assert last == dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()
