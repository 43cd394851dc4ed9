"""A run that goes on from a checkpoint makes the steps it would have made, whatever happened to process or file."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import train
from labkit.data import Dataset, from_tensors
from labkit.train.checkpoint import Every
from labkit.train.checkpoint_folder import CheckpointFolder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two would only wait for each other with a network this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(n: int = 60) -> Dataset:
    images = torch.randint(0, 256, (n, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


class Net(nn.Module):
    """Has all that a checkpoint must keep: dropout, running statistics, two layers."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, hidden), nn.BatchNorm1d(hidden)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.last(self.dropout(torch.tanh(self.norm(self.first(x.flatten(1)))))), dim=1)


def fresh(seed: int = 0, **about: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**about)


def single(model: nn.Module, **settings: Any) -> train.History:
    settings = {"lr": 0.1, "batch_size": 8, "epochs": 4, "progress": False} | settings
    return train.single(model, settings.pop("dataset", None) or noise(), **settings)


class CutError(Exception):
    """In place of a crash."""


def cut_after(steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that raises in training step number `steps`."""
    done = 0

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal done
        done += output.requires_grad
        if done > steps:
            raise CutError
        return functional.nll_loss(output, labels)

    loss.__name__ = "nll_loss"
    return loss


def same_curve(one: train.History, other: train.History) -> None:
    for name in ("loss", "rank_loss", "lr", "samples"):
        np.testing.assert_array_equal(getattr(one.steps, name), getattr(other.steps, name))
    figures = ("epoch", "steps", "loss", "accuracy", "test_loss", "test_accuracy")
    for name in figures:
        assert [getattr(row, name) for row in one.epochs] == [getattr(row, name) for row in other.epochs]


def same_weights(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


OPTIMIZERS: dict[str, Any] = {"SGD": None, "Adam": train.Adam, "torch's AdamW": lambda p: torch.optim.AdamW(p, lr=0.01)}


@pytest.mark.parametrize(
    ("every", "optimizer"),
    [(1, "SGD"), (1, "Adam"), ("0s", "SGD"), ("0s", "Adam"), ("0s", "torch's AdamW")],
)
def test_a_run_goes_on_as_if_it_had_never_ended(tmp_path: Path, every: int | str, optimizer: str) -> None:
    whole, makes = fresh(), OPTIMIZERS[optimizer]
    expected = single(whole, optimizer=makes)
    settings = {"optimizer": makes, "checkpoint": tmp_path, "checkpoint_every": every}
    with pytest.raises(CutError):
        single(fresh(), loss=cut_after(18), **settings)
    found = train.load_checkpoint(tmp_path)
    assert (found["epoch"], found["step"]) == ((2, 0) if every == 1 else (2, 4))
    resumed = fresh(seed=1)  # other weights: they must come from the checkpoint
    history = single(resumed, restore=True, loss=functional.nll_loss, **settings)
    same_curve(history, expected)
    same_weights(resumed, whole)
    assert "after epoch 2" in history.settings["restored"] and len(history.steps) == len(expected.steps) == 28


def test_random_numbers_of_numpy_and_python_go_on_too_where_the_training_draws_them(tmp_path: Path) -> None:
    def noisy(steps: int) -> Callable[[Tensor, Tensor], Tensor]:
        cut = cut_after(steps)

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            return cut(output, labels) * (1 + random.random() + np.random.rand())

        return loss

    def run(**settings: Any) -> train.History:
        random.seed(3)
        np.random.seed(4)
        return single(fresh(), **settings)

    expected = run(loss=noisy(10**6))
    with pytest.raises(CutError):
        run(loss=noisy(18), checkpoint=tmp_path)
    same_curve(run(loss=noisy(10**6), checkpoint=tmp_path, restore=True), expected)


def test_the_best_epoch_is_kept_and_opens_with_torch_alone(tmp_path: Path) -> None:
    history = single(fresh(), checkpoint=tmp_path, epochs=5, lr=0.5)
    accuracies = [row.test_accuracy for row in history.epochs]
    best = train.load_checkpoint(tmp_path, "best")
    assert best["epoch"] == 1 + accuracies.index(max(accuracies))
    opened = torch.load(tmp_path / "best.pt", weights_only=True)
    assert opened["model"].keys() == fresh().state_dict().keys()
    assert train.load_checkpoint(tmp_path)["epoch"] == 5 and train.load_checkpoint(tmp_path, "previous")["epoch"] == 4
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "best.pt", "latest.pt", "previous.pt"]


def test_more_epochs_go_on_from_the_last_and_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole, part = fresh(), fresh()
    expected = single(whole, epochs=3)
    single(part, epochs=2, checkpoint=tmp_path, checkpoint_every=5)  # the end is always kept
    same_curve(single(part, epochs=3, checkpoint=tmp_path, restore=True), expected)
    same_weights(part, whole)
    same_curve(single(fresh(), epochs=3, checkpoint=tmp_path, restore=True), expected)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [(cut_short, "cut short"), (flip_a_bit, "checksum does not fit"), (remove, "cannot be read: No such file")],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    whole, resumed = fresh(), fresh()
    expected = single(whole)
    single(fresh(), epochs=2, checkpoint=tmp_path)
    damage(tmp_path / "latest.pt")
    with pytest.warns(UserWarning, match=rf"latest\.pt .*{told}.*goes on from previous\.pt, after epoch 1"):
        history = single(resumed, checkpoint=tmp_path, restore=True)
    same_curve(history, expected)
    same_weights(resumed, whole)
    assert train.load_checkpoint(tmp_path, "previous")["epoch"] == 3  # the damaged one took no good one's place


def test_where_both_are_damaged_both_are_named(tmp_path: Path) -> None:
    single(fresh(), epochs=2, checkpoint=tmp_path)
    cut_short(tmp_path / "latest.pt")
    flip_a_bit(tmp_path / "previous.pt")
    with pytest.raises(train.CheckpointError, match=r"latest\.pt is cut short.*previous\.pt is damaged"):
        single(fresh(), checkpoint=tmp_path, restore=True)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"batch_size": 4}, "batch_size: 8 there, 4 here"),
        ({"seed": 5}, "seed: 0 there, 5 here"),
        ({"lr": 0.2}, r"optimizer: 'SGD\(lr=0.1.* there, 'SGD\(lr=0.2"),
        ({"dataset": noise(50)}, "dataset: .*54 training.* there, .*45 training.* here"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_with_the_difference(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    single(fresh(), epochs=1, checkpoint=tmp_path)
    with pytest.raises(train.CheckpointError, match=rf"another training:\n  {named}"):
        single(fresh(), restore=tmp_path / "latest.pt", **other)


def test_another_model_is_refused_before_its_weights_are_touched(tmp_path: Path) -> None:
    single(fresh(), epochs=1, checkpoint=tmp_path)
    model, untouched = fresh(hidden=13), fresh(hidden=13)
    with pytest.raises(train.CheckpointError, match=r"model: 'Net with .*\(12×64.* there, 'Net with .*\(13×64"):
        single(model, restore=tmp_path)
    same_weights(model, untouched)


class Bare:
    """An optimizer with what a step asks for, and no more."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, untouched = fresh(), fresh()
    with pytest.raises(train.CheckpointError, match="there is no checkpoint in"):
        single(model, restore=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(train.CheckpointError, match=r"no checkpoints can be written to .*file/run: Not a directory"):
        single(model, checkpoint=tmp_path / "file" / "run")
    with pytest.raises(train.CheckpointError, match=r"no checkpoints can be written to /proc/run: No such file"):
        single(model, checkpoint="/proc/run")
    other = CheckpointFolder(tmp_path / "taken", 0, going_on=False)
    with pytest.raises(train.CheckpointError, match="another run is writing its checkpoints to"):
        single(model, checkpoint=tmp_path / "taken")
    other.close()
    single(fresh(), epochs=1, checkpoint=tmp_path / "taken")
    with pytest.raises(train.CheckpointError, match=r"latest\.pt of an earlier run: go on from it by restore=True"):
        single(model, checkpoint=tmp_path / "taken")
    with pytest.raises(
        train.SettingError, match=r"restore=True goes on from the folder in checkpoint, and there is no"
    ):
        single(model, restore=True)
    with pytest.raises(train.CheckpointError, match="Bare has no state_dict and load_state_dict"):
        single(model, checkpoint=tmp_path / "new", optimizer=Bare)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(train.CheckpointError, match="0 MB are free, and one needs about"):
        single(model, checkpoint=tmp_path / "full")
    same_weights(model, untouched)


def test_a_write_that_fails_later_is_a_warning_and_the_old_one_stays(tmp_path: Path) -> None:
    single(fresh(), epochs=1, checkpoint=tmp_path)
    before = (tmp_path / "latest.pt").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    steps = 0

    def filling(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += output.requires_grad
        if steps == 3:  # from here on the system refuses to let any file grow beyond 3 kB
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limit[1]))
        return functional.nll_loss(output, labels)

    filling.__name__ = "nll_loss"
    told = r"checkpoint after epoch 2, step 0 could not be written to .*: File too large"
    try:
        with pytest.warns(UserWarning, match=told):
            history = single(fresh(), epochs=2, checkpoint=tmp_path, restore=True, loss=filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # before pytest writes to its own log
    assert len(history.epochs) == 2 and (tmp_path / "latest.pt").read_bytes() == before
    assert not (tmp_path / "new.partial").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from labkit.train.checkpoint_folder import CheckpointFolder
import torch

def write_and_die(path, call, number):
    folder = CheckpointFolder(path, 0, going_on=False)
    content = {"model": {}, "optimizer": {}, "epoch": 1, "step": 0, "ranks": [], "much": torch.zeros(10_000)}
    folder.write(content, 1)
    original, calls = getattr(os, call), 0
    def dying(*arguments):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(os, call, dying)
    folder.write(content | {"epoch": 2}, 2)

for number, case in enumerate(sys.argv[2:]):
    call, which = case.split()
    child = os.fork()
    if child == 0:
        write_and_die(Path(sys.argv[1]) / case, call, int(which))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, case
"""


def test_a_process_killed_in_the_middle_of_writing_leaves_a_good_one(tmp_path: Path) -> None:
    expected = {"fsync 1": 1, "replace 1": 1, "replace 2": 1, "fsync 2": 2}
    program = [sys.executable, "-c", KILLED, str(tmp_path), *expected]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for case, epoch in expected.items():
        assert train.load_checkpoint(tmp_path / case)["epoch"] == epoch
        CheckpointFolder(tmp_path / case, 0, going_on=True).close()  # the lock died with the process
        assert not (tmp_path / case / "new.partial").exists()


@pytest.mark.parametrize("given", [0, -1, True, "30", "s", "-1s", "1e3s", 2.5, None])
def test_how_often_is_a_number_of_epochs_or_of_seconds(given: Any) -> None:
    with pytest.raises(
        train.SettingError, match="checkpoint_every must be a number of epochs such as 1, or of seconds"
    ):
        train.Settings(checkpoint_every=given)
    assert Every.parse(2) == Every(2, None) and Every.parse("1.5s") == Every(None, 1.5)


@pytest.mark.parametrize("name", ["nothing.pt", "text.pt", "own.pt"])
def test_a_file_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"a": 1}, tmp_path / "own.pt")
    with pytest.raises(train.CheckpointError, match=rf"{name} (cannot be read|is cut short, or no checkpoint)"):
        train.load_checkpoint(tmp_path / name)
