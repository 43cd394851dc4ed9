"""The networks have the size they say, take other images than MNIST's, and return log-probabilities."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from labkit.train import CNN, DNN, MODELS, GRUClassifier, LeNet, count_parameters
from labkit.train.options import MODEL_NAMES


@pytest.mark.parametrize(
    ("network", "parameters"), [(LeNet, 21_840), (CNN, 1_199_882), (DNN, 109_386), (GRUClassifier, 18_698)]
)
def test_the_parameter_count_is_the_one_in_the_docstring(network: type[nn.Module], parameters: int) -> None:
    assert count_parameters(network()) == parameters
    assert re.search(rf"\b{parameters:,} parameters", network.__doc__ or "")


@pytest.mark.parametrize("network", MODELS.values())
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 10), (1, 16, 3)])
def test_each_takes_any_images_and_returns_log_probabilities(
    network: type[nn.Module], channels: int, size: int, classes: int
) -> None:
    output = network(channels, size, classes)(torch.randn(5, channels, size, size))
    assert output.shape == (5, classes)
    assert torch.allclose(output.exp().sum(1), torch.ones(5), atol=1e-5)


@pytest.mark.parametrize("network", MODELS.values())
def test_every_parameter_gets_a_gradient(network: type[nn.Module]) -> None:
    model = network()
    nn.functional.nll_loss(model(torch.randn(4, 1, 28, 28)), torch.arange(4)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_gru_reads_rows_in_order_and_keeps_pixels_of_a_row_together() -> None:
    model = GRUClassifier(channels=2, image_size=4)
    seen: list[torch.Tensor] = []
    model.gru.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    images = torch.arange(2 * 4 * 4.0).reshape(1, 2, 4, 4)
    model(images)
    assert torch.equal(seen[0][0, 2], images[0, :, 2].flatten())


def test_images_too_small_for_the_convolutions_are_refused() -> None:
    for network in (LeNet, CNN):
        with pytest.raises(ValueError, match="images of 4×4 are too small"):
            network(image_size=4)


def test_the_command_line_knows_all_networks() -> None:
    assert tuple(MODELS) == MODEL_NAMES
