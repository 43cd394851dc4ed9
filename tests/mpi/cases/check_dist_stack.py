"""What PyTorch builds on torch.distributed runs on back end "mpi", and ends where one process alone does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

from labkit import comm

STEPS, BATCH = 4, 5
CLOSE = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """One process group for the module's tests."""
    dist.init_process_group("mpi")
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Two layers, and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.extra = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out: torch.Tensor = self.second(hidden)
        return out + self.extra(hidden) if extra else out


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step: a rank's part, or the whole."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH * comm.size, n, generator=generator) for n in (6, 4))
    here = slice(None) if rank is None else slice(rank * BATCH, (rank + 1) * BATCH)
    return x[here], y[here]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    rank: int | None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    extra: Callable[[int], bool] = lambda step: True,
) -> None:
    """Some steps on a rank's parts, or on the whole batches."""
    optimizer = make(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        functional.mse_loss(model(x, extra(step)), y).backward()
        optimizer.step()


def alone(make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any) -> list[torch.Tensor]:
    """Parameters after one process has trained on the whole batches."""
    model = Net()
    train(model, None, make, **options)
    return [parameter.detach() for parameter in model.parameters()]


def assert_like(model: nn.Module, wanted: list[torch.Tensor], **tolerance: float) -> None:
    found = [parameter.detach() for parameter in model.parameters()]
    torch.testing.assert_close(found, wanted, **(tolerance or CLOSE))
    everyone: list[Any] = [None] * comm.size
    dist.all_gather_object(everyone, found)
    for other in everyone:  # all replicas are the same to the last bit
        torch.testing.assert_close(other, found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}]
)
def test_ddp_ends_where_one_process_does(options: dict[str, Any]) -> None:
    model = DDP(Net(), **options)
    train(model, comm.rank)
    assert_like(model, alone())


def test_ddp_with_parameters_that_some_steps_leave_out() -> None:
    model = DDP(Net(), find_unused_parameters=True)
    train(model, comm.rank, extra=lambda step: step % 2 == 0)
    assert_like(model, alone(extra=lambda step: step % 2 == 0))


def test_ddp_adds_gradients_up_without_sync_and_sends_buffers() -> None:
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = batch(step, comm.rank)
        for number, part in enumerate((slice(0, 2), slice(2, None))):
            with model.no_sync() if number == 0 else nullcontext():
                (functional.mse_loss(model(x[part]), y[part], reduction="sum") / y.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(model, alone())
    norm = nn.BatchNorm1d(6)
    norm.running_mean.fill_(comm.rank + 5.0)  # type: ignore[operator]
    DDP(norm)(torch.zeros(3, 6))
    assert norm.running_mean.tolist() == pytest.approx([4.5] * 6)  # type: ignore[operator]  # rank 0's


@pytest.mark.parametrize(("hook", "atol"), [("fp16_compress_hook", 1e-3), ("bf16_compress_hook", 1e-2)])
def test_ddp_with_gradients_of_half_width(hook: str, atol: float) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(Net())
    model.register_comm_hook(None, getattr(default_hooks, hook))
    train(model, comm.rank)
    assert_like(model, alone(), rtol=0.0, atol=atol)


def test_ddp_with_power_sgd_of_full_rank() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, 8, start_powerSGD_iter=2, min_compression_rate=0.01)
    model = DDP(Net())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, comm.rank)
    assert state.compression_stats()[2] > 0  # it has compressed
    assert_like(model, alone(), rtol=0.0, atol=1e-4)


def test_zero_redundancy_optimizer_shards_its_state() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded(model: nn.Module) -> torch.optim.Optimizer:
        made.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))
        return made[-1]

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    made: list[Any] = []
    model = DDP(Net())
    train(model, comm.rank, sharded)
    assert_like(model, alone(adam), rtol=0.0, atol=1e-5)
    counts: list[Any] = [None] * comm.size
    dist.all_gather_object(counts, len(made[0].optim.state))
    assert sum(counts) == 6 and (comm.size == 1 or max(counts) < 6)
    made[0].consolidate_state_dict(0)
    assert comm.rank or len(made[0].state_dict()["state"]) == 6


def test_join_lets_ranks_have_differently_many_batches() -> None:
    from torch.distributed.algorithms.join import Join

    model = DDP(Net())
    optimizer, steps = sgd(model), comm.rank + 1
    with Join([model]):
        for step in range(steps):
            x, y = batch(step, comm.rank)
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    truth = Net()
    optimizer = sgd(truth)
    for step in range(comm.size):  # the ranks that have left count with zero gradients
        for rank in range(step, comm.size):
            x, y = batch(step, rank)
            (functional.mse_loss(truth(x), y) / comm.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(model, [parameter.detach() for parameter in truth.parameters()])


def test_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(Net(), sharding_strategy=strategy, device_id=torch.device("cpu"))
        train(model, comm.rank)
        with FullyShardedDataParallel.summon_full_params(model):
            found = [parameter.detach().clone() for parameter in model.parameters()]
        torch.testing.assert_close(
            torch.cat([x.reshape(-1) for x in found]), torch.cat([x.reshape(-1) for x in alone()]), **CLOSE
        )


def test_fsdp2_and_its_checkpoint(tmp_path: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (comm.size,))
    model = Net()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, comm.rank)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert comm.size == 1 or model.first.weight.to_local().numel() < 48  # type: ignore[operator]
    wanted = alone()
    torch.testing.assert_close([x.full_tensor() for x in model.parameters()], wanted, **CLOSE)  # type: ignore[attr-defined]

    where: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(where)
    optimizer = sgd(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=where[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=where[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.testing.assert_close([x.full_tensor() for x in model.parameters()], wanted, **CLOSE)  # type: ignore[attr-defined]
    # Without shards, as another program would read it.
    whole = {"model": Net().state_dict()}
    checkpoint.load(whole, checkpoint_id=where[0])
    torch.testing.assert_close(list(whole["model"].values()), wanted, **CLOSE)


def test_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(7, 5, generator=generator), torch.randn(5, 9, generator=generator)
    for place_a in (Shard(0), Shard(1), Replicate()):
        for place_b in (Shard(0), Shard(1), Replicate()):
            product = distribute_tensor(a, mesh, [place_a]) @ distribute_tensor(b, mesh, [place_b])
            torch.testing.assert_close(product.full_tensor(), a @ b)
    x = distribute_tensor(a, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert x.to_local().shape[0] == 7
    assert torch.equal(x.full_tensor(), a)
    total = distribute_tensor(a, mesh, [Shard(0)]).sum()
    assert total.placements == (Partial(),)
    torch.testing.assert_close(total.full_tensor(), a.sum())

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 2 * comm.size), nn.Tanh(), nn.Linear(2 * comm.size, 4))
    truth = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs, _ = batch(0)
    model(inputs).sum().backward()
    truth(inputs).sum().backward()
    for parallel, plain in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(parallel.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def test_functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functions
    from torch.distributed.nn import functional as with_gradients

    size, rank = comm.size, comm.rank
    group = dist.group.WORLD
    x = torch.full((2 * size, 2), float(rank))
    assert functions.all_reduce(x, "sum", group).unique().tolist() == [sum(range(size))]
    assert x.unique().tolist() == [rank]
    gathered = functions.all_gather_single(x[:2], 0, group)
    assert gathered[:, 0].tolist() == [other for other in range(size) for _ in range(2)]
    assert functions.all_gather_single(x[:2], 1, group).shape == (2, 2 * size)
    assert functions.reduce_scatter_single(x, "sum", 0, group).tolist() == [[sum(range(size))] * 2] * 2
    assert functions.broadcast(x, size - 1, group).unique().tolist() == [size - 1]
    exchanged = functions.all_to_all_single(x, [2] * size, [2] * size, group)
    assert exchanged[:, 0].tolist() == [other for other in range(size) for _ in range(2)]
    both = functions.all_reduce_coalesced([x, 2 * x], "sum", group)
    assert [y.unique().tolist() for y in both] == [[sum(range(size))], [2 * sum(range(size))]]

    weight = torch.full((3,), float(rank + 1), requires_grad=True)
    (with_gradients.all_reduce(weight) * (rank + 1)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [sum(range(1, size + 1))] * 3


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline(name: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(comm.size)]
    truth = copy.deepcopy(nn.Sequential(*layers))
    mine = layers[comm.rank]
    stage = pipelining.PipelineStage(mine, comm.rank, comm.size, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, 2 * comm.size, loss_fn=functional.mse_loss)
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 4 * comm.size, 6, generator=generator)
    losses: list[torch.Tensor] = []
    given = (x,) if comm.rank == 0 else ()
    last = comm.rank == comm.size - 1
    out = schedule.step(*given, target=y, losses=losses) if last else schedule.step(*given)
    wanted = truth(x)
    loss = functional.mse_loss(wanted, y)
    loss.backward()
    if last:
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for parameter, other in zip(mine.parameters(), truth[comm.rank].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_model_averaging() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.zeros(1, 2)  # it leaves out what has none
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(comm.rank + 10.0 * step)
        averager.average_parameters(model.parameters())
        mean = (comm.size - 1) / 2
        value = (mean if step % 2 == 0 else comm.rank) + 10.0 * step
        assert model.weight.tolist() == [[value, value]]
