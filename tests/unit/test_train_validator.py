"""Every way to test finds the same, the thread's results come to the right epoch, and its errors to the training."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import train
from labkit.data import Dataset, from_tensors
from labkit.train.validator import TestThread


def noise(n: int = 60) -> Dataset:
    images = torch.randint(0, 256, (n, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(64, 10), nn.BatchNorm1d(10), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.dropout(self.norm(self.first(x.flatten(1)))), dim=1)


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def single(model: nn.Module, **settings: Any) -> train.History:
    return train.single(model, noise(), **({"lr": 0.1, "batch_size": 8, "epochs": 4, "progress": False} | settings))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "labkit validation" in thread.name]


def test_all_ways_find_the_same_and_train_the_same() -> None:
    expected = single(fresh())
    for way in ("distributed", "inline", "thread"):
        history = single(fresh(), validate=way)
        assert history.steps.loss.tolist() == expected.steps.loss.tolist()
        for row, theirs in zip(history.epochs, expected.epochs, strict=True):
            assert (row.test_loss, row.test_accuracy) == (theirs.test_loss, theirs.test_accuracy)
    assert threads() == []
    assert all(math.isnan(row.test_loss) for row in single(fresh(), validate=False).epochs)


def test_the_thread_tests_while_training_goes_on() -> None:
    """Its first test ends only when the training is in its second epoch: inline, this would never end."""
    second = threading.Event()
    main = threading.get_ident()
    steps = 0

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        if threading.get_ident() == main:
            steps += 1
            if steps > 7:
                second.set()
        else:
            assert second.wait(60)
        return functional.nll_loss(output, labels)

    output = io.StringIO()
    history = single(fresh(), validate="thread", loss=loss, progress=train.Progress(output))
    expected = single(fresh())
    assert [row.test_loss for row in history.epochs] == [row.test_loss for row in expected.epochs]
    lines = output.getvalue().splitlines()
    assert "test loss" not in lines[0] and any(line.startswith("epoch 1: test loss") for line in lines)


def failing(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    tests = 0

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal tests
        tests += not output.requires_grad
        if tests > after and not output.requires_grad:
            raise ZeroDivisionError("no samples")
        return functional.nll_loss(output, labels)

    return loss


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_in_the_thread_is_raised_in_the_training(after: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        single(fresh(), validate="thread", loss=failing(after))
    assert caught.value.__notes__ == [f"Rank 0's validation thread raised this in the test after epoch {after + 1}."]
    assert threads() == []


def test_an_interrupted_training_leaves_no_thread_and_does_not_wait_for_the_test() -> None:
    begun, main, steps = threading.Event(), threading.get_ident(), 0

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        if threading.get_ident() != main:
            begun.set()
        else:
            steps += 1
            if steps == 9:
                assert begun.wait(60)
                raise KeyboardInterrupt
        return functional.nll_loss(output, labels)

    with pytest.raises(KeyboardInterrupt):
        single(fresh(), validate="thread", loss=loss)
    assert threads() == []


def test_no_more_copies_of_the_weights_wait_than_said() -> None:
    going, begun = threading.Event(), threading.Event()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        begun.set()
        assert going.wait(60)
        return functional.nll_loss(output, labels)

    model = fresh()
    thread = TestThread(model, noise().test, loss)
    thread.submit(1, model)
    assert begun.wait(60)
    thread.submit(2, model)
    assert thread.collect() == []
    third = threading.Thread(target=thread.submit, args=(3, model))
    third.start()
    third.join(0.05)
    assert third.is_alive()  # it waits
    going.set()
    third.join(60)
    assert sorted(tested.epoch for tested in thread.collect(outstanding=0)) == [1, 2, 3]
    thread.close()


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(train.SettingError, match="validate must be True, False or one of distributed, inline, thread"):
        train.Settings(validate="tread")


def test_a_master_tests_alone_and_its_best_weights_are_kept(tmp_path: Any) -> None:
    model, dataset = fresh(), noise()
    common = train.Settings(over=train.Alone(), validate="thread", epochs=3, checkpoint=tmp_path, progress=False)
    with train.Run("mine", model, dataset, common, {}, computing=(0, 1)) as run:
        assert not run.together and run.resume() == (0, 0)
        for epoch in range(3):
            run.recorder.begin_epoch(epoch)
            with torch.no_grad():
                model.first.weight.mul_(-1)
            row = run.recorder.end_epoch()
            run.validate(row)
            run.end_epoch(row)
        run.finish()
    accuracies = [row.test_accuracy for row in run.history.epochs]
    assert not any(map(math.isnan, accuracies))
    assert train.load_checkpoint(tmp_path, "best")["epoch"] == 1 + accuracies.index(max(accuracies))
    refused = train.Settings(over=train.Alone(), validate="distributed", progress=False)
    with pytest.raises(train.SettingError, match="here workers step on their own"):
        train.Run("mine", model, dataset, refused, {}, computing=(0, 1))
