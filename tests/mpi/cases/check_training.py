"""Ranks together train as one would alone, stay equal, and leave together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm, telemetry
from labkit.data import Dataset, from_tensors
from labkit.train import (
    Alone,
    History,
    LeNet,
    MPITransport,
    OverlappedGradients,
    TrainError,
    replica_differences,
    sync_gradients,
    sync_initial_weights,
    synchronous,
)

SYNCS = ("fused", "per_parameter", "overlap")
DDP = [{"sync": "ddp", "backend": backend} for backend in ("mpi", "gloo")]


def noise(n: int) -> Dataset:
    """`n` training and 37 test images, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (n + 37, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n + 37,), generator=generator)
    return from_tensors(images[:n], labels[:n], images[n:], labels[n:])


def fresh(seed: int = 0) -> LeNet:
    torch.manual_seed(seed)
    return LeNet()


def train(model: nn.Module, dataset: Dataset, **settings: Any) -> History:
    return synchronous(model, dataset, **{"progress": False, "device": "cpu", "lr": 0.05, **settings})


def farthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("left_over", [0, 1, 11])  # 1: the last step leaves most ranks without a sample
def test_r_ranks_with_batch_b_equal_one_rank_with_r_times_b(dtype: torch.dtype, sync: str, left_over: int) -> None:
    batch = 8
    dataset = noise(3 * comm.size * batch + left_over)
    together, alone = fresh().to(dtype), fresh().to(dtype)
    ours = train(together, dataset, epochs=2, batch_size=batch, sync=sync, seed=1)
    theirs = train(alone, dataset, epochs=2, batch_size=comm.size * batch, seed=1, over=Alone())
    assert farthest(together, alone) <= 1e-6
    assert len(ours.steps) == len(theirs.steps) == 2 * -(-len(dataset.train) // (comm.size * batch))
    assert ours.steps.loss == pytest.approx(theirs.steps.loss, abs=1e-5)
    for row, expected in zip(ours.epochs, theirs.epochs, strict=True):
        assert row.accuracy == expected.accuracy and row.test_accuracy == expected.test_accuracy
        assert row.loss == pytest.approx(expected.loss, abs=1e-5)
        assert row.test_loss == pytest.approx(expected.test_loss, abs=1e-5)
    samples = comm.all_gather_object(int(ours.steps.samples.sum()))
    assert sum(samples) == 2 * len(dataset.train)


@pytest.mark.parametrize("way", [{"sync": "overlap"}, *DDP], ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_several_buckets_equal_one_rank(way: dict[str, Any], op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.train.overlap.BUCKET_BYTES", 8_000)
    dataset = noise(3 * comm.size * 8 + 1)  # the last step leaves most ranks without a sample
    together, alone = fresh().double(), fresh().double()
    factor = comm.size if op == "sum" else 1
    history = train(together, dataset, batch_size=8, average=op == "mean", **way)
    train(alone, dataset, batch_size=comm.size * 8, lr=0.05 * factor, over=Alone())
    assert farthest(together, alone) <= 1e-6
    assert history.epochs[0].replica_difference == 0 and history.copies == 0
    assert {name: history.settings.get(name) for name in way} == way
    assert not torch.distributed.is_initialized()


class Partly(nn.Module):
    """On odd ranks a layer takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = nn.Linear(784, 7), nn.Linear(7, 7), nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return functional.log_softmax(self.last(x if comm.rank % 2 else self.some(x)), dim=1)


def test_overlap_takes_layers_that_some_ranks_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.train.overlap.BUCKET_BYTES", 100)
    models = {}
    for sync in ("fused", "overlap"):
        torch.manual_seed(0)
        models[sync] = Partly().double()
        history = train(models[sync], noise(3 * comm.size * 8 + 1), batch_size=8, sync=sync)
        assert history.epochs[0].replica_difference == 0
    assert farthest(*models.values()) <= 1e-12


def test_overlap_reduces_while_backward_computes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.train.overlap.BUCKET_BYTES", 100)
    model, order = Partly(), []
    over = MPITransport()
    gradients = OverlappedGradients(model, over, "mean", 100)
    monkeypatch.setattr(MPITransport, "all_reduce", lambda _, x, op: order.append(x.numel()))
    model.first.weight.register_hook(lambda _: order.append("first"))
    gradients.zero()
    model(torch.ones(2, 1, 28, 28)).sum().backward()
    seen = list(order)
    gradients.all_reduce(over, "mean")
    gradients.release()
    counts = [10, 70, 7, 49, 7, 784 * 7]
    assert order == ([*counts[:2], "first", *counts[2:]] if comm.rank % 2 else [*counts[:5], "first", counts[5]])
    assert seen == ([*counts[:2], "first"] if comm.rank % 2 else order)


def test_overlap_refuses_a_second_backward_after_the_ranks_have_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 40)
    gradients = OverlappedGradients(model, MPITransport(), "mean", 100)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(TrainError, match=rf"rank {comm.rank}: backward computed the gradient of .* a second time"):
        loss.backward()
    gradients.release()
    assert model.weight.grad is None and model.bias.grad is None


def test_ddp_uses_a_group_that_is_there_and_leaves_it() -> None:
    torch.distributed.init_process_group("mpi")
    try:
        train(fresh(), noise(comm.size * 8), batch_size=8, sync="ddp")
        x = torch.ones(1)
        torch.distributed.all_reduce(x)
        assert x.item() == comm.size
    finally:
        torch.distributed.destroy_process_group()


def test_nccl_is_refused_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TrainError, match='there is none here: use backend="mpi" or "gloo"'):
        train(fresh(), noise(8), sync="ddp", backend="nccl")


@pytest.mark.parametrize("sync", SYNCS)
def test_replicas_that_begin_apart_are_made_equal_and_stay_exactly_equal(sync: str) -> None:
    model = fresh(seed=comm.rank)
    history = train(model, noise(101), epochs=2, batch_size=8, sync=sync)
    assert [row.replica_difference for row in history.epochs] == [0.0, 0.0]
    assert replica_differences(model, MPITransport()) == [0.0] * comm.size
    assert history.copies == 0


def test_without_the_first_synchronisation_replicas_drift() -> None:
    if comm.size == 1:
        pytest.skip("one replica cannot drift")
    model = fresh(seed=comm.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for: no warning
        history = train(model, noise(64), batch_size=8, initial_sync=False)
    assert history.epochs[0].replica_difference > 0
    differences = replica_differences(model, MPITransport())
    assert differences[0] == 0 and all(value > 0 for value in differences[1:])


@pytest.mark.parametrize("sync", SYNCS)
def test_a_sum_is_a_mean_at_r_times_the_learning_rate(sync: str) -> None:
    dataset = noise(2 * comm.size * 8 + 3)
    summed, averaged = fresh().double(), fresh().double()
    train(summed, dataset, batch_size=8, lr=0.01, average=False, sync=sync)
    train(averaged, dataset, batch_size=8, lr=0.01 * comm.size)
    assert farthest(summed, averaged) <= 1e-12


def test_another_optimizer_follows_one_rank_too() -> None:
    dataset = noise(2 * comm.size * 8 + 5)
    together, alone = fresh().double(), fresh().double()

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3)

    history = train(together, dataset, batch_size=8, optimizer=adam)
    train(alone, dataset, batch_size=8 * comm.size, optimizer=adam, over=Alone())
    assert farthest(together, alone) <= 1e-6
    assert history.settings["optimizer"] == "Adam(lr=0.001, betas=(0.9, 0.999))"


def test_a_warning_names_the_rank_whose_weights_were_changed_outside_the_loop() -> None:
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    model = fresh()

    def meddling(output: Tensor, labels: Tensor) -> Tensor:
        if comm.rank == 1 and model.training:
            with torch.no_grad():
                model.fc2.bias[0] += 0.5
        return functional.nll_loss(output, labels)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, noise(comm.size * 8), batch_size=8, loss=meddling)
    told = [str(warning.message) for warning in caught if "replicas" in str(warning.message)]
    if comm.rank == 0:
        assert len(told) == 1 and "rank 1 by 0.5" in told[0]
    else:
        assert told == []


def test_sync_initial_weights_takes_rank_0s_parameters_and_buffers() -> None:
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean += comm.rank
    model[1].num_batches_tracked += comm.rank
    sync_initial_weights(model)
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, nn.Linear(3, 4).weight)
    assert not model[1].running_mean.any() and int(model[1].num_batches_tracked) == 0


def test_sync_gradients_means_and_sums_also_where_a_rank_has_none() -> None:
    model = nn.Linear(2, 2)
    for op, expected in (("mean", (comm.size - 1) / 2), ("sum", comm.size * (comm.size - 1) / 2)):
        model.weight.grad = torch.full((2, 2), float(comm.rank)) if comm.rank else None
        model.bias.grad = torch.full((2,), float(comm.rank))
        sync_gradients(model, op)
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.unique().tolist() == [expected]


def test_dropout_differs_between_ranks_while_replicas_stay_equal() -> None:
    torch.manual_seed(0)
    model = LeNet(dropout=0.5)
    seen: list[Tensor] = []
    model.dropout.register_forward_hook(lambda _, __, output: seen.append(output == 0))
    image = torch.zeros(comm.size * 4, 28, 28, dtype=torch.uint8)  # the same image for everybody
    image[:, 5:20, 10:14] = 255
    labels = torch.zeros(comm.size * 4, dtype=torch.int64)
    history = train(model, from_tensors(image, labels, image, labels, classes=["a"] * 10), batch_size=4)
    masks = comm.all_gather_object(seen[0].numpy().tobytes())
    assert len(set(masks)) == comm.size
    assert history.epochs[0].replica_difference == 0


def test_ranks_called_with_different_settings_are_all_told_each_ones_side() -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(TrainError, match=r"batch_size: rank 0: 8, rank 1: 9"):
        train(fresh(), noise(64), batch_size=8 + min(comm.rank, 1))
    with pytest.raises(TrainError, match=r"dataset: rank 0: .*65 training"):
        train(fresh(), noise(65 + comm.rank), batch_size=8)
    comm.barrier()  # nobody waits: the next collective works


def test_times_of_a_step_are_recorded_for_each_step() -> None:
    history = train(fresh(), noise(comm.size * 24), batch_size=8)
    steps = history.steps
    assert len(steps) == 3
    for seconds in (steps.compute_s, steps.wait_s, steps.transfer_s):
        assert len(seconds) == 3 and (seconds >= 0).all()
    assert (steps.compute_s > 0).all() and (steps.lr == 0.05).all()
    assert steps.wait_s.sum() + steps.transfer_s.sum() > 0
    assert (history.rank, history.world_size) == (comm.rank, comm.size)
    assert "MPI" in history.versions["transport"] and history.versions["torch"]


@pytest.mark.parametrize("way", [{"sync": sync} for sync in SYNCS] + DDP, ids=lambda way: "-".join(way.values()))
def test_an_interrupt_on_all_ranks_leaves_models_that_train_on_together(way: dict[str, str]) -> None:
    model, calls = fresh(), 0

    def interrupted(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return functional.nll_loss(output, labels)

    with pytest.raises(KeyboardInterrupt):
        train(model, noise(comm.size * 40), batch_size=8, loss=interrupted, **way)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train(model, noise(comm.size * 16), batch_size=8, **way).epochs[0].replica_difference == 0


def test_an_interrupt_in_the_middle_of_backward_leaves_models_that_train_on_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("labkit.train.overlap.BUCKET_BYTES", 8_000)
    model, buckets, reduce = fresh(), 0, MPITransport.all_reduce

    def interrupted(over: MPITransport, x: Tensor, op: str = "sum") -> None:
        nonlocal buckets
        buckets += 1
        if buckets == 7:
            raise KeyboardInterrupt
        reduce(over, x, op)

    monkeypatch.setattr(MPITransport, "all_reduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, noise(comm.size * 40), batch_size=8, sync="overlap")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train(model, noise(comm.size * 16), batch_size=8, sync="overlap").epochs[0].replica_difference == 0


@pytest.fixture
def collector(tmp_path: Path) -> Any:
    """Rank 0 plays the notebook too; all ranks are connected to it."""
    collector = telemetry.Collector(comm.size, tmp_path / "wire") if comm.rank == 0 else None
    endpoints = comm.broadcast_object(collector.endpoints if collector else None)
    telemetry.connect(endpoints, comm.rank)
    yield collector
    telemetry.disconnect()
    comm.barrier()
    if collector:
        collector.close()


def until(holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


def test_slider_and_stop_button_act_on_all_ranks_at_the_same_step(collector: Any) -> None:
    optimizers: list[torch.optim.Optimizer] = []
    calls = 0

    def captured(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=0.05))
        return optimizers[0]

    def clicking(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if collector and calls == 3:
            collector.send_control(lr=0.125)
        if collector and optimizers[0].param_groups[0]["lr"] == 0.125:
            collector.send_control(stop=True, lr=0.125)
        return functional.nll_loss(output, labels)

    # Without the clicks this would go on for hours: the test's time limit would end it.
    history = train(fresh(), noise(comm.size * 16), batch_size=8, epochs=10**6, optimizer=captured, loss=clicking)
    runs = comm.all_gather_object((len(history.steps), history.stopped, history.steps.lr.tolist()))
    assert all(run == runs[0] for run in runs)
    assert history.stopped == f"stopped from the notebook after step {len(history.steps)}"
    assert history.steps.lr[0] == 0.05 and history.steps.lr[-1] == 0.125
    assert history.epochs[-1].replica_difference == 0
    steps = comm.all_gather_object(history.steps.rank_loss.tolist())
    if collector:
        until(lambda: collector.counts.received == sum(map(len, steps)), "steps are missing at the notebook")
        for rank, losses in enumerate(steps):
            series = collector.store.series(rank)
            assert list(series["step"]) == list(range(len(losses)))
            assert list(series["loss"]) == losses


def test_a_stop_meant_for_the_last_run_does_not_end_the_next(collector: Any) -> None:
    if collector:
        collector.send_control(stop=True)
    history = train(fresh(), noise(comm.size * 16), batch_size=8)
    assert history.stopped is None and len(history.steps) == 2


def test_where_only_some_ranks_are_watched_nobody_asks_and_nobody_waits(tmp_path: Path) -> None:
    if comm.size == 1:
        pytest.skip("one rank is watched or not")
    watched = comm.rank == 1
    if watched:
        telemetry.connect(telemetry.Endpoints(f"ipc://{tmp_path}/m", f"ipc://{tmp_path}/c"), comm.rank)
    try:
        assert len(train(fresh(), noise(comm.size * 16), batch_size=8).steps) == 2
    finally:
        telemetry.disconnect()
