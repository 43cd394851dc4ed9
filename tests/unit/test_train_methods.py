"""Methods by name, and the settings they share."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from labkit import train
from labkit.data import Batch, Dataset, from_tensors


def noise(n: int = 50) -> Dataset:
    images = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


def test_single_takes_the_steps_of_synchronous() -> None:
    models = []
    for name in ("single", "synchronous"):
        torch.manual_seed(0)
        models.append(train.LeNet())
        history = train.run(name, models[-1], noise(), lr=0.1, batch_size=16, over=train.Alone(), progress=False)
        assert history.method == name and len(history.steps) == 3
        assert list(history.steps.staleness) == [0] * 3 and all(history.steps.time_s[1:] > history.steps.time_s[:-1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_unknown_method_or_setting_is_named_with_its_neighbour() -> None:
    with pytest.raises(ValueError, match=r"no method 'synchron', but .*did you mean 'synchronous'"):
        train.run("synchron", train.LeNet(), noise())
    with pytest.raises(TypeError, match="synchronous has no setting 'epoch': did you mean 'epochs'"):
        train.synchronous(train.LeNet(), noise(), epoch=2)
    with pytest.raises(TypeError, match="single has no setting 'sync_evry': there are epochs, batch_size"):
        train.single(train.LeNet(), noise(), sync_evry=2)


def test_a_method_of_ones_own_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.methods, "METHODS", dict(train.METHODS))

    @train.method("frozen")
    def frozen(model: torch.nn.Module, dataset: Dataset, *, beta: float = 1, **settings: Any) -> train.History:
        common = train.Settings.of("frozen", settings, ["beta"])
        with train.Run("frozen", model, dataset, common, {"beta": beta}) as run:

            def step(batch: Batch) -> tuple[float, int]:
                return run.forward_and_backward(batch)

            run.in_step(step)
        return run.history

    history = train.run("frozen", train.LeNet(), noise(), beta=2, epochs=2, over=train.Alone(), progress=False)
    assert history.settings["beta"] == 2 and len(history.epochs) == 2 and len(history.by_rank) == 1
    with pytest.raises(TypeError, match="frozen has no setting 'bet': did you mean 'beta'"):
        train.run("frozen", train.LeNet(), noise(), bet=3)


def test_importing_the_methods_starts_no_mpi() -> None:
    program = "import sys, labkit.train, labkit.data; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
