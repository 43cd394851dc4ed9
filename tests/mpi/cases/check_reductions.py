"""Reductions agree with a truth computed on the spot, by every algorithm."""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

import numpy as np
import pytest
import torch

from labkit import comm
from tests.mpi.cases.check_collectives import DTYPES, LAYOUTS, equal, part

WAYS = ["library", *comm.ALGORITHMS]
OPS = {"sum": operator.add, "product": operator.mul, "min": torch.minimum, "max": torch.maximum}


def allowed(dtype: torch.dtype, op: str) -> bool:
    if dtype == torch.bool:
        return op in ("min", "max", "product")
    return not (dtype.is_complex and op in ("min", "max"))


def truth(op: str, parts: list[Any]) -> Any:
    if parts[0].dtype == torch.bool:
        parts = [each.to(torch.uint8) for each in parts]
        return functools.reduce(OPS[op], parts).to(torch.bool)
    return functools.reduce(OPS[op], parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_is_right_for_every_op_and_algorithm(dtype: torch.dtype, layout: str) -> None:
    for op in OPS:
        if not allowed(dtype, op):
            continue
        wanted = truth(op, [part(rank, dtype, layout) for rank in range(comm.size)])
        for algorithm in WAYS:
            x = part(comm.rank, dtype, layout)
            assert comm.all_reduce(x, op, algorithm) is x
            assert equal(x, wanted), (op, algorithm, x, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scan_and_reduce_scatter_are_right(dtype: torch.dtype, layout: str) -> None:
    for op in OPS:
        if not allowed(dtype, op):
            continue
        parts = [part(rank, dtype, layout) for rank in range(comm.size)]
        x, dst = part(comm.rank, dtype, layout), comm.size - 1
        comm.reduce(x, dst, op)
        assert equal(x, truth(op, parts) if comm.rank == dst else parts[comm.rank])
        x = part(comm.rank, dtype, layout)
        comm.scan(x, op)
        assert equal(x, truth(op, parts[: comm.rank + 1]))
        stacks = [
            torch.stack([part(rank + other, dtype, layout) for other in range(comm.size)]) for rank in range(comm.size)
        ]
        out = torch.zeros_like(parts[0])
        comm.reduce_scatter(out, stacks[comm.rank], op)
        assert equal(out, truth(op, stacks)[comm.rank])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_mean_divides_the_sum(dtype: torch.dtype) -> None:
    parts = [part(rank, dtype) for rank in range(comm.size)]
    wide = [each.to(torch.complex128 if dtype.is_complex else torch.float64) for each in parts]
    for algorithm in WAYS:
        x = part(comm.rank, dtype)
        comm.all_reduce(x, "mean", algorithm)
        assert torch.allclose(x.to(wide[0].dtype), (sum(wide) / comm.size).to(dtype).to(wide[0].dtype), rtol=1e-6)
    x = part(comm.rank, dtype)
    comm.scan(x, "mean")
    mean = (sum(wide[: comm.rank + 1]) / (comm.rank + 1)).to(dtype)
    assert torch.allclose(x, mean, rtol=1e-6)
    y = part(comm.rank, dtype).numpy() if dtype != torch.bfloat16 else part(comm.rank, dtype)
    comm.reduce(y, 0, "mean")
    if comm.rank == 0:
        assert torch.allclose(torch.as_tensor(y).to(wide[0].dtype), (sum(wide) / comm.size).to(dtype).to(wide[0].dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_sums_are_rounded_once(dtype: torch.dtype) -> None:
    # 256 + 1 is no bfloat16: rounding after every addition would lose all the ones.
    big = 256.0 if dtype == torch.bfloat16 else 2048.0
    values = [big] + [1.0] * (comm.size - 1)
    for algorithm in WAYS:
        x = torch.full((5,), values[comm.rank], dtype=dtype)
        comm.all_reduce(x, "sum", algorithm)
        assert x.tolist() == torch.full((5,), sum(values)).to(dtype).tolist()
    x = torch.full((comm.size,), values[comm.rank], dtype=dtype)
    out = torch.zeros((), dtype=dtype)
    comm.reduce_scatter(out, x)
    assert out.item() == torch.tensor(sum(values)).to(dtype).item()


def test_every_rank_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for algorithm in WAYS:
        for length in (1, 2, 3, 7, 100, 1001):
            x = torch.randn(length, generator=generator)
            comm.all_reduce(x, "sum", algorithm)
            assert all(torch.equal(x, other) for other in comm.all_gather(x)), (algorithm, length)


def test_random_programs_give_the_same_by_all_algorithms() -> None:
    draw = random.Random(20)
    for _ in range(60):
        length, op = draw.randrange(0, 200), draw.choice(["sum", "mean", "min", "max"])
        dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
        seeds = [draw.randrange(10**6) for _ in range(comm.size)]
        parts = [torch.randint(-50, 50, (length,), generator=torch.Generator().manual_seed(s)).to(dtype) for s in seeds]
        results = []
        for algorithm in draw.sample(WAYS, len(WAYS)):
            x = parts[comm.rank].clone()
            comm.all_reduce(x, op, algorithm)
            results.append(x)
        wide = torch.stack([each.double() for each in parts])
        wanted = {"sum": wide.sum(0), "mean": wide.mean(0), "min": wide.amin(0), "max": wide.amax(0)}[op]
        for x in results:
            assert torch.allclose(x.double(), wanted.to(dtype).double(), rtol=1e-6)


def test_a_function_is_applied_in_rank_order() -> None:
    def second(a: Any, b: Any) -> Any:  # associative, not commutative
        return b

    def compose(a: Any, b: Any) -> Any:  # product of 2×2 matrices
        return a @ b

    matrices = [torch.tensor([[1, rank], [1, 1 - rank]]) for rank in range(comm.size)]
    for algorithm in [None, "to_root", "tree", "recursive_doubling"]:
        x = torch.full((3,), comm.rank, dtype=torch.bfloat16)
        comm.all_reduce(x, second, algorithm)
        assert x.tolist() == [comm.size - 1] * 3
        x = matrices[comm.rank].clone()
        comm.all_reduce(x, compose, algorithm)
        assert torch.equal(x, functools.reduce(operator.matmul, matrices))
        y = np.array([[1, comm.rank], [1, 1 - comm.rank]]).T
        comm.all_reduce(y, compose, algorithm)
        assert (y == functools.reduce(operator.matmul, [m.T.numpy() for m in matrices])).all()
    x = matrices[comm.rank].clone()
    comm.scan(x, compose)
    assert torch.equal(x, functools.reduce(operator.matmul, matrices[: comm.rank + 1]))
    x = matrices[comm.rank].clone()
    comm.reduce(x, 0, compose)
    assert torch.equal(x, functools.reduce(operator.matmul, matrices) if comm.rank == 0 else matrices[comm.rank])
    out = torch.zeros(1, dtype=torch.int64)
    comm.reduce_scatter(out, torch.arange(comm.size) + comm.rank, second)
    assert out.item() == comm.rank + comm.size - 1
    with pytest.raises(comm.ArgumentError, match="out of rank order"):
        comm.all_reduce(torch.ones(2), compose, "ring")


def test_a_function_that_raises_or_returns_nonsense_is_an_error_on_every_rank() -> None:
    if comm.size == 1:
        pytest.skip("nothing to combine on one rank")
    with pytest.raises(ZeroDivisionError):
        comm.all_reduce(torch.ones(1), lambda a, b: 1 // 0)
    with pytest.raises(comm.ArgumentError, match="must return one of shape"):
        comm.all_reduce(torch.ones(2), lambda a, b: 3.0)
    x = torch.ones(1)
    comm.all_reduce(x)
    assert x.item() == comm.size


@pytest.mark.parametrize(
    ("x", "op", "text"),
    [
        (torch.ones(2, dtype=torch.bool), "sum", "op='max'"),
        (torch.ones(2, dtype=torch.bool), "mean", "op='max'"),
        (torch.ones(2, dtype=torch.int64), "mean", r"x\.float\(\)"),
        (np.ones(2, "uint8"), "mean", r"x\.float\(\)"),
        (torch.ones(2, dtype=torch.complex64), "min", "no order"),
        (torch.ones(2).to(torch.float8_e5m2), "sum", "moved but not reduced"),
        (torch.ones(2), "average", "unknown. Known: sum, mean"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_cure(x: Any, op: str, text: str) -> None:
    for call in (comm.all_reduce, comm.scan, lambda x, op: comm.reduce(x, 0, op)):
        with pytest.raises(comm.ArgumentError, match=text):
            call(x, op)
    comm.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_are_right_however_they_are_made(dtype: torch.dtype) -> None:
    x = torch.arange(9_000_001).remainder(11).to(dtype) + comm.rank
    wanted = (torch.arange(9_000_001).remainder(11) * comm.size + sum(range(comm.size))).to(dtype)
    for algorithm in (None, "library"):
        y = x.clone()
        comm.all_reduce(y, "sum", algorithm)
        assert torch.equal(y, wanted)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(comm.ArgumentError, match="Known: library, to_root"):
        comm.all_reduce(torch.ones(2), "sum", "magic")


def test_gradients_are_averaged_in_place() -> None:
    weight = torch.nn.Parameter(torch.full((4,), float(comm.rank)))
    comm.all_reduce(weight, "mean")
    assert weight.tolist() == [(comm.size - 1) / 2] * 4
    assert weight.requires_grad
