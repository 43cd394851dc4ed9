"""Methods with a master, and the averaging of weights: the right steps, every sample once, equal ends, no hangs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm, telemetry
from labkit.data import Dataset, from_tensors
from labkit.train import (
    SGD,
    FlatWeights,
    History,
    Settings,
    TorchTransport,
    TrainError,
    averaging,
    backup_workers,
    downpour,
    easgd,
    gem,
    load_checkpoint,
    replica_differences,
    run,
    single,
)
from labkit.train.optimizers import Optimizer

WITH_MASTER = ("downpour", "easgd", "gem", "backup_workers")
QUIET: dict[str, Any] = {"progress": False, "device": "cpu", "batch_size": 8}


class Small(nn.Module):
    """Small, so that a hundred steps take no time; double, so that sums in another order are equal."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(49, 12), nn.Linear(12, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(x, 4).flatten(1)
        return functional.log_softmax(self.last(torch.tanh(self.first(x))), dim=1)


class WithNorm(Small):
    """Counts its inputs' mean by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def noise(n: int) -> Dataset:
    """`n` training and 37 test images, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (n + 37, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n + 37,), generator=generator)
    return from_tensors(images[:n], labels[:n], images[n:], labels[n:])


def farthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def samples_of_all(history: History) -> int:
    return sum(comm.all_gather_object(int(history.steps.samples.sum())))


def alike(history: History) -> None:
    """All ranks have the same epochs; each has figures of its own in them."""
    rows = [(r.epoch, r.steps, r.loss, r.accuracy, r.test_loss, r.test_accuracy, r.time_s) for r in history.epochs]
    assert len(set(comm.all_gather_object(repr((rows, history.stopped))))) == 1


@pytest.fixture
def pair() -> Iterator[comm.Communicator | None]:
    """Ranks 0 and 1: a master and one worker."""
    if comm.size < 2:
        pytest.skip("a master and a worker are 2 ranks")
    group = comm.world().split(0 if comm.rank < 2 else None)
    yield group
    if group:
        group.free()


@pytest.fixture
def several() -> None:
    if comm.size < 3:
        pytest.skip("a master and two workers are 3 ranks")


@pytest.mark.parametrize("name", WITH_MASTER)
def test_one_rank_is_too_few_and_the_error_says_what_to_do(name: str) -> None:
    if comm.size > 1:
        pytest.skip("there are more")
    with pytest.raises(TrainError, match=rf"{name} needs at least 2 ranks.*start more.*ranks=2.*single"):
        run(name, Small(), noise(8), **QUIET)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_only_mpi_can_serve_whoever_comes_first(name: str) -> None:
    torch.distributed.init_process_group("mpi")
    try:
        with pytest.raises(TrainError, match=rf"{name} needs labkit's MPI.*torch.distributed, mpi: leave out over="):
            run(name, Small(), noise(8), over=TorchTransport(), **QUIET)
    finally:
        torch.distributed.destroy_process_group()


def test_settings_that_make_no_sense_are_refused_with_the_cure() -> None:
    with pytest.raises(TrainError, match=rf"needs at least {3 + 2 * 9} ranks \(3 to be masters\)"):
        downpour(Small(), noise(8), masters=2, ranks_per_worker=9, **QUIET)
    with pytest.raises(TypeError, match="did you mean 'sync_every'"):
        downpour(Small(), noise(8), sync_evry=2, **QUIET)
    with pytest.raises(ValueError, match="masters must be a whole number of at least 1, not 0"):
        downpour(Small(), noise(8), masters=0, **QUIET)
    with pytest.raises(TrainError, match="gem is an optimizer by itself: leave out optimizer="):
        gem(Small(), noise(8), optimizer=SGD, **QUIET)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_downpour_with_one_worker_makes_the_steps_of_one_process(
    pair: comm.Communicator | None, momentum: float
) -> None:
    if pair is None:
        return
    dataset, together, alone = noise(61), Small(), Small()  # 61: the last batch is smaller
    settings = {**QUIET, "epochs": 2, "lr": 0.1, "momentum": momentum, "seed": 3}
    ours = downpour(together, dataset, over=pair, **settings)
    theirs = single(alone, dataset, **settings)
    assert farthest(together, alone) <= 1e-9
    assert [row.test_loss for row in ours.epochs] == pytest.approx([row.test_loss for row in theirs.epochs], abs=1e-9)
    assert [row.loss for row in ours.epochs] == pytest.approx([row.loss for row in theirs.epochs], abs=1e-9)
    if pair.rank == 1:
        assert ours.steps.rank_loss == pytest.approx(theirs.steps.rank_loss, abs=1e-9)
        assert (ours.steps.staleness == 0).all() and ours.copies == 0
        assert ours.epochs[0].rank_loss == pytest.approx(ours.epochs[0].loss)
    else:
        assert len(ours.steps) == 0 and [len(steps) for steps in ours.by_rank] == [0, 16]


def test_downpour_pushes_the_sum_of_the_gradients_between_two_pushes(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, together, worker, master = noise(40), Small(), Small(), Small()
    downpour(together, dataset, over=pair, sync_every=5, lr=0.1, momentum=0.0, **QUIET)
    # 5 batches of 8, one push: SGD without momentum at the master comes to what the worker's own steps come to.
    single(worker, dataset, lr=0.1, momentum=0.0, **QUIET)
    assert farthest(together, worker) <= 1e-9
    # With momentum at both the worker's velocity is not pushed: only its gradients are.
    downpour(master, dataset, over=pair, sync_every=5, lr=0.1, momentum=0.9, **QUIET)
    single(other := Small(), dataset, lr=0.1, momentum=0.9, **QUIET)
    assert farthest(master, other) > 1e-4


def test_without_elastic_force_a_worker_makes_the_steps_of_plain_sgd(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, began, alone = noise(61), Small(), Small()
    settings = {**QUIET, "epochs": 2, "lr": 0.1, "momentum": 0.5}
    centre = Small(seed=pair.rank)  # all begin with rank 0's
    ours = easgd(centre, dataset, over=pair, elastic_force=0.0, sync_every=3, **settings)
    theirs = single(alone, dataset, **settings)
    if pair.rank == 1:
        assert ours.steps.rank_loss == pytest.approx(theirs.steps.rank_loss, abs=1e-9)
    assert farthest(centre, began) == 0  # nobody pulled it


def test_the_elastic_force_pulls_both_sides_by_the_same_difference(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, centre, stepped = noise(8), Small(), Small()
    easgd(centre, dataset, over=pair, elastic_force=0.25, **QUIET)
    single(stepped, dataset, lr=0.1, momentum=0.0, **QUIET)
    began = Small()
    for c, x, b in zip(centre.parameters(), stepped.parameters(), began.parameters(), strict=True):
        assert torch.allclose(c, b + 0.25 * (x - b), atol=1e-12)


def test_gem_with_one_worker_follows_its_formula(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, ours, model = noise(61), Small(), Small()
    gem(ours, dataset, over=pair, kappa=1.5, lr=0.05, momentum=0.8, **QUIET)
    state: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    class Formula(SGD):
        def step(self) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    m, change = state.get(p, (torch.zeros_like(p), torch.zeros_like(p)))
                    u = -0.05 * p.grad
                    m = 0.8 * m + u
                    pi = ((1.5 * m.abs() - change.abs()) / (u.abs() + 1e-13)).clamp(0, 5)
                    before = p.clone()
                    p += pi * u
                    state[p] = m, p - before

    single(model, dataset, optimizer=Formula, **QUIET)
    assert farthest(ours, model) <= 1e-9


def test_waiting_for_all_makes_the_steps_of_one_process_with_all_batches(several: None) -> None:
    workers = comm.size - 1
    dataset = noise(3 * workers * 8 + 1)  # in the last step most workers have no sample
    together, alone = Small(), Small()
    settings = {**QUIET, "epochs": 2, "lr": 0.1}
    ours = backup_workers(together, dataset, wait_for=1.0, **settings)
    theirs = single(alone, dataset, **{**settings, "batch_size": 8 * workers})
    assert farthest(together, alone) <= 1e-9
    assert [row.loss for row in ours.epochs] == pytest.approx([row.loss for row in theirs.epochs], abs=1e-9)
    assert ours.settings["rejected_gradients"] == 0 and (ours.steps.staleness == 0).all()
    assert samples_of_all(ours) == 2 * len(dataset.train)
    alike(ours)


@pytest.mark.parametrize("left_over", [0, 1, 3])
def test_averaging_after_each_step_of_plain_sgd_makes_the_steps_of_one_process(left_over: int) -> None:
    dataset = noise(3 * comm.size * 8 + left_over)
    together, alone = Small(seed=comm.rank), Small()
    settings = {**QUIET, "epochs": 2, "lr": 0.1, "momentum": 0.0}
    ours = averaging(together, dataset, average_every=1, **settings)
    theirs = single(alone, dataset, **{**settings, "batch_size": 8 * comm.size})
    assert farthest(together, alone) <= 1e-9
    assert ours.steps.loss == pytest.approx(theirs.steps.loss, abs=1e-9)


def test_averaging_less_often_means_the_weights_that_each_rank_reached() -> None:
    dataset, together = noise(3 * comm.size * 8), Small()
    averaging(together, dataset, average_every=100, lr=0.1, momentum=0.9, **QUIET)
    mine, seen = Small(), noise(3 * comm.size * 8)
    order = np.random.SeedSequence([0, 0]).generate_state(1, np.uint64)
    index = torch.randperm(len(seen.train), generator=torch.Generator().manual_seed(int(order[0])))
    optim = SGD(mine.parameters(), 0.1, 0.9)
    for batch in index.split(8 * comm.size):
        images, labels = seen.train.batch(batch[comm.rank * 8 : comm.rank * 8 + 8])
        mine.zero_grad()
        functional.nll_loss(mine(images.double()), labels).backward()
        optim.step()
    for expected, got in zip(mine.parameters(), together.parameters(), strict=True):
        comm.all_reduce(expected.data, "mean")
        assert torch.allclose(expected, got, atol=1e-9)
    assert replica_differences(together) == [0.0] * comm.size


@pytest.mark.parametrize("name", WITH_MASTER)
def test_every_sample_comes_once_an_epoch_and_all_end_with_the_masters_weights(several: None, name: str) -> None:
    dataset, model = noise(101), Small(seed=comm.rank)
    history = run(name, model, dataset, epochs=3, seed=2, lr=0.05, **QUIET)
    assert samples_of_all(history) == 3 * 101
    assert replica_differences(model) == [0.0] * comm.size
    assert [row.epoch for row in history.epochs] == [1, 2, 3]
    alike(history)
    rows = history.epochs
    assert all(r.seconds > 0 and r.images_per_s > 0 for r in rows)
    assert [r.time_s for r in rows] == sorted(r.time_s for r in rows)
    # What the workers saw, weighed by samples, is what the master tells.
    sums = comm.all_gather_object(float(np.nansum(history.steps.rank_loss * history.steps.samples)))
    assert sum(r.loss for r in rows) * 101 == pytest.approx(sum(sums), rel=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (len(history.steps) > 0) == (comm.rank > 0)
    assert (history.steps.loss == history.steps.rank_loss).all() or name == "backup_workers"
    if comm.rank == 0:
        assert [len(steps) for steps in history.by_rank] == comm.all_gather_object(len(history.steps))
    else:
        comm.all_gather_object(len(history.steps))


def test_statistics_of_the_model_reach_the_master_too(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, together, alone = noise(61), WithNorm(), WithNorm()
    ours = downpour(together, dataset, over=pair, lr=0.1, **QUIET)
    theirs = single(alone, dataset, lr=0.1, **QUIET)
    assert torch.allclose(together.norm.running_mean, alone.norm.running_mean)
    assert together.norm.num_batches_tracked == alone.norm.num_batches_tracked == 8
    assert ours.epochs[0].test_loss == pytest.approx(theirs.epochs[0].test_loss, abs=1e-9)


def test_a_slow_worker_is_stale_by_what_the_others_did_meanwhile(several: None) -> None:
    """The last worker computes its first loss only when the others have finished."""
    calls = 0

    def held_up(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if comm.rank == comm.size - 1 and calls == 1:
            for other in range(1, comm.size - 1):
                comm.recv_object(other, tag=9)
        if 0 < comm.rank < comm.size - 1 and calls == 5:  # the fourth push has been answered
            comm.send_object("go on", comm.size - 1, tag=9)
        return functional.nll_loss(output, labels)

    workers = comm.size - 1
    history = downpour(Small(), noise(5 * workers * 8), loss=held_up, validate=False, **QUIET)
    staleness = comm.all_gather_object(history.steps.staleness.tolist())
    assert staleness[-1][0] >= 4 * (workers - 1)
    updates = 5 * workers
    assert all(0 <= value < updates for values in staleness for value in values)


def test_a_gradient_that_comes_too_late_is_dropped_and_counted(several: None) -> None:
    calls = 0

    def held_up(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if comm.rank == comm.size - 1 and calls == 1:
            comm.recv_object(1, tag=9)
        if comm.rank == 1 and calls == 3:  # two steps were made without it
            comm.send_object("go on", comm.size - 1, tag=9)
        return functional.nll_loss(output, labels)

    workers = comm.size - 1
    model = Small()
    history = backup_workers(
        model, noise(5 * workers * 8), wait_for=(workers - 1) / workers, loss=held_up, validate=False, **QUIET
    )
    rejected = int(history.settings["rejected_gradients"])
    late = comm.all_gather_object(int((history.steps.staleness > 0).sum()))
    assert rejected == sum(late) and late[-1] >= 1
    assert history.settings["rejected_samples"] == 8 * rejected
    assert history.epochs[0].steps == 5 * workers - rejected
    assert samples_of_all(history) == 5 * workers * 8  # seen, though not all were used
    assert replica_differences(model) == [0.0] * comm.size
    alike(history)


def test_several_ranks_a_worker_make_the_steps_of_one_process_with_their_batches() -> None:
    if comm.size < 3:
        pytest.skip("a master and a worker of two ranks are 3")
    group = comm.world().split(0 if comm.rank < 3 else None)
    if group is None:
        return
    dataset, together, alone = noise(3 * 16 + 1), Small(), Small()
    settings = {**QUIET, "epochs": 2, "lr": 0.1}
    ours = downpour(together, dataset, over=group, ranks_per_worker=2, **settings)
    theirs = single(alone, dataset, **{**settings, "batch_size": 16})
    assert farthest(together, alone) <= 1e-9
    assert [row.loss for row in ours.epochs] == pytest.approx([row.loss for row in theirs.epochs], abs=1e-9)
    assert [row.steps for row in ours.epochs] == [4, 4]
    group.free()


@pytest.mark.parametrize("sync_every_masters", [1, 3])
def test_masters_under_a_master_use_every_sample_once_and_end_alike(sync_every_masters: int) -> None:
    if comm.size < 5:
        pytest.skip("two masters with a worker each, under another, are 5 ranks")
    dataset, model = noise(101), Small(seed=comm.rank)
    history = downpour(
        model, dataset, masters=2, sync_every_masters=sync_every_masters, epochs=2, momentum=0.0, lr=0.0, **QUIET
    )
    # With a learning rate of 0 nothing may change: what is added up at the top is change alone.
    assert farthest(model, Small()) == 0
    assert samples_of_all(history) == 202 and [row.epoch for row in history.epochs] == [1, 2]
    alike(history)
    history = downpour(model, dataset, masters=2, sync_every_masters=sync_every_masters, epochs=8, lr=0.1, **QUIET)
    assert history.epochs[-1].loss < history.epochs[0].loss < math.inf
    assert replica_differences(model) == [0.0] * comm.size
    alike(history)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where a shell started the ranks in the background and had it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("several", "interruptible")
@pytest.mark.parametrize("name", [*WITH_MASTER, "averaging"])
def test_an_interrupt_on_all_ranks_leaves_models_that_train_on(name: str) -> None:
    model, calls, processes = Small(), 0, comm.all_gather_object(os.getpid())

    def interrupting(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if comm.rank == 1 and calls == 3:
            for process in sorted(processes, key=os.getpid().__eq__):  # this one last
                os.kill(process, signal.SIGINT)
        return functional.nll_loss(output, labels)

    with pytest.raises(KeyboardInterrupt) as caught:
        # Without the interrupt this would go on for hours.
        run(name, model, noise(101), loss=interrupting, epochs=10**6, validate=False, **QUIET)
    assert any("the model keeps its weights" in note for note in caught.value.__notes__)
    comm.renew()
    # Memory of its own again: no view of a buffer that the run made.
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters())
    history = run(name, model, noise(101), **QUIET)
    assert samples_of_all(history) == 101 and replica_differences(model) == [0.0] * comm.size


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Any]:
    """Rank 0 plays the notebook too; all ranks are connected to it."""
    collector = telemetry.Collector(comm.size, tmp_path / "wire") if comm.rank == 0 else None
    telemetry.connect(comm.broadcast_object(collector.endpoints if collector else None), comm.rank)
    yield collector
    telemetry.disconnect()
    comm.barrier()
    if collector:
        collector.close()


WAYS = [*({"name": name} for name in WITH_MASTER), {"name": "downpour", "masters": 2}]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_slider_and_stop_button_reach_every_worker(
    several: None, collector: Any, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.get("masters") and comm.size < 5:
        pytest.skip("two masters with a worker each, under another, are 5 ranks")
    optimizers: list[Optimizer] = []
    make, moved = Settings.make_optimizer, 0

    def seen(settings: Settings, parameters: Any) -> Optimizer:
        optimizers.append(make(settings, parameters))
        return optimizers[0]

    def clicking(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal moved
        if collector:  # the master computes only when it tests: that is when somebody clicks
            moved += optimizers[0].param_groups[0]["lr"] == 0.125
            # Some epochs later every worker has made a step with it.
            collector.send_control(lr=0.125, stop=moved > 8)
        return functional.nll_loss(output, labels)

    monkeypatch.setattr(Settings, "make_optimizer", seen)
    model = Small()
    # Without the clicks this would go on for hours: the test's time limit would end it.
    settings: dict[str, Any] = {**QUIET, **way, "loss": clicking, "epochs": 10**6, "lr": 0.05}
    history = run(settings.pop("name"), model, noise(comm.size * 16), **settings)
    assert history.stopped is not None and history.stopped.startswith("stopped from the notebook after update")
    alike(history)
    assert replica_differences(model) == [0.0] * comm.size
    if len(history.steps):
        assert history.steps.lr[0] == 0.05 and history.steps.lr[-1] == 0.125


def test_flat_weights_are_views_and_can_be_released() -> None:
    model = WithNorm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = FlatWeights(model)
    assert sum(b.numel() for b in weights.buffers) == sum(p.numel() for p in model.parameters())
    assert sorted(str(b.dtype) for b in weights.statistics) == ["torch.float64", "torch.int64"]
    weights.buffers[0] += 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, before[name] + 1)
    weights.release()
    weights.buffers[0] += 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, before[name] + 1)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("name", WITH_MASTER)
def test_a_master_stops_at_a_target_and_a_later_run_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    folder = comm.broadcast_object(str(tmp_path))
    settings = QUIET | {"checkpoint": folder, "lr": 0.05}
    model = Small()
    first = run(name, model, noise(150), epochs=5, target="val_acc,>,0.0001", validate="thread", **settings)
    alike(first)
    assert first.stopped and "target" in first.stopped and len(first.epochs) < 5
    done = len(first.epochs)
    again = Small(seed=1)
    second = run(name, again, noise(150), epochs=done + 2, restore=True, **settings)
    alike(second)
    assert [row.epoch for row in second.epochs] == list(range(1, done + 3))
    # A worker may have begun another epoch before the stop reached it: that one is made anew.
    kept = int(second.settings["restored"].split("after epoch ")[1].split(",")[0])
    assert 1 <= kept <= done and samples_of_all(second) == (done + 2 - kept) * 150
    content = train_checkpoint(folder)
    for tensor, saved in zip(again.state_dict().values(), content["model"].values(), strict=True):
        assert torch.equal(tensor, saved)


def train_checkpoint(folder: str) -> dict[str, Any]:
    content = comm.broadcast_object(load_checkpoint(folder) if comm.rank == 0 else None)
    assert isinstance(content, dict)
    return content
