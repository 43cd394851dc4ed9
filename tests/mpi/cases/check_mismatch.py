"""Ranks in different calls: each gets an error that lists every rank's side, and the next call is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from labkit import comm

Calls = tuple[Callable[[], Any], str]


def add(a: Any, b: Any) -> Any:
    return a + b


CASES: dict[str, tuple[Calls, Calls]] = {
    "operation": (
        (lambda: comm.all_reduce(torch.ones(3)), "all_reduce(sum, float32, shape (3,))"),
        (lambda: comm.broadcast(torch.ones(3), 0), "broadcast(src=0, float32, shape (3,))"),
    ),
    "op": (
        (lambda: comm.all_reduce(torch.ones(3)), "all_reduce(sum, float32, shape (3,))"),
        (lambda: comm.all_reduce(torch.ones(3), "mean"), "all_reduce(mean, float32, shape (3,))"),
    ),
    "shape": (
        (lambda: comm.all_reduce(torch.ones(3)), "all_reduce(sum, float32, shape (3,))"),
        (lambda: comm.all_reduce(torch.ones(3, 1)), "all_reduce(sum, float32, shape (3, 1))"),
    ),
    "dtype": (
        (lambda: comm.all_gather(torch.ones(3)), "all_gather(float32, shape (3,))"),
        (lambda: comm.all_gather(np.ones(3)), "all_gather(float64, shape (3,))"),
    ),
    "half or not": (
        (lambda: comm.all_reduce(torch.ones(3)), "all_reduce(sum, float32, shape (3,))"),
        (lambda: comm.all_reduce(torch.ones(3).bfloat16()), "all_reduce(sum, bfloat16, shape (3,))"),
    ),
    "root": (
        (lambda: comm.reduce(torch.ones(()), 0), "reduce(sum, dst=0, float32, shape ())"),
        (lambda: comm.reduce(torch.ones(()), comm.size - 1), "reduce(sum, dst={last}, float32, shape ())"),
    ),
    "algorithm": (
        (lambda: comm.all_reduce(torch.ones(2), "sum", "ring"), "all_reduce(sum, algorithm=ring, float32, shape (2,))"),
        (lambda: comm.all_reduce(torch.ones(2), "sum", "tree"), "all_reduce(sum, algorithm=tree, float32, shape (2,))"),
    ),
    "objects": (
        (lambda: comm.barrier(), "barrier()"),
        (lambda: comm.broadcast_object(1), "broadcast_object(src=0)"),
    ),
    "beyond the first dimension": (
        (lambda: comm.all_gatherv(torch.ones(1, 2)), "all_gatherv(float32, shape (any, 2))"),
        (lambda: comm.all_gatherv(torch.ones(1, 3)), "all_gatherv(float32, shape (any, 3))"),
    ),
}


@pytest.mark.parametrize("odd", [0, -1])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_sees_every_side(name: str, odd: int) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot differ from others")
    usual, other = CASES[name]
    odd %= comm.size
    with pytest.raises(comm.MismatchError) as caught:
        (other if comm.rank == odd else usual)[0]()
    text = str(caught.value)
    for rank in range(comm.size):
        side = (other if rank == odd else usual)[1].replace("{last}", str(comm.size - 1))
        assert re.search(rf"rank {rank}  {re.escape(side)}  \(check_mismatch\.py:\d+\)", text), text
    x = torch.full((4,), float(comm.rank))
    comm.all_reduce(x)
    assert x.tolist() == [sum(range(comm.size))] * 4


def test_a_mismatch_after_a_long_wait_is_seen_as_well() -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot differ from others")
    if comm.rank == 0:
        with pytest.raises(comm.DeadlineError):  # 0.2 s go by in a call of its own
            comm.recv(torch.ones(1), 0, 1, timeout=0.2)
    with pytest.raises(comm.MismatchError, match=r"rank 0  barrier\(\)"):
        comm.barrier() if comm.rank == 0 else comm.all_gather(torch.ones(1))
    comm.barrier()
