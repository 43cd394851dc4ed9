"""A rank that is slowed down on purpose: only its time changes, and all ranks know of it."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import torch

from labkit import comm
from labkit.data import Dataset, from_tensors
from labkit.train import History, LeNet, Load, Pause, SettingError, TrainError, slow, synchronous

PAUSE_S = 0.05


def noise() -> Dataset:
    """24 images for each rank's three steps, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (24 * comm.size, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (24 * comm.size,), generator=generator)
    return from_tensors(images, labels, images[:8], labels[:8])


def trained(**settings: Any) -> tuple[LeNet, History]:
    torch.manual_seed(0)
    model = LeNet()
    history = synchronous(model, noise(), batch_size=8, device="cpu", progress=False, validate=False, **settings)
    return model, history


def test_a_pause_lengthens_the_steps_of_its_rank_and_changes_no_weight() -> None:
    last = comm.size - 1
    usual, _ = trained()
    slowed, history = trained(slow={last: Pause(PAUSE_S, every=2)})
    assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), slowed.parameters(), strict=True))
    assert len(history.steps) == 3
    if comm.rank == last:
        assert history.steps.compute_s[1] >= PAUSE_S
    assert history.settings["slow"] == f"rank {last}: pauses {PAUSE_S:g} s every 2 steps"


def test_a_load_is_there_while_its_rank_trains_and_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    after = slow.Slowed.after

    def look(slowed: slow.Slowed, compute_s: float) -> None:
        seen.append(len(psutil.Process().children()))
        after(slowed, compute_s)

    monkeypatch.setattr(slow.Slowed, "after", look)
    cores = os.sched_getaffinity(0)
    trained(slow={0: Load(2)})
    assert seen == ([2 * torch.get_num_threads()] * 3 if comm.rank == 0 else [])
    assert not psutil.Process().children() and os.sched_getaffinity(0) == cores


def test_a_rank_that_there_is_not_is_refused_on_all_ranks() -> None:
    with pytest.raises(SettingError, match=f"slow has no rank {comm.size}: there are {comm.size}, from 0"):
        trained(slow={comm.size: 2.0})


def test_ranks_that_are_told_different_things_say_so() -> None:
    setting = {0: 2.0 + comm.rank}
    if comm.size == 1:
        assert trained(slow=setting)[1].settings["slow"] == "rank 0: 2 times"
        return
    with pytest.raises(TrainError, match=r"slow: rank 0: 'rank 0: 2 times', rank 1: 'rank 0: 3 times'"):
        trained(slow=setting)
