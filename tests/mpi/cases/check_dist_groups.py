"""Process groups of other back ends beside a default group of "mpi"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist


@pytest.fixture(autouse=True)
def _default_group() -> Iterator[None]:
    dist.init_process_group("mpi")
    yield
    dist.destroy_process_group()


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
