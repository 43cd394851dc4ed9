"""Large arrays are reduced in shared memory: rightly, the same to the bit on all ranks, whoever's lies where."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from labkit import comm
from labkit.comm import hosts, reductions, sharing
from labkit.comm.board import Board
from labkit.comm.buffers import reading
from labkit.comm.memory import MemoryMaking
from labkit.comm.windows import find

LARGE = 150_001
"""Elements: more than a board's slot holds of any dtype, several blocks, and divisible by no number of ranks."""
SHARES = os.environ.get("LABKIT_BOARD") != "0" and comm.size > 1
OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
DTYPES = ["float32", "float64", "int64", "int32", "uint8", "float16", "bfloat16", "complex64", "bool"]


def needs(ranks: int) -> None:
    if comm.size < ranks:
        pytest.skip(f"needs {ranks} ranks")


def windows() -> int:
    """How many windows this process has mapped."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return sum("labkit-window" in line for line in lines)


def draw(rank: int, dtype: str, length: int, seed: int = 0) -> torch.Tensor:
    """What `rank` begins with."""
    numbers = np.random.default_rng((seed, rank)).standard_normal(length) * 3
    if dtype == "uint8":
        return torch.from_numpy(np.abs(numbers)).to(torch.uint8)
    if dtype == "bool":
        return torch.from_numpy(numbers > 0)
    return torch.from_numpy(numbers).to(getattr(torch, dtype))


def truth(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Combined in rank order, in float32 where the parts are of half width, and rounded once."""
    dtype = parts[0].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    arrays = [(part.float() if half else part).numpy() for part in parts]
    result = arrays[0].copy()
    for array in arrays[1:]:
        OPS[op](result, array, out=result)
    return torch.from_numpy(result / np.float32(len(parts)) if op == "mean" else result).to(dtype)


def check(x: torch.Tensor, op: str, dtype: str, seed: int = 0, group: Any = None, exact: bool = True) -> None:
    """Fill `x`, reduce it, compare."""
    members = group or comm.world()
    x.copy_(draw(members.rank, dtype, len(x), seed))
    assert comm.all_reduce(x, op, group=group) is x
    wanted = truth(op, [draw(rank, dtype, len(x), seed) for rank in range(members.size)])
    near = 1e-2 if x.dtype.is_floating_point and x.dtype.itemsize == 2 else 1e-5  # MPI may add in another order
    same = torch.equal(x, wanted) if exact else torch.allclose(x, wanted, rtol=near, atol=10 * near)
    assert same, (op, dtype, x, wanted)


def allowed(op: str, dtype: str) -> bool:
    if dtype in ("bool", "complex64") and op in ("min", "max"):
        return dtype == "bool"
    return not (op == "mean" and dtype in ("int64", "int32", "uint8", "bool")) and (op, dtype) != ("sum", "bool")


def lies_in_a_window(x: torch.Tensor, group: Any = None) -> bool:
    return find(group or comm.world(), x) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ops_agree_with_numpy_in_a_window_and_outside(dtype: str) -> None:
    x = comm.shared_zeros(LARGE, getattr(torch, dtype))
    assert lies_in_a_window(x) == SHARES
    assert not x.any()
    for seed, op in enumerate(OPS):
        if allowed(op, dtype):
            check(x, op, dtype, seed)
            check(torch.empty_like(x), op, dtype, seed, exact=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ring_reduces_very_large_arrays_that_lie_elsewhere_on_some_ranks(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions, "RING_FROM_BYTES", 500_000)
    length = LARGE + len(dtype)  # of which no call is known yet
    x = comm.shared_zeros(length, getattr(torch, dtype))
    check(torch.empty_like(x) if comm.rank == 0 else x, "mean", dtype, exact=False)
    assert any("ring" in call.text for key, call in comm.world().calls.items() if (length,) in key) == (comm.size > 1)


def test_slices_and_lengths_that_do_not_divide() -> None:
    x = comm.shared_zeros(3 * LARGE, torch.float32)
    for start, length in [(0, 2 * LARGE), (1, LARGE), (LARGE, LARGE - 7), (17, 5), (5, 0), (3 * LARGE - 1, 1)]:
        x.fill_(-1)
        check(x[start : start + length], "sum", "float32", exact=comm.size <= 3)
        assert (x[:start] == -1).all()
        assert (x[start + length :] == -1).all()
    check(x[::2], "mean", "float32", exact=False)  # not contiguous: through a copy
    for shape in ((), (0,), (3, 0), (2, 3)):
        y = comm.shared_zeros(shape, np.float64)
        y[...] = comm.rank
        comm.all_reduce(y)
        assert y.shape == shape
        assert (y == sum(range(comm.size))).all()


def test_numpy_and_torch_tell_by_the_dtype_asked_for() -> None:
    array = comm.shared_zeros((2, LARGE), "int64")
    assert isinstance(array, np.ndarray)
    array[...] = comm.rank
    comm.all_reduce(array, "max")
    assert (array == comm.size - 1).all()
    parameter = torch.nn.Parameter(comm.shared_zeros(LARGE, torch.float32))
    with torch.no_grad():
        parameter.fill_(comm.rank)
    comm.all_reduce(parameter, "mean")
    assert torch.allclose(parameter, torch.tensor((comm.size - 1) / 2))
    for wrong in ("bfloat16", "float8_e5m2", "object", "U4"):
        with pytest.raises(comm.ArgumentError, match=r"shared_zeros.*dtype"):
            comm.shared_zeros(3, wrong)


def test_nan_and_infinity_stay_what_they_are() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = comm.shared_zeros(LARGE, dtype)
        x[:3] = torch.tensor([float("nan"), float("inf"), torch.finfo(dtype).max])
        comm.all_reduce(x)
        assert x[0].isnan()
        assert x[1].isinf()
        assert x[2].isinf() or comm.size == 1


def test_every_rank_has_the_same_bits() -> None:
    for x in (comm.shared_zeros(LARGE, torch.float32), torch.empty(LARGE)):
        for op in ("sum", "mean", "product"):
            x.copy_(draw(comm.rank, "float32", LARGE))
            comm.all_reduce(x, op)
            assert all(torch.equal(x, other) for other in comm.all_gather(x))


def test_arrays_that_lie_differently_are_reduced_all_the_same() -> None:
    x = comm.shared_zeros(2 * LARGE, torch.bfloat16)
    y = comm.shared_zeros(LARGE, torch.bfloat16)
    mine = [x[:LARGE], x[LARGE:], y, torch.zeros(LARGE, dtype=torch.bfloat16)]
    for turn in range(4):  # who begins where takes turns
        check(mine[(comm.rank + turn) % 4], "mean", "bfloat16", turn, exact=False)
        check(x[:LARGE], "sum", "bfloat16", turn)  # and in between, all alike


def test_a_mismatch_is_named_and_moves_nothing() -> None:
    needs(2)
    x = comm.shared_zeros(LARGE, torch.float32)
    x.fill_(comm.rank)
    with pytest.raises(comm.MismatchError) as caught:
        comm.all_reduce(x, "max" if comm.rank == 0 else "sum")
    assert "rank 0  all_reduce(max, float32, shape (150001,))" in str(caught.value)
    assert "rank 1  all_reduce(sum, float32, shape (150001,))" in str(caught.value)
    assert (x == comm.rank).all()
    with pytest.raises(comm.MismatchError, match=r"shared_zeros\(float32, shape \(3,\)\)"):
        comm.shared_zeros(3 + comm.rank, torch.float32)
    check(x, "sum", "float32")


def test_after_a_renewal_the_arrays_are_used_as_before() -> None:
    x = comm.shared_zeros(LARGE, torch.float32)
    part = comm.world().dup()
    y = comm.shared_zeros(LARGE, torch.float32, group=part)
    check(y, "sum", "float32", group=part)
    assert lies_in_a_window(y, part) == SHARES
    comm.renew()
    check(x, "sum", "float32")
    assert lies_in_a_window(x) == SHARES
    assert not lies_in_a_window(y)
    check(y, "sum", "float32", exact=False)


def test_who_waits_too_long_gives_up_and_the_renewed_world_works() -> None:
    needs(2)
    x = comm.shared_zeros(LARGE, torch.float32)
    for y in (x, torch.zeros(LARGE)):
        y.fill_(comm.rank)
        if comm.rank != 0:
            with pytest.raises((comm.DeadlineError, comm.CommError)):
                comm.all_reduce(y, timeout=0.05)
        comm.renew()
        assert (y == comm.rank).all()
        check(x, "sum", "float32")


@contextmanager
def interrupted_in(module: Any, name: str) -> Iterator[None]:
    """Ctrl-C in the middle of a reduction: when it first calls this."""
    real, calls = getattr(module, name), iter([True])

    def stop(*args: Any) -> Any:
        if next(calls, False):
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    setattr(module, name, stop)
    try:
        yield
    finally:
        setattr(module, name, real)


@pytest.mark.skipif(not SHARES, reason="without shared memory MPI's own call runs")
@pytest.mark.parametrize("method", ["_spread", "_wait"])
def test_an_interrupt_in_the_middle_ends_it_on_all_ranks(method: str) -> None:
    needs(2)
    x = comm.shared_zeros(LARGE, torch.float32)
    if comm.rank == 0:
        with interrupted_in(sharing.Reduction, method), pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x)
        assert comm.world().abandoned
    else:
        # Its share may have been done before: then what comes next is refused.
        with pytest.raises(comm.CommError, match=r"rank \d gave up"), nullcontext(comm.all_reduce(x)):
            comm.barrier()
    comm.renew()
    check(x, "mean", "float32")


def test_where_stores_may_be_seen_out_of_order_mpi_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot = comm.world().ballot
    if isinstance(ballot, Board):
        monkeypatch.setattr(ballot, "carries_data", False)
    x = comm.shared_zeros(LARGE + 1, torch.float32)
    assert not lies_in_a_window(x)
    assert not sharing.suits(comm.world(), reading(x, ""))
    check(x, "sum", "float32", exact=False)


@pytest.mark.parametrize("board", [True, False])
def test_ranks_of_several_hosts_reduce_inside_each_host_first(board: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(3)
    if not board:
        monkeypatch.setenv("LABKIT_BOARD", "0")  # as where hosts share no memory
    group = comm.world().dup()
    monkeypatch.undo()
    monkeypatch.setattr(hosts, "here", lambda: f"host {comm.rank // 2}")  # of 2 and 1 or of 2 and 2 ranks
    if board:
        hosts.arrange(group)
    else:  # by itself
        assert not group.arranged
        check_across(torch.empty(LARGE), "sum", "float32", group)
        assert group.arranged
    arranged = group.hosts
    if not SHARES:
        assert arranged is None
        return
    assert arranged is not None
    assert arranged.owners == min(2, comm.size - 2)
    assert (arranged.across is None) == (comm.rank % 2 >= arranged.owners)
    for dtype in ("float32", "bfloat16", "int64"):
        x = comm.shared_zeros(LARGE, getattr(torch, dtype), group=group)
        assert lies_in_a_window(x, group)
        for op in ("sum", "mean", "max"):
            if allowed(op, dtype):
                check_across(x, op, dtype, group)
        elsewhere = torch.empty_like(x) if comm.rank == 0 else x
        check_across(elsewhere, "sum", dtype, group)
        assert all(torch.equal(elsewhere, other) for other in comm.all_gather(elsewhere))
    for each in (arranged.inside, arranged.across, group):
        if each is not None:
            each.free()


def check_across(x: torch.Tensor, op: str, dtype: str, group: Any) -> None:
    """Like `check`; between hosts the order of additions is another one."""
    x.copy_(draw(group.rank, dtype, len(x)))
    comm.all_reduce(x, op, group=group)
    wanted = truth(op, [draw(rank, dtype, len(x)) for rank in range(group.size)])
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    assert torch.allclose(x, wanted, rtol=tolerance, atol=tolerance), (op, dtype)


def test_a_making_that_is_interrupted_at_its_end_can_be_taken_up_again() -> None:
    making = MemoryMaking(comm.world().private, "labkit-window", 4096)
    while not making.over():
        pass
    memory = making.memory
    making._over = False  # as if the last step's last line had not been reached
    assert making.over()
    assert making.memory is memory is not None


def test_the_memory_goes_with_the_arrays() -> None:
    before = windows()
    for number in range(200):
        x = comm.shared_zeros(LARGE + number, torch.float32)
        if number % 50 == 0:
            check(x, "sum", "float32")
    view = x[5:7]
    del x
    assert windows() <= before + 1
    view.fill_(1)  # the memory is there as long as anything refers to it
    del view
    assert windows() == before
    assert len(comm.world().windows) <= before + 2  # the last two: one was made while the other was still there


def test_an_array_that_one_rank_has_no_more_is_an_ordinary_one() -> None:
    x = comm.shared_zeros(LARGE, torch.float32)
    if comm.rank == comm.size - 1:
        x = torch.zeros(LARGE)
        gc.collect()
    check(x, "sum", "float32", exact=False)
