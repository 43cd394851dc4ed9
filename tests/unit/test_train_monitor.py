"""What a rank uses is sampled while it trains, and saved with the history."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from labkit import train
from labkit.data import from_tensors
from labkit.train.monitor import Monitor, gpu
from tests.conftest import eventually


def test_it_samples_until_it_is_closed_and_sees_memory_and_work() -> None:
    monitor = Monitor(torch.device("cpu"), period_s=0.01)
    assert eventually(lambda: len(monitor.resources()) >= 2)
    before = len(monitor.resources())
    much = torch.ones(100_000_000)  # 400 MB, and work to fill them
    assert eventually(lambda: len(monitor.resources()) > before + 1)
    monitor.close()
    found = monitor.resources()
    assert found.memory_mb[-1] - found.memory_mb[0] > 300 and len(much) > 0
    assert found.cpu_percent.max() > 0
    assert (np.diff(found.time_s) > 0).all() and np.isnan(found.gpu_memory_mb).all()
    assert not [thread for thread in threading.enumerate() if thread.name == "labkit monitor"]


def run(**settings: object) -> train.History:
    images = torch.zeros(40, 8, 8, dtype=torch.uint8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.LogSoftmax(1))
    return train.single(model, from_tensors(images, torch.arange(40) % 10), progress=False, **settings)


def test_a_training_has_each_ranks_samples_and_saves_them(tmp_path: Path) -> None:
    history = run(monitor=True)
    assert len(history.resources) == 1 and len(history.resources[0]) >= 1  # one at the end, however short it was
    loaded = train.History.load(history.save(tmp_path / "run.json"))
    for name in ("time_s", "cpu_percent", "memory_mb", "gpu_memory_mb", "gpu_percent"):
        saved, found = getattr(loaded.resources[0], name), getattr(history.resources[0], name)
        np.testing.assert_array_equal(saved, found)
    assert run().resources == []


def test_a_training_that_fails_leaves_no_thread() -> None:
    def failing(output: Tensor, labels: Tensor) -> Tensor:
        assert [thread for thread in threading.enumerate() if thread.name == "labkit monitor"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(monitor=True, loss=failing)
    assert not [thread for thread in threading.enumerate() if thread.name == "labkit monitor"]


def test_where_there_is_no_gpu_its_figures_are_unknown() -> None:
    assert all(map(math.isnan, gpu(torch.device("cpu"))))
