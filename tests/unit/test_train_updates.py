"""All ways to apply an update come to the same, and say so when they no longer reach the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit.train import CNN, FlatParameters, TrainError, Updater
from labkit.train.updates import WAYS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "momentum": 0.85}),
    ("adam", {"lr": 0.003}),
    ("adam", {"lr": 0.003, "betas": (0.5, 0.9), "eps": 1e-4}),
]


class Odd(nn.Module):
    """Parameters of two dtypes, one that is frozen, one that is used twice, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale.float() + self.frozen


def trained(model: nn.Module, updater: Updater, *, steps: int = 8) -> list[torch.Tensor]:
    """The parameters after some steps, in the last half of which the learning rate is another one."""
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for step in range(steps):
        x = torch.randn(16, 6, generator=generator).to(device)
        if step == steps // 2:
            updater.optimizer.param_groups[0]["lr"] *= 0.1
        updater.zero()
        functional.mse_loss(model(x), x.roll(1, 1)).backward()
        updater.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("optimizer", "settings"), SETTINGS)
@pytest.mark.parametrize("way", WAYS[1:])
def test_each_way_ends_where_the_loop_does(way: str, optimizer: str, settings: dict[str, Any], device: str) -> None:
    loop, other = Odd().to(device), Odd().to(device)
    expected = trained(loop, Updater(loop, "loop", optimizer, **settings))
    found = trained(other, Updater(other, way, optimizer, **settings))
    assert (found[0] - Odd().first.weight.to(device)).abs().max() > 1e-3  # it has learned something
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6


def test_what_is_written_into_the_flat_gradient_is_applied_and_stands_in_the_flat_weights() -> None:
    model = CNN()
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    updater = Updater(model, "flat", "sgd", lr=1.0)
    assert updater.flat is not None
    (weights,) = updater.flat.flat
    (gradient,) = updater.flat.gradients.buffers
    gradient.copy_(torch.arange(gradient.numel()) % 7)
    updater.step()
    assert torch.equal(weights.detach(), before - gradient)
    assert torch.equal(weights.detach(), torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def test_gradients_that_something_replaced_are_taken_all_the_same() -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    updaters = [Updater(model, "flat", "sgd", lr=0.1), Updater(other, "loop", "sgd", lr=0.1)]
    for each, updater in zip((model, other), updaters, strict=True):
        each.zero_grad(set_to_none=True)
        each(torch.ones(3, 4)).square().sum().backward()
        updater.step()
    assert torch.equal(model.weight, other.weight)


def test_weights_that_are_loaded_later_are_those_that_are_changed() -> None:
    model = nn.Linear(4, 2)
    updater = Updater(model, "flat", "sgd", lr=1.0)
    model.load_state_dict({"weight": torch.full((2, 4), 3.0), "bias": torch.zeros(2)})
    model(torch.ones(1, 4)).sum().backward()
    updater.step()
    assert torch.equal(model.weight, torch.full((2, 4), 2.0))


def test_a_model_that_was_moved_is_refused() -> None:
    model = nn.Linear(4, 2)
    updater = Updater(model, "flat")
    model.to(torch.float64)
    with pytest.raises(TrainError, match=r"no longer views .* Move the model first"):
        updater.step()


def test_released_parameters_have_their_values_and_memory_of_their_own() -> None:
    model = nn.Linear(4, 2)
    flat = FlatParameters(model)
    model(torch.ones(1, 4)).sum().backward()
    values = model.weight.detach().clone()
    flat.release()
    flat.flat[0].data.zero_()
    assert torch.equal(model.weight, values)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"way": "flad"}, ValueError, "way must be one of 'loop', .*, not 'flad'"),
        ({"optimizer": "adamw"}, ValueError, "optimizer must be one of 'sgd', 'adam', not 'adamw'"),
        ({"way": "fused", "momentum": 0.5}, TypeError, "momentum"),
    ],
)
def test_what_there_is_not_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Updater(nn.Linear(1, 1), **arguments)
