"""Several ranks go on from a checkpoint bit for bit, and all refuse what rank 0 cannot use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm, train
from labkit.data import Dataset, from_tensors


def noise() -> Dataset:
    n = comm.size * 40 + 7
    images = torch.randint(0, 256, (n, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


class Net(nn.Module):
    """Dropout and running statistics: both differ between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 12), nn.BatchNorm1d(12)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.last(self.dropout(torch.tanh(self.norm(self.first(x.flatten(1)))))), dim=1)


def fresh(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same on all ranks."""
    return Path(comm.broadcast_object(str(tmp_path)))


def synchronous(model: nn.Module, **settings: Any) -> train.History:
    settings = {"lr": 0.1, "batch_size": 8, "epochs": 3, "progress": False, "device": "cpu"} | settings
    return train.synchronous(model, noise(), **settings)


class CutError(Exception):
    """In place of a crash."""


def cut_after(steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that raises in training step number `steps`, on all ranks."""
    done = 0

    def nll_loss(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal done
        done += output.requires_grad
        if done > steps:
            raise CutError
        return functional.nll_loss(output, labels)

    return nll_loss


def same(one: tuple[train.History, nn.Module], other: tuple[train.History, nn.Module]) -> None:
    (history, model), (expected, whole) = one, other
    assert history.steps.loss.tolist() == expected.steps.loss.tolist()
    assert history.steps.rank_loss.tolist() == expected.steps.rank_loss.tolist()
    for row, theirs in zip(history.epochs, expected.epochs, strict=True):
        for name in ("loss", "accuracy", "rank_loss", "test_loss", "test_accuracy", "replica_difference"):
            assert getattr(row, name) == getattr(theirs, name), name
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_every": 1},
        {"checkpoint_every": "0s", "optimizer": train.Adam},
        {"checkpoint_every": "0s", "initial_sync": False},
        {"checkpoint_every": 1, "validate": "thread", "sync": "overlap"},
    ],
    ids=["epoch", "step, Adam", "step, replicas apart", "validation in a thread"],
)
def test_all_ranks_go_on_as_if_they_had_never_ended(folder: Path, settings: dict[str, Any]) -> None:
    apart = settings.get("initial_sync") is False
    begin = comm.rank if apart else 0
    whole, resumed = fresh(begin), fresh(9)
    expected = synchronous(whole, **settings)
    with pytest.raises(CutError):
        synchronous(fresh(begin), checkpoint=folder, loss=cut_after(8), **settings)
    comm.barrier()
    history = synchronous(resumed, checkpoint=folder, restore=True, **settings)
    same((history, resumed), (expected, whole))
    if apart and comm.size > 1:
        assert history.epochs[-1].replica_difference > 0


def test_all_ranks_are_told_what_rank_0_found(folder: Path) -> None:
    synchronous(fresh(), epochs=1, checkpoint=folder)
    told = r"seed: 0 there, 1 here" if comm.rank == 0 else r"rank 0: .*\n  seed: 0 there, 1 here"
    with pytest.raises(train.CheckpointError, match=told):
        synchronous(fresh(), restore=folder, seed=1)
    with pytest.raises(train.CheckpointError, match="no checkpoints can be written to /proc/run"):
        synchronous(fresh(), checkpoint="/proc/run")
    comm.barrier()  # nobody waits: the next collective works


def test_a_checkpoint_of_another_number_of_ranks_is_refused(folder: Path) -> None:
    alone = comm.world().split(0 if comm.rank == 0 else 1)
    if comm.rank == 0:
        synchronous(fresh(), epochs=1, checkpoint=folder, over=alone)
    comm.barrier()
    if comm.size > 1:
        with pytest.raises(train.CheckpointError, match=f"world_size: 1 there, {comm.size} here"):
            synchronous(fresh(), restore=folder)
    else:
        assert len(synchronous(fresh(), restore=folder).epochs) == 3
    alone.free()


def test_a_damaged_checkpoint_gives_way_to_the_one_before_on_all_ranks(folder: Path) -> None:
    whole, resumed = fresh(), fresh()
    expected = synchronous(whole)
    synchronous(fresh(), epochs=2, checkpoint=folder)
    if comm.rank == 0:
        content = (folder / "latest.pt").read_bytes()
        (folder / "latest.pt").write_bytes(content[: len(content) // 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = synchronous(resumed, checkpoint=folder, restore=True)
    assert sum("goes on from previous.pt, after epoch 1" in str(each.message) for each in caught) == (comm.rank == 0)
    same((history, resumed), (expected, whole))


def test_ranks_given_different_folders_are_told(folder: Path) -> None:
    if comm.size > 1:
        with pytest.raises(train.TrainError, match=r"checkpoint: rank 0: '.*', rank 1: None"):
            synchronous(fresh(), checkpoint=folder if comm.rank == 0 else None)


def test_what_the_stop_button_ends_goes_on_in_the_middle_of_the_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = fresh(), fresh()
    expected = synchronous(whole)
    pressed = iter([False] * 7 + [True])
    with monkeypatch.context() as patch:
        patch.setattr("labkit.train.wishes.Wishes.stop", lambda _: next(pressed))
        stopped = synchronous(fresh(), checkpoint=folder)
    assert stopped.stopped == "stopped from the notebook after step 8"
    history = synchronous(resumed, checkpoint=folder, restore=True)
    assert history.settings["restored"].endswith("after epoch 1, step 3") or comm.size == 1
    same((history, resumed), (expected, whole))


def test_a_master_goes_on_with_its_weights_and_the_next_epoch(folder: Path) -> None:
    if comm.size == 1:
        pytest.skip("a master needs a worker")
    settings = {"batch_size": 9, "progress": False, "device": "cpu", "validate": "thread", "checkpoint": folder}
    model, resumed = fresh(), fresh(1)
    first = train.downpour(model, noise(), epochs=2, lr=0.05, **settings)
    saved = train.load_checkpoint(folder)
    assert (saved["epoch"], saved["step"]) == (2, 0)
    assert all(torch.equal(value, saved["model"][name]) for name, value in model.named_parameters())
    comm.barrier()
    second = train.downpour(resumed, noise(), epochs=3, lr=0.05, restore=True, **settings)
    assert [row.epoch for row in second.epochs] == [1, 2, 3]
    known = [row.test_loss for row in first.epochs]
    assert [row.test_loss for row in second.epochs][:2] == known and second.epochs[2].test_loss > 0
    samples = sum(comm.all_gather_object(float(second.steps.samples.sum())))
    assert samples == len(noise().train)  # one epoch more, every sample once
