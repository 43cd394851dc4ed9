"""Every call of torch.distributed on back end "mpi": its result is what each rank can work out for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from labkit import comm
from labkit.comm import pieces as cutting
from tests.mpi.cases.check_collectives import DTYPES, LAYOUTS, equal, part

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """One process group for the module's tests."""
    dist.init_process_group("mpi")
    yield
    dist.destroy_process_group()


def everyone(dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> list[torch.Tensor]:
    """What the ranks contribute, in their order."""
    return [part(rank, dtype, layout) for rank in range(comm.size)]


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, as torch's back ends see it: of bool, whether any is true."""
    if parts[0].dtype is torch.bool:
        return torch.stack(parts).any(0)
    return torch.stack([x.to(torch.complex128) for x in parts]).sum(0).to(parts[0].dtype)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(equal(a, b) for a, b in zip(found, wanted, strict=True))


def ring() -> tuple[int, int]:
    """The ranks to the right and to the left."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_it_is_the_back_end_called_mpi_on_a_wheel_without_one() -> None:
    assert dist.is_mpi_available() and dist.is_backend_available("mpi")
    assert dist.get_backend() == "mpi"
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_of_every_dtype(dtype: torch.dtype, layout: str) -> None:
    wanted, root = everyone(dtype, layout), comm.size - 1
    mine = wanted[comm.rank]

    x = mine.clone()
    dist.all_reduce(x)
    assert equal(x, total(wanted))

    y = part(comm.rank, dtype, layout)
    dist.reduce(y, root)
    assert comm.rank != root or equal(y, total(wanted))

    z = part(comm.rank, dtype, layout)
    dist.broadcast(z, root)
    assert equal(z, wanted[root])

    gathered = [torch.zeros_like(mine) for _ in wanted]
    dist.all_gather(gathered, mine)
    assert same(gathered, wanted)

    at_root = [torch.zeros_like(mine) for _ in wanted] if comm.rank == root else None
    dist.gather(mine, at_root, root)
    assert at_root is None or same(at_root, wanted)

    out = torch.zeros_like(mine)
    dist.scatter(out, wanted if comm.rank == root else None, root)
    assert equal(out, mine)

    out = torch.zeros_like(mine)
    dist.reduce_scatter(out, wanted)
    assert equal(out, total([mine] * comm.size))

    exchanged = [torch.zeros_like(mine) for _ in wanted]
    dist.all_to_all(exchanged, [mine] * comm.size)
    assert same(exchanged, wanted)

    right, left = ring()
    out = torch.zeros_like(mine)
    sending = dist.isend(mine, right, tag=3)
    assert dist.recv(out, left, tag=3) == left
    assert sending is not None and sending.wait()
    assert equal(out, wanted[left])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_moved_and_never_reduced(dtype: torch.dtype) -> None:
    values = [torch.full((5,), rank + 1.0).to(dtype) for rank in range(comm.size)]
    mine = values[comm.rank]
    gathered = [torch.zeros_like(mine) for _ in values]
    dist.all_gather(gathered, mine)
    assert [x.float().tolist() for x in gathered] == [[rank + 1.0] * 5 for rank in range(comm.size)]
    x = mine.clone()
    dist.broadcast(x, comm.size - 1)
    assert x.float().tolist() == [float(comm.size)] * 5
    with pytest.raises(comm.ArgumentError, match=r"float8.* can be moved but not reduced"):
        dist.all_reduce(x)


@pytest.mark.parametrize(
    ("op", "combine"),
    [
        (ReduceOp.SUM, lambda a: a.sum(0)),
        (ReduceOp.AVG, lambda a: a.sum(0, dtype=torch.promote_types(a.dtype, torch.float32)) / len(a)),
        (ReduceOp.PRODUCT, lambda a: a.prod(0)),
        (ReduceOp.MIN, lambda a: a.amin(0)),
        (ReduceOp.MAX, lambda a: a.amax(0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_operations(op: Any, combine: Any, dtype: torch.dtype) -> None:
    values = torch.stack(everyone(dtype))
    x = values[comm.rank].clone()
    dist.all_reduce(x, op)
    assert equal(x, combine(values).to(dtype))


def test_operations_on_bits_and_by_a_factor() -> None:
    values = [rank * 5 + 3 for rank in range(comm.size)]
    for op, combine in (
        (ReduceOp.BAND, int.__and__),
        (ReduceOp.BOR, int.__or__),
        (ReduceOp.BXOR, int.__xor__),
    ):
        wanted = values[0]
        for value in values[1:]:
            wanted = combine(wanted, value)
        x = torch.tensor([values[comm.rank]])
        dist.all_reduce(x, op)
        assert x.tolist() == [wanted]
    x = torch.full((3,), float(comm.rank))
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [sum(range(comm.size)) / 2] * 3


def test_half_width_sums_are_rounded_once() -> None:
    # 1/256 is lost when added to 1 in bfloat16, and kept when the sum is made in float32.
    x = torch.full((4,), 1.0 if comm.rank == 0 else 1 / 256, dtype=torch.bfloat16)
    dist.all_reduce(x)
    assert x.tolist() == torch.full((4,), 1.0 + (comm.size - 1) / 256).bfloat16().tolist()


def test_into_one_tensor() -> None:
    size, rank = comm.size, comm.rank
    x = torch.full((2, 3), float(rank))
    wanted = torch.arange(size).float().repeat_interleave(6).reshape(2 * size, 3)
    for shape in ((2 * size, 3), (size, 2, 3)):
        out = torch.zeros(shape)
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out.reshape(2 * size, 3), wanted)

    whole = torch.arange(4 * size).float() + rank
    out = torch.zeros(4)
    dist.reduce_scatter_tensor(out, whole)
    assert out.tolist() == [size * (4 * rank + i) + sum(range(size)) for i in range(4)]

    source, out = torch.arange(size) * 10 + rank, torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(out, source)
    assert out.tolist() == [10 * rank + other for other in range(size)]

    counts = [other + 1 for other in range(size)]  # to rank s go s + 1 rows
    source = torch.full((sum(counts), 2), rank)
    out = torch.zeros((rank + 1) * size, 2, dtype=torch.int64)
    dist.all_to_all_single(out, source, [rank + 1] * size, counts)
    assert out.tolist() == [[other, other] for other in range(size) for _ in range(rank + 1)]


def test_tensors_that_are_not_contiguous_receive_the_result() -> None:
    size, rank = comm.size, comm.rank
    base = torch.zeros(4, 2 * size)
    dist.all_gather_into_tensor(base.t(), torch.full((2, 4), float(rank)))
    assert base[0].tolist() == [float(i // 2) for i in range(2 * size)]
    x = torch.zeros(3, 4).t()
    x[:] = rank
    dist.all_reduce(x[1:, ::2])
    assert x[0].tolist() == [rank] * 3
    assert x[1:, ::2].unique().tolist() == [sum(range(size))]
    assert x[1:, 1].unique().tolist() == [rank]


def test_coalesced() -> None:
    size, rank = comm.size, comm.rank
    xs = [torch.full((n,), rank + 1) for n in (2, 0, 3)]
    dist.all_reduce_coalesced(xs)
    assert [x.tolist() for x in xs] == [[sum(range(1, size + 1))] * n for n in (2, 0, 3)]

    gathered = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [torch.full((2,), float(rank)), torch.full((3,), -float(rank))])
    assert [[x.tolist() for x in row] for row in gathered] == [[[r] * 2, [-r] * 3] for r in range(size)]

    right, left = ring()
    out = [torch.zeros(2), torch.zeros(3)]
    ops = [dist.P2POp(dist.irecv, x, left, tag=n) for n, x in enumerate(out)]
    ops += [dist.P2POp(dist.isend, torch.full((n + 2,), 10.0 * rank + n), right, tag=n) for n in range(2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert [x.tolist() for x in out] == [[10.0 * left] * 2, [10.0 * left + 1] * 3]

    with dist._coalescing_manager(async_ops=True) as manager:
        x, y = torch.full((2,), float(rank)), torch.full((3,), float(rank + 1))
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert x.tolist() == [sum(range(size))] * 2 and y.tolist() == [sum(range(1, size + 1))] * 3


def test_messages_from_anybody() -> None:
    if comm.rank:
        dist.send(torch.tensor([comm.rank, comm.rank**2]), 0, tag=7)
        return
    found = {}
    for _ in range(comm.size - 1):
        x = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(x, tag=7)
        found[source] = x.tolist()
    assert found == {rank: [rank, rank**2] for rank in range(1, comm.size)}


def test_messages_under_way() -> None:
    right, left = ring()
    out = [torch.zeros(1000) for _ in range(20)]
    receives = [dist.irecv(x, left, tag=number) for number, x in enumerate(out)]
    sends = [dist.isend(torch.full((1000,), comm.rank * 100.0 + n), right, tag=n) for n in reversed(range(20))]
    for work in (*receives, *sends):
        assert work is not None
        while not work.is_completed():
            pass
        assert work.wait() and work.is_success() and work.exception() is None
    assert [x.unique().tolist() for x in out] == [[left * 100.0 + number] for number in range(20)]
    assert receives[3] is not None and torch.equal(receives[3].get_future().wait()[0], out[3])


def test_works_of_collectives() -> None:
    parts = [torch.zeros(2) for _ in range(comm.size)]
    calls = [
        lambda x: dist.all_reduce(x, async_op=True),
        lambda x: dist.broadcast(x, 0, async_op=True),
        lambda x: dist.reduce(x, 0, async_op=True),
        lambda x: dist.all_gather(parts, x, async_op=True),
        lambda x: dist.barrier(async_op=True),
    ]
    for call in calls:
        work = call(torch.ones(2))
        assert work.wait() and work.is_completed() and work.is_success()
    work = dist.all_reduce(x := torch.ones(2), async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] / comm.size)
    assert chained.wait().tolist() == [1, 1] and x.tolist() == [comm.size] * 2


def test_objects() -> None:
    size, rank = comm.size, comm.rank
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    box = [("from", rank), None] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(box, size - 1)
    assert box == [("from", size - 1), None]
    at_root: Any = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, at_root)
    assert at_root == ([2 * r for r in range(size)] if rank == 0 else None)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None)
    assert mine == [f"for {rank}"]
    right, left = ring()
    if size > 1:
        to_left: list[Any] = [None]
        if rank == 0:
            dist.send_object_list([f"of {rank}"], right)
            dist.recv_object_list(to_left, left)
        else:
            dist.recv_object_list(to_left, left)
            dist.send_object_list([f"of {rank}"], right)
        assert to_left == [f"of {left}"]


def test_sparse() -> None:
    rank, size = comm.rank, comm.size
    x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, rank + 10.0], (size + 2,))
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [size, *(r + 10.0 for r in range(size)), 0]
    y = torch.sparse_coo_tensor([[rank], [0]], torch.full((1, 2), 2.0), (size, 1, 2))
    dist.all_reduce(y)
    assert y.to_dense().tolist() == [[[2, 2]]] * size


def test_the_profiler_sees_the_calls_with_their_shapes() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(3, 2))
        dist.broadcast(torch.ones(5), 0)
        sending = dist.isend(torch.ones(4), ring()[0])
        dist.recv(torch.zeros(4), ring()[1])
    assert sending is not None and sending.wait()
    shapes = {event.name: event.input_shapes for event in seen.events() if event.name.startswith("mpi:")}
    assert shapes == {"mpi:all_reduce": [[3, 2]], "mpi:broadcast": [[5]], "mpi:send": [[4]], "mpi:recv": [[4]]}


def test_what_requires_gradients_is_reduced_in_place() -> None:
    x = torch.nn.Parameter(torch.full((3,), float(comm.rank)))
    dist.all_reduce(x.grad if x.grad is not None else x.data)
    with torch.no_grad():
        dist.broadcast(x, 0)
    assert x.tolist() == [sum(range(comm.size))] * 3 and x.requires_grad


def test_what_mpi_cannot_count_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LARGEST_PIECE", 4)
    size, rank = comm.size, comm.rank
    for layout in ("contiguous", "strided"):
        x = torch.arange(10.0) + rank
        if layout == "strided":
            x = torch.stack([x, -x], 1)[:, 0]
        y = x.clone()
        dist.all_reduce(x)
        assert torch.equal(x, size * torch.arange(10.0) + sum(range(size)))
        dist.reduce(y, size - 1)
        assert rank < size - 1 or torch.equal(y, x)
        z = torch.full_like(x, float(rank))
        dist.broadcast(z, size - 1)
        assert z.tolist() == [size - 1] * 10
        right, left = ring()
        out = torch.zeros(20)[:: 2 if layout == "strided" else 1][:10]
        sending = dist.isend(torch.arange(10.0) * (rank + 1), right)
        assert dist.recv(out, left) == left
        assert sending is not None and sending.wait() and sending.is_success()
        assert torch.equal(out, torch.arange(10.0) * (left + 1))
        receiving, sending = dist.irecv(out, left, tag=1), dist.isend(torch.ones(10) * rank, right, tag=1)
        assert receiving is not None and sending is not None
        while not (receiving.is_completed() and sending.is_completed()):
            pass
        assert out.tolist() == [left] * 10 and receiving.get_future().wait()[0] is out
    with pytest.raises(comm.ArgumentError, match="several messages, which must be of one rank"):
        dist.recv(torch.zeros(5))
    dist.barrier()
