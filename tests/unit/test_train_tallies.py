"""A master's sums over the epochs."""

from __future__ import annotations

import torch

from labkit.train import Alone
from labkit.train.exchange import Push
from labkit.train.recorder import Recorder
from labkit.train.tallies import Tallies


def tallies(samples: int = 10, first: int = 0) -> Tallies:
    return Tallies(samples, Recorder(Alone(), torch.device("cpu"), None), first)


def push(epoch: int, samples: int, loss: float = 0.0) -> Push:
    return Push(epoch=epoch, samples=samples, loss=loss, right=samples / 2, batches=1)


def test_an_epoch_ends_when_all_its_samples_are_used_or_lost() -> None:
    sums = tallies()
    assert not list(sums.add(push(0, 4, loss=8.0)))
    assert not list(sums.lose(push(0, 2)))
    [row] = sums.add(push(0, 4, loss=8.0))
    assert (row.epoch, row.steps, row.loss, row.accuracy) == (1, 2, 2.0, 0.5)
    assert sums.rest() is None


def test_a_worker_that_is_ahead_ends_its_epoch_after_the_one_before() -> None:
    sums = tallies(first=3)
    assert not list(sums.add(push(4, 10)))  # all of it, and nobody has told anything of the one before
    assert not list(sums.add(push(3, 9)))
    assert [row.epoch for row in sums.add(push(3, 1))] == [4, 5]


def test_what_nobody_will_end_is_one_row() -> None:
    sums = tallies()
    assert not list(sums.add(push(1, 4, loss=1.0))) and not list(sums.add(push(0, 3, loss=6.0)))
    row = sums.rest()
    assert row is not None and (row.epoch, row.steps, row.loss) == (1, 2, 1.0)
