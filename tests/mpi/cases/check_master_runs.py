"""Runs with a master: every sample once, equal ends, late gradients, interrupts, Stop."""

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
from torch import Tensor
from torch.nn import functional

from labkit import comm, telemetry
from labkit.train import (
    Settings,
    backup_workers,
    downpour,
    load_checkpoint,
    replica_differences,
    run,
)
from labkit.train.optimizers import Optimizer
from tests.mpi.masters import QUIET, WITH_MASTER, Small, alike, farthest, five, noise, samples_of_all, several


@several
@pytest.mark.parametrize("name", WITH_MASTER)
def test_every_sample_comes_once_an_epoch_and_all_end_with_the_masters_weights(name: str) -> None:
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


@several
def test_a_slow_worker_is_stale_by_what_the_others_did_meanwhile() -> None:
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


@several
def test_a_gradient_that_comes_too_late_is_dropped_and_counted() -> None:
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


@five
@pytest.mark.parametrize("sync_every_masters", [1, 3])
def test_masters_under_a_master_use_every_sample_once_and_end_alike(sync_every_masters: int) -> None:
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


@several
@pytest.mark.usefixtures("interruptible")
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


WAYS = [*({"name": name} for name in WITH_MASTER), pytest.param({"name": "downpour", "masters": 2}, marks=five)]


@several
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_slider_and_stop_button_reach_every_worker(
    collector: Any, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@several
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
