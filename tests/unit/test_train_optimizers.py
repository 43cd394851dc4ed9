"""The optimizers written out compute what torch's compute, and don't load its compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from labkit.train import SGD, Adam


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.85}),
        (Adam, torch.optim.Adam, {"lr": 0.01}),
        (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}),
    ],
)
def test_it_steps_as_torchs_does_also_when_the_learning_rate_changes(
    ours: Any, theirs: Any, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    mine, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    reference.load_state_dict(mine.state_dict())
    pairs = (
        (mine, ours(mine.parameters(), **settings)),
        (reference, theirs(reference.parameters(), **settings)),
    )
    for step in range(20):
        x = torch.randn(8, 5)
        for model, optimizer in pairs:
            optimizer.param_groups[0]["lr"] = settings["lr"] / (1 + step // 10)
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert torch.allclose(mine.weight, reference.weight, atol=1e-7, rtol=0)


def test_a_parameter_without_a_gradient_stays() -> None:
    for optimizer in (SGD, Adam):
        model = nn.Linear(2, 2)
        before = model.weight.detach().clone()
        optimizer(model.parameters(), lr=1.0).step()
        assert torch.equal(model.weight, before)


TRAINING = """
import sys, torch
from labkit import data
from labkit.train import Adam, Alone, LeNet, synchronous
dataset = data.from_tensors(torch.zeros(20, 28, 28, dtype=torch.uint8), torch.arange(20) % 10)
for optimizer in (None, Adam):
    synchronous(LeNet(), dataset, optimizer=optimizer, over=Alone(), device="cpu")
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_training_does_not_load_torchs_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", TRAINING], timeout=100, check=False).returncode == 0
