"""Several ranks test their model in each way, and choose a batch size; what one finds or fails at, all know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from labkit import comm, train
from labkit.data import Dataset, from_tensors


def noise() -> Dataset:
    n = comm.size * 40 + 7
    images = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


def synchronous(**settings: Any) -> train.History:
    torch.manual_seed(0)
    settings = {"lr": 0.05, "batch_size": 8, "epochs": 3, "progress": False, "device": "cpu"} | settings
    return train.synchronous(train.DNN(), noise(), **settings)


@pytest.mark.parametrize("way", ["inline", "thread"])
def test_rank_0_alone_finds_what_all_find_together_and_all_know_it(way: str) -> None:
    expected = synchronous(validate="distributed")
    history = synchronous(validate=way)
    found = [(row.test_loss, row.test_accuracy) for row in history.epochs]
    assert all(theirs == found for theirs in comm.all_gather_object(found))
    assert [accuracy for _, accuracy in found] == [row.test_accuracy for row in expected.epochs]
    assert [loss for loss, _ in found] == pytest.approx([row.test_loss for row in expected.epochs], rel=1e-6)
    assert history.steps.loss.tolist() == expected.steps.loss.tolist()


def test_all_ranks_are_told_of_an_error_in_the_thread() -> None:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        if not output.requires_grad:
            raise ZeroDivisionError("no samples")
        return functional.nll_loss(output, labels)

    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError, match="no samples"):
            synchronous(validate="thread", loss=loss)
    else:
        with pytest.raises(train.TrainError, match=r"rank 0: the validation thread failed: ZeroDivisionError"):
            synchronous(validate="thread", loss=loss)
    comm.barrier()  # nobody waits: the next collective works


def test_all_ranks_stop_after_the_same_epoch() -> None:
    history = synchronous(validate="thread", epochs=10**6, lr=0.0, early_stopping="val_loss,~<,2")
    ends = comm.all_gather_object((len(history.epochs), history.stopped, len(history.steps)))
    assert all(end == ends[0] for end in ends) and "has not become smaller" in ends[0][1]


def test_all_ranks_agree_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(_: object, images: Tensor, labels: Tensor) -> float:
        return 1.0 if len(labels) <= (8 if comm.rank == comm.size - 1 else 32) else 10.0

    monkeypatch.setattr("labkit.train.batch_size._Trial._seconds", seconds)  # the last rank is the slowest
    history = synchronous(batch_size="auto", epochs=1)
    assert comm.all_gather_object(history.settings["batch_size"]) == [8] * comm.size
    if comm.size > 1:
        with pytest.raises(train.TrainError, match="batch_size: rank 0: 'auto', rank 1: 8"):
            synchronous(batch_size="auto" if comm.rank == 0 else 8)
