"""The plain network's formulas give what autograd does, and refuse models they do not describe."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit.train import CNN, DNN, TrainError
from labkit.train.plain_network import PlainNetwork


def network_and_model(hidden: tuple[int, int] = (7, 5)) -> tuple[PlainNetwork, DNN]:
    torch.manual_seed(0)
    model = DNN(1, 4, 3, hidden).double()
    return PlainNetwork.of(model), model


@pytest.mark.parametrize("n", [1, 11])
def test_forward_and_backward_equal_autograd(n: int) -> None:
    network, model = network_and_model()
    images, labels = torch.randn(n, 1, 4, 4, dtype=torch.float64), torch.arange(n) % 3
    activations = network.forward(images)
    output = model(images)
    loss = functional.nll_loss(output, labels)
    loss.backward()
    assert [tuple(each.shape) for each in activations] == [(n, 16), (n, 7), (n, 5), (n, 3)]
    assert torch.allclose(activations[-1], output.detach(), rtol=0, atol=1e-12)
    assert float(network.loss(activations[-1], labels)) == pytest.approx(loss.item(), abs=1e-12)
    for gradient, parameter in zip(network.backward(activations, labels, n), model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12)


def test_the_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    network, _ = network_and_model()
    images, labels = torch.randn(11, 16, dtype=torch.float64), torch.arange(11) % 3
    whole = network.backward(network.forward(images), labels, 11)
    parts = [
        network.backward(network.forward(x), y, 11)
        for x, y in zip(images.split([5, 0, 6]), labels.split([5, 0, 6]), strict=True)
    ]
    for expected, summands in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.allclose(torch.stack(summands).sum(0), expected, rtol=0, atol=1e-12)


def test_a_certain_but_wrong_answer_has_a_finite_loss() -> None:
    network = PlainNetwork([torch.tensor([[2000.0], [0.0]])], [torch.zeros(2)])
    activations = network.forward(torch.ones(1, 1))
    assert float(network.loss(activations[-1], torch.tensor([1]))) == 2000


def test_the_matrices_are_the_models_own_memory() -> None:
    network, model = network_and_model()
    for matrix, parameter in zip(network.matrices, model.parameters(), strict=True):
        assert matrix.data_ptr() == parameter.data_ptr() and not matrix.requires_grad


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (CNN(), "it also has conv1.weight, conv1.bias"),
        (nn.Sequential(nn.Linear(4, 3, bias=False)), "Linear layers with bias"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2)), "one upon the other"),
        (nn.Sequential(nn.Flatten()), "must be made of Linear layers"),
    ],
)
def test_other_layers_are_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(TrainError, match=text):
        PlainNetwork.of(model)


def test_other_functions_between_the_layers_are_refused() -> None:
    x = torch.randn(2, 4)
    for between, right in ((nn.Sigmoid(), True), (nn.Tanh(), False)):
        model = nn.Sequential(nn.Linear(4, 3), between, nn.Linear(3, 2), nn.LogSoftmax(1))
        network = PlainNetwork.of(model)
        if right:
            network.check(model, x)
        else:
            with pytest.raises(TrainError, match="sigmoids between its layers"):
                network.check(model, x)
        assert model.training
