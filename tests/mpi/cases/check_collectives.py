"""Collectives agree with a truth computed on the spot, for every dtype, contiguous or not, at any world size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from labkit import comm

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
NUMPY = ["bool", "uint8", "int16", "uint32", "uint64", "float16", "float32", "complex128"]
LAYOUTS = ["contiguous", "strided", "empty", "scalar"]


def part(rank: int, dtype: Any, layout: str = "contiguous") -> Any:
    """What `rank` contributes: small whole numbers, so that every dtype holds the results exactly."""
    shape = {"contiguous": (2, 3), "strided": (3, 4), "empty": (0, 3), "scalar": ()}[layout]
    number = int(np.prod(shape))
    values = (torch.arange(number) * 7 + rank * 3) % 5
    tensor = (values % 2 if dtype == torch.bool else values).to(dtype).reshape(shape)
    return tensor.t()[::2] if layout == "strided" else tensor


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_copies_the_source(dtype: torch.dtype, layout: str) -> None:
    for src in range(comm.size):
        x = part(comm.rank, dtype, layout)
        assert comm.broadcast(x, src) is x
        assert equal(x, part(src, dtype, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_collect_in_rank_order(dtype: torch.dtype, layout: str) -> None:
    x = part(comm.rank, dtype, layout)
    wanted = [part(rank, dtype, layout) for rank in range(comm.size)]
    everyone = comm.all_gather(x)
    assert len(everyone) == comm.size
    assert all(equal(a, b) for a, b in zip(everyone, wanted, strict=True))
    dst = comm.size - 1
    at_root = comm.gather(x, dst)
    if comm.rank == dst:
        assert at_root is not None
        assert all(equal(a, b) for a, b in zip(at_root, wanted, strict=True))
    else:
        assert at_root is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_gives_each_rank_its_part(dtype: torch.dtype, layout: str) -> None:
    src = comm.size // 2
    parts = [part(rank, dtype, layout) for rank in range(comm.size)]
    for given in (parts, torch.stack(parts)):
        out = torch.zeros_like(part(0, dtype, layout))
        comm.scatter(out, given if comm.rank == src else None, src)
        assert equal(out, parts[comm.rank])


@pytest.mark.parametrize("dtype", DTYPES)
def test_variable_parts_find_their_ranks(dtype: torch.dtype) -> None:
    whole = (torch.arange(30).reshape(10, 3) % 5).to(dtype)
    bounds = [0, *sorted((rank * 4 + 3) % 10 for rank in range(comm.size - 1)), 10]
    parts = [whole[low:high] for low, high in itertools.pairwise(bounds)]
    mine = parts[comm.rank]
    out = torch.zeros(3, len(mine), dtype=dtype).t()  # not contiguous
    comm.scatterv(out, parts if comm.rank == 0 else None)
    assert equal(out, mine)
    assert equal(torch.cat(comm.all_gatherv(out)), whole)
    gathered = comm.gatherv(out, comm.size - 1)
    if comm.rank == comm.size - 1:
        assert gathered is not None
        assert equal(torch.cat(gathered), whole)
    else:
        assert gathered is None


def test_scatterv_names_both_lengths_where_out_does_not_fit() -> None:
    out = torch.zeros(3 if comm.rank == comm.size - 1 else 2)
    parts = [torch.ones(2) for _ in range(comm.size)]
    if comm.rank == comm.size - 1:
        with pytest.raises(comm.MismatchError, match=r"8 bytes .* out holds 12"):
            comm.scatterv(out, parts if comm.rank == 0 else None)
    else:
        comm.scatterv(out, parts if comm.rank == 0 else None)
        assert out.sum() == 2
    comm.barrier()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_transposes_across_ranks(dtype: torch.dtype) -> None:
    x = (torch.arange(comm.size * 6) % 2 + comm.rank % 2).to(dtype).reshape(comm.size * 2, 3)
    theirs = [
        (torch.arange(comm.size * 6) % 2 + rank % 2).to(dtype).reshape(comm.size * 2, 3) for rank in range(comm.size)
    ]
    out = torch.zeros_like(x)
    comm.all_to_all(out, x)
    assert equal(out, torch.cat([each[2 * comm.rank : 2 * comm.rank + 2] for each in theirs]))


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_arrays_move_like_tensors(name: str) -> None:
    def mine(rank: int) -> Any:
        return (np.arange(12).reshape(3, 4) % 3 + rank).astype(name)[:, ::2]

    x = mine(comm.rank)
    assert [a.tolist() for a in comm.all_gather(x)] == [mine(rank).tolist() for rank in range(comm.size)]
    comm.broadcast(x, comm.size - 1)
    assert equal(x, mine(comm.size - 1))
    assert comm.all_gather(np.array(comm.rank))[-1].shape == ()


def test_tensors_with_gradient_are_filled_in_place() -> None:
    weight = torch.nn.Parameter(torch.full((3, 2), float(comm.rank + 1)))
    comm.broadcast(weight, src=comm.size - 1)
    assert weight.requires_grad
    assert weight.tolist() == [[float(comm.size)] * 2] * 3


def test_conjugated_and_negated_views_are_seen_as_what_they_show() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(comm.all_gather(x.conj())[-1], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(comm.all_gather(x.conj().imag)[-1], torch.tensor([-2.0, 4.0]))


def test_eight_bit_floats_move() -> None:
    x = torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn)
    assert comm.all_gather(x)[-1].float().tolist() == [0.5, 1.5]


def test_split_makes_groups_that_work_apart() -> None:
    half = comm.world().split(comm.rank % 2, key=-comm.rank)
    assert half is not None
    assert half.size == len(range(comm.rank % 2, comm.size, 2))
    x = torch.tensor([float(comm.rank)])
    comm.all_reduce(x, group=half)
    assert x.item() == sum(range(comm.rank % 2, comm.size, 2))
    assert [int(each) for each in comm.all_gather(torch.tensor(comm.rank), group=half)] == list(half.members)
    half.free()
    with pytest.raises(comm.CommError):
        comm.barrier(group=half)
    nobody = comm.world().split(0 if comm.rank == 0 else None)
    assert (nobody is None) == (comm.rank != 0)
    twin = comm.world().dup()
    comm.barrier(group=twin)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: comm.broadcast([1, 2], 0), "expected a torch tensor or numpy array, got list"),
        (lambda: comm.broadcast(torch.ones(2), 99), "src=99 is no rank"),
        (lambda: comm.broadcast(torch.ones(2), -1), "src=-1 is no rank"),
        (lambda: comm.broadcast(torch.ones(2).to_sparse(), 0), "to_dense"),
        (lambda: comm.broadcast(torch.ones(2, device="meta"), 0), "meta device"),
        (lambda: comm.all_reduce(torch.ones(1).expand(3)), "expanded"),
        (lambda: comm.broadcast(np.array(["a"]), 0), "no MPI counterpart"),
        (lambda: comm.broadcast(np.ones(2, ">f4"), 0), "native byte order"),
        (lambda: comm.all_reduce(np.broadcast_to(np.float32(1), (3,))), "read-only"),
        (lambda: comm.all_to_all(torch.ones(comm.size), torch.ones(comm.size + 1)), "must be alike"),
        (lambda: comm.all_to_all(torch.ones(()), torch.ones(())), "cannot be cut"),
        (lambda: comm.scatter(torch.ones(1), [torch.ones(1)] * 9, comm.rank), "9 parts for"),
        (lambda: comm.scatter(torch.ones(1), None, comm.rank), "must give the parts"),
        (lambda: comm.reduce_scatter(torch.ones(2), torch.ones(comm.size * 2 + 1)), "need"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(call: Any, text: str) -> None:
    with pytest.raises(comm.ArgumentError, match=text):
        call()
    comm.barrier()
