"""Targets and early stopping: what is read, when training ends, and what it says then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from labkit import train
from labkit.data import from_tensors
from labkit.train.stopping import EarlyStopping, Stopping, Target


def rows(losses: list[float], accuracies: list[float] | None = None) -> list[train.EpochRow]:
    accuracies = accuracies or [math.nan] * len(losses)
    return [
        train.EpochRow(1 + i, 1, loss=1.0 / (1 + i), accuracy=0.1 * i, rank_loss=0.0, rank_accuracy=0.0, seconds=1.0,
                       images_per_s=1.0, test_loss=loss, test_accuracy=accuracy)
        for i, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "values", "epoch"),
    [
        ("val_acc,>,0.97", [0.9, 0.97, 0.98], 3),
        ("val_acc, > ,.5", [0.6], 1),
        ("acc,>,0.15", [0.0, 0.0, 0.0], 3),
        ("loss,<,0.4", [0.0, 0.0, 0.0], 3),
    ],
)
def test_a_target_is_reached_by_the_newest_value(target: str, values: list[float], epoch: int) -> None:
    all_rows = rows([1.0] * len(values), values)
    rule = Target.parse(target)
    reasons = [rule.reason(all_rows[:n]) for n in range(1, len(values) + 1)]
    assert reasons[: epoch - 1] == [None] * (epoch - 1)
    assert reasons[epoch - 1].startswith(f"target reached by epoch {epoch}: {rule.metric} ")


@pytest.mark.parametrize(
    ("rule", "losses", "stops"),
    [
        ("val_loss,~<,2", [3, 2, 1, 1, 2], 5),  # equal is not smaller
        ("val_loss,~<,2", [3, 4, 2, 4, 4], 5),
        ("val_loss,~<,1", [3, 2, 1, 0], None),
        ("val_loss,~<,4", [1, 2, 3, 4], None),
        ("val_loss,~>,2", [1, 2, 2, 1], 4),
        ("val_loss,~<,2", [1, math.nan, math.nan, math.nan], None),  # not known yet
        ("val_loss,~<,2", [1, 2, 3, math.nan], 3),
    ],
)
def test_early_stopping_waits_for_so_many_epochs(rule: str, losses: list[float], stops: int | None) -> None:
    stopping = EarlyStopping.parse(rule)
    reasons = [stopping.reason(rows(losses)[:n]) for n in range(1, len(losses) + 1)]
    first = next((n for n, reason in enumerate(reasons, start=1) if reason), None)
    assert first == stops


@pytest.mark.parametrize("rule", ["val_loss,~<,2", "val_loss,~>,2", "loss,~<,2", "loss,~>,2"])
def test_training_that_diverges_gets_no_better(rule: str) -> None:
    sound, *diverged = rows([1.0, math.nan, math.nan])
    for row in diverged:
        row.loss = math.nan
    stopping = EarlyStopping.parse(rule)
    assert stopping.reason([sound, *diverged[:1]]) is None
    assert "(epoch 1) for 2 epochs" in (stopping.reason([sound, *diverged]) or "")
    assert Target.parse("val_loss,<,9").reason(diverged) is None


def test_the_reason_says_which_value_was_the_best() -> None:
    reason = EarlyStopping.parse("val_loss,~<,2").reason(rows([3, 0.5, 1, 2]))
    assert reason == "val_loss has not become smaller than 0.5 (epoch 2) for 2 epochs"
    assert Target.parse("val_loss,<,1").reason(rows([0.25])) == "target reached by epoch 1: val_loss 0.25 < 1"


@pytest.mark.parametrize(
    ("setting", "text", "told"),
    [
        ("target", "val_acc>0.97", r"must have three words with commas between them, such as \"val_acc,>,0.97\""),
        ("target", "val_accuracy,>,0.9", "there is no 'val_accuracy', but val_loss, val_acc, loss, acc"),
        ("target", "val_acc,~>,0.9", "'~>' must be > or <, as in"),
        ("target", "val_acc,>,much", "'much' is no number"),
        ("target", "val_acc,>,nan", "'nan' is no number"),
        ("early_stopping", "val_loss,<,4", "'<' must be ~< or ~>, as in \"val_loss,~<,4\""),
        ("early_stopping", "val_loss,~<,0", "'0' is no number of epochs"),
        ("early_stopping", "val_loss,~<,1.5", "'1.5' is no number of epochs"),
        ("early_stopping", 4, "must have three words"),
    ],
)
def test_what_is_wrong_is_named_beside_an_example(setting: str, text: Any, told: str) -> None:
    with pytest.raises(train.SettingError, match=f"{setting}=.*{told}"):
        train.Settings(**{setting: text})


def test_a_metric_of_a_test_that_is_not_made_is_refused() -> None:
    with pytest.raises(train.SettingError, match="nobody knows val_acc with validate=False"):
        train.Settings(target="val_acc,>,0.9", validate=False)
    assert Stopping("acc,>,0.9", None, tested=False).reason([]) is None


def learnable() -> Any:
    labels = torch.arange(80) % 4
    images = torch.zeros(80, 8, 8, dtype=torch.uint8)
    images[torch.arange(80), 2 * labels, :] = 255
    return from_tensors(images, labels)


class Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)).log_softmax(1)


@pytest.mark.parametrize("validate", ["distributed", "inline", "thread"])
def test_training_stops_at_the_target_and_says_so(validate: str) -> None:
    torch.manual_seed(0)
    history = train.single(
        Linear(64, 4), learnable(), epochs=10**6, lr=0.1, target="val_acc,>,0.99", validate=validate, progress=False
    )
    assert history.stopped and history.stopped.startswith("target reached by epoch")
    assert "val_acc 1 > 0.99" in history.stopped and history.stopped in repr(history)
    assert all(not math.isnan(row.test_accuracy) for row in history.epochs)


def test_training_stops_when_it_gets_no_better_and_goes_on_no_further_when_restored(tmp_path: Any) -> None:
    settings = {"epochs": 50, "lr": 0.0, "early_stopping": "val_loss,~<,3", "progress": False, "checkpoint": tmp_path}
    torch.manual_seed(0)
    history = train.single(Linear(64, 4), learnable(), **settings)
    assert len(history.epochs) == 4 and "has not become smaller" in str(history.stopped)
    again = train.single(Linear(64, 4), learnable(), restore=True, **settings)
    assert len(again.epochs) == 4 and again.stopped == history.stopped
