"""Methods with a master, and the averaging of weights, make the steps that one process would make."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm
from labkit.train import (
    SGD,
    FlatWeights,
    TorchTransport,
    TrainError,
    averaging,
    backup_workers,
    downpour,
    easgd,
    gem,
    replica_differences,
    run,
    single,
)
from tests.mpi.masters import QUIET, WITH_MASTER, Small, WithNorm, alike, farthest, noise, samples_of_all, several


@pytest.fixture
def pair() -> Iterator[comm.Communicator | None]:
    """Ranks 0 and 1: a master and one worker."""
    if comm.size < 2:
        pytest.skip("a master and a worker are 2 ranks")
    group = comm.world().split(0 if comm.rank < 2 else None)
    yield group
    if group:
        group.free()


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


@several
def test_waiting_for_all_makes_the_steps_of_one_process_with_all_batches() -> None:
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


def test_statistics_of_the_model_reach_the_master_too(pair: comm.Communicator | None) -> None:
    if pair is None:
        return
    dataset, together, alone = noise(61), WithNorm(), WithNorm()
    ours = downpour(together, dataset, over=pair, lr=0.1, **QUIET)
    theirs = single(alone, dataset, lr=0.1, **QUIET)
    assert torch.allclose(together.norm.running_mean, alone.norm.running_mean)
    assert together.norm.num_batches_tracked == alone.norm.num_batches_tracked == 8
    assert ours.epochs[0].test_loss == pytest.approx(theirs.epochs[0].test_loss, abs=1e-9)


@several
def test_several_ranks_a_worker_make_the_steps_of_one_process_with_their_batches() -> None:
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
