"""Models are cut where one tensor carries everything, and their pieces together compute what they do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.train import CNN, DNN, GRUClassifier, LeNet, TrainError
from labkit.train.pieces import pieces_of
from labkit.train.stages import cut_evenly, stages_of


class Residual(nn.Module):
    """A branch round a layer, a bare parameter used twice, sizes read at run time, an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(784, 20), nn.Linear(20, 20), nn.Linear(20, 10)
        self.scale = nn.Parameter(torch.rand(20))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(x.size(0), -1)) * self.scale
        x = x + torch.relu(self.inner(x))
        x.relu_()
        return torch.log_softmax(self.last(x * self.scale), 1)


class Turned(nn.Module):
    """Where its batch is no longer the first dimension, nothing can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2).transpose(0, 1)
        return self.layer(rows).sum(0).log_softmax(1)


class Asking(nn.Module):
    """Nobody can tell what it does before it does it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("make", [LeNet, CNN, DNN, GRUClassifier, Residual, Turned])
def test_pieces_one_after_the_other_are_the_model(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    images = torch.randn(5, 1, 28, 28)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    pieces = pieces_of(model, images[:1])
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    x = images
    for piece in pieces:
        x = piece(x)
        assert x.shape == (5, *piece.shape) and x.dtype == piece.dtype
    assert torch.equal(x, model(images))
    assert {name for piece in pieces for name in piece.parameters} == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_branch_is_one_piece_and_a_turned_batch_too() -> None:
    sample = torch.zeros(1, 1, 28, 28)
    names = [piece.name for piece in pieces_of(Residual(), sample)]
    assert names == ["size, view", "first", "mul", "inner, relu, add", "relu_, mul_1", "last", "log_softmax"]
    assert [piece.name for piece in pieces_of(Turned(), sample)] == [
        "flatten",
        "transpose, layer, sum_1",
        "log_softmax",
    ]


def test_layers_of_a_sequential_are_pieces_whatever_they_do() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.BatchNorm1d(4), Asking(), nn.LogSoftmax(1))
    pieces = pieces_of(model, torch.zeros(1, 1, 28, 28))
    assert len(pieces) == 5 and list(pieces[2].buffers) == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    assert model.training and not model[2].running_mean.any()


def test_the_cost_is_the_multiplications() -> None:
    costs = {piece.name: piece.cost for piece in pieces_of(LeNet(), torch.zeros(1, 1, 28, 28))}
    assert costs["conv1"] - 24 * 24 * 10 == 24 * 24 * 10 * 25 and costs["fc1"] - 50 == 320 * 50


def test_a_forward_that_nobody_can_foresee_is_refused() -> None:
    with pytest.raises(TrainError, match=r"the forward of Asking cannot be read .*nn\.Sequential"):
        pieces_of(Asking(), torch.zeros(1, 3))


def test_stages_cost_as_little_as_any_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    for n, parts in itertools.product(range(1, 8), range(1, 5)):
        if parts > n:
            continue
        costs = torch.randint(0, 9, (n,), generator=generator).tolist()

        def dearest(begins: Any, costs: list[int] = costs) -> int:
            return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *begins, len(costs)]))

        best = min(map(dearest, itertools.combinations(range(1, n), parts - 1)))
        begins = cut_evenly(costs, parts)
        assert len(begins) == parts - 1 and dearest(begins) == best


def test_stages_that_cannot_be_are_refused() -> None:
    model = Residual()
    pieces = pieces_of(model, torch.zeros(1, 1, 28, 28))
    with pytest.raises(TrainError, match="8 ranks cannot have a stage each: the model can be cut into 7 pieces"):
        stages_of(pieces, 8)
    for begins in ([2], [2, 2], [0, 3], [3, 9]):
        with pytest.raises(TrainError, match="give 2 numbers from 1 to 6"):
            stages_of(pieces, 3, begins)
    with pytest.raises(TrainError, match="stages 0 and 1 both need scale"):
        stages_of(pieces, 2, [4])
    assert [len(stage) for stage in stages_of(pieces, 2, [2])] == [2, 5]
