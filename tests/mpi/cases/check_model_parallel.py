"""Models whose layers are spread over the ranks compute, and learn, what they do on one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm
from labkit.data import Dataset, from_tensors
from labkit.train import (
    DNN,
    Adam,
    GRUClassifier,
    History,
    LeNet,
    MPITransport,
    TrainError,
    pipeline,
    replica_differences,
    run,
    single,
    split_layers,
    whole_state_dict,
)
from labkit.train.schedules import SCHEDULES
from labkit.train.slow import Pause
from labkit.train.split_linear import SplitLinear, gather_parts
from labkit.train.stages import PipelineStage
from labkit.train.tensor_parallel import STYLES, load_whole_state_dict

METHODS = [
    *({"name": "tensor", "style": style} for style in STYLES),
    *({"name": "pipeline", "schedule": schedule} for schedule in SCHEDULES),
]
each_method = pytest.mark.parametrize("way", METHODS, ids=lambda way: "-".join(way.values()))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(n: int, side: int = 6) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (n + 11, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n + 11,), generator=generator)
    return from_tensors(images[:n], labels[:n], images[n:], labels[n:], classes=[str(each) for each in range(10)])


class BatchSize(NamedTuple):
    """What was found."""

    value: int


class Residual(nn.Module):
    """A branch round a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = (nn.Linear(*s) for s in ((36, 8), (8, 13), (13, 8), (8, 10)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        x = x + self.two(functional.gelu(self.one(x)))
        return functional.log_softmax(self.last(x), dim=1)


class Asking(nn.Module):
    """Its operations cannot be foreseen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(36, 7), nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x.flatten(1))
        return (self.two(x) if x.sum() > 0 else self.two(-x)).log_softmax(1)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 10))
    model[3].weight = model[1].weight
    return model


MODELS = {
    "dnn": lambda: DNN(1, 6, 10, (9, 7)),
    "two outputs": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)),
    "one unit": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.ReLU(inplace=True), nn.Linear(1, 10)),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
    "residual": Residual,
    "asking": Asking,
    "tied": tied,
}


def make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = MODELS[kind]()
    return model.double()


def farthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_split_models_output_and_gradients_are_the_wholes(kind: str, style: str) -> None:
    whole = make(kind)
    split = split_layers(whole, style=style)
    images = torch.randn(5, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, y = images.clone().requires_grad_(), images.clone().requires_grad_()
    output, expected = split(x), whole(y)
    assert torch.allclose(output, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=0, atol=1e-12)
    modules = dict(split.named_modules())
    for name, parameter in whole.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        layer = modules[prefix]
        gradient = getattr(layer, leaf).grad
        if isinstance(layer, SplitLinear) and leaf in layer.cut:
            gradient = gather_parts(gradient, layer.cut[leaf], layer.over)
        assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12), name


def test_split_layers_hold_their_part_alone_and_give_the_whole_back() -> None:
    whole = make("dnn")
    before = copy.deepcopy(whole.state_dict())
    split = split_layers(whole)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole.state_dict().items())
    state = whole_state_dict(split)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)
    held = comm.all_gather_object(split.fc1.weight.numel() + split.fc2.weight.numel() + split.fc3.weight.numel())
    assert sum(held) == 9 * 36 + 7 * 9 + 10 * 7 and max(held) - min(held) <= 36 + 7 + 7
    load_whole_state_dict(split, make("dnn", seed=1).state_dict())
    whole.load_state_dict(whole_state_dict(split))
    assert farthest(whole, make("dnn", seed=1)) == 0


@pytest.mark.parametrize(
    ("kind", "style", "forward", "backward"),
    [
        ("dnn", "pairs", ["sum", "stack"], ["sum", "sum"]),  # the third layer has no partner
        ("dnn", "stacked", ["stack"] * 3, ["sum"] * 3),
        ("residual", "pairs", ["stack", "sum", "stack"], ["sum"] * 3),
        ("asking", "pairs", ["stack"] * 2, ["sum"] * 2),
        ("batch norm", "pairs", ["stack"] * 2, ["sum"] * 2),
        ("tied", "pairs", ["stack"], ["sum"]),  # layers that share their weights stay whole
    ],
)
def test_how_often_the_ranks_talk(
    kind: str, style: str, forward: list[str], backward: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    split, told = split_layers(make(kind), style=style), []
    reduce, stack = MPITransport.all_reduce, comm.all_gatherv
    monkeypatch.setattr(MPITransport, "all_reduce", lambda *a, **k: (told.append("sum"), reduce(*a, **k))[1])
    monkeypatch.setattr(comm, "all_gatherv", lambda *a, **k: (told.append("stack"), stack(*a, **k))[1])
    output = split(torch.ones(2, 1, 6, 6, dtype=torch.float64, requires_grad=True))
    assert told == forward
    told.clear()
    output.sum().backward()
    assert told == backward


def together(way: dict[str, str], model: nn.Module, dataset: Dataset, **settings: Any) -> History:
    settings = {"progress": False, "device": "cpu", "lr": 0.5, "momentum": 0.9, "batch_size": 8, **settings}
    return run(model=model, dataset=dataset, **way | settings)


def alone(model: nn.Module, dataset: Dataset, **settings: Any) -> History:
    settings = {"progress": False, "device": "cpu", "lr": 0.5, "momentum": 0.9, "batch_size": 8, **settings}
    return single(model, dataset, **settings | {"batch_size": settings["batch_size"] * comm.size})


@each_method
@pytest.mark.parametrize("left_over", [1, 9])  # 1: a step with fewer samples than ranks
def test_training_equals_one_process(way: dict[str, str], left_over: int) -> None:
    dataset = noise(3 * comm.size * 8 + left_over)
    model, reference = make("dnn", seed=comm.rank), make("dnn")  # rank 0's weights count
    ours = together(way, model, dataset, epochs=2, seed=1)
    theirs = alone(reference, dataset, epochs=2, seed=1)
    assert farthest(model, reference) <= 1e-6
    assert replica_differences(model) == [0.0] * comm.size
    assert ours.steps.loss == pytest.approx(theirs.steps.loss, abs=1e-9)
    assert ours.steps.rank_loss == pytest.approx(theirs.steps.rank_loss, abs=1e-9)
    for row, expected in zip(ours.epochs, theirs.epochs, strict=True):
        assert (row.accuracy, row.test_accuracy) == (expected.accuracy, expected.test_accuracy)
        assert row.test_loss == pytest.approx(expected.test_loss, abs=1e-6)
    assert sum(comm.all_gather_object(int(ours.steps.samples.sum()))) == 2 * len(dataset.train)
    assert ours.method == way["name"] and ours.settings["batch_size"] == 8


@each_method
@pytest.mark.parametrize("kind", ["lenet", "gru", "residual"])
def test_other_networks_and_optimizers_learn_the_same(way: dict[str, str], kind: str) -> None:
    side = 28 if kind == "lenet" else 6
    networks = {"lenet": LeNet, "gru": lambda: GRUClassifier(1, 6, 10, 5), "residual": Residual}
    dataset, models = noise(comm.size * 8 + 5, side), []
    for train in (lambda *a, **k: together(way, *a, **k), alone):
        torch.manual_seed(0)
        models.append(networks[kind]().double())
        train(models[-1], dataset, optimizer=lambda p: Adam(p, lr=1e-2), loss=functional.cross_entropy, validate=False)
    assert farthest(*models) <= 1e-6


@pytest.mark.parametrize("micro_batches", [1, 3, 100])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_gives_the_same(schedule: str, micro_batches: int) -> None:
    dataset = noise(comm.size * 8 + 5)
    model, reference = make("one unit"), make("one unit")  # its second stage begins with an operation in place
    way = {"name": "pipeline", "schedule": schedule}
    cut = [1, 2, 3][4 - comm.size :]
    history = together(way, model, dataset, micro_batches=micro_batches, cut=cut, loss=functional.cross_entropy)
    alone(reference, dataset, loss=functional.cross_entropy)
    assert farthest(model, reference) <= 1e-6
    most = min(micro_batches, comm.size * 8)
    assert history.settings["kept"] == (most if schedule == "gpipe" else min(most, comm.size - comm.rank))
    everything = ["_0", "_1", "_2", "_3"]
    assert history.settings["stages"] == [everything[a:b] for a, b in itertools.pairwise([0, *cut, 4])]


def test_running_statistics_come_from_the_rank_that_has_them() -> None:
    model = make("batch norm")
    together({"name": "pipeline"}, model, noise(comm.size * 8), loss=functional.cross_entropy, micro_batches=2)
    assert int(model[2].num_batches_tracked) == 2 and model[2].running_mean.abs().sum() > 0
    states = comm.all_gather_object([tensor.tolist() for tensor in model.state_dict().values()])
    assert all(state == states[0] for state in states)


def test_a_rank_that_waits_for_its_turn_counts_it_as_waiting() -> None:
    history = together({"name": "pipeline", "schedule": "gpipe"}, make("dnn"), noise(comm.size * 32), batch_size=16)
    assert (history.steps.wait_s > 0).all() or comm.size == 1


def test_dropout_leaves_out_the_same_units_on_all_ranks() -> None:
    layers = (nn.Flatten(), nn.Linear(36, 9), nn.Dropout(0.5), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 10))
    model, outputs = nn.Sequential(*layers, nn.LogSoftmax(1)), []

    def seen(output: Tensor, labels: Tensor) -> Tensor:
        if output.requires_grad:
            outputs.append(output.detach().sum().item())
        return functional.nll_loss(output, labels)

    together({"name": "tensor"}, model, noise(comm.size * 16), loss=seen)
    everybody = comm.all_gather_object(outputs)
    assert len(set(outputs)) == 2 and all(each == everybody[0] for each in everybody)


def stop(*_: Any) -> Any:
    raise KeyboardInterrupt


@each_method
def test_after_an_interrupt_in_the_middle_of_a_step_the_next_training_is_right(
    way: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, model = noise(comm.size * 16), make("dnn")
    with monkeypatch.context() as patch:
        patch.setattr(PipelineStage, "_backward", stop)  # activations are on their way then
        patch.setattr("labkit.train.split_linear._StackColumns.backward", stop)
        with pytest.raises(KeyboardInterrupt):
            together(way, model, dataset)
    reference = copy.deepcopy(model)
    for tensor in reference.state_dict().values():
        comm.broadcast(tensor, 0)
    together(way, model, dataset)
    alone(reference, dataset)
    assert farthest(model, reference) <= 1e-6


def until_step(number: int, patch: pytest.MonkeyPatch) -> None:
    """Somebody presses Stop then."""
    steps = iter(range(1, number + 1))
    patch.setattr("labkit.train.wishes.Wishes.stop", lambda _: next(steps) == number)


@pytest.mark.parametrize(
    ("way", "validate"),
    list(zip(METHODS, ["thread", "distributed", "inline", "thread"], strict=True)),
    ids=["-".join(way.values()) for way in METHODS],
)
def test_a_stopped_training_goes_on_from_its_checkpoint_as_if_it_had_never_ended(
    way: dict[str, str], validate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dataset = comm.broadcast_object(str(tmp_path)), noise(comm.size * 24)
    settings: dict[str, Any] = {"epochs": 2, "validate": validate}
    model, reference, start = make("dnn", seed=9), make("dnn"), make("dnn")
    expected = together(way, reference, dataset, **settings)
    with monkeypatch.context() as patch:
        until_step(4, patch)
        assert together(way, start, dataset, checkpoint=folder, **settings).stopped
    history = together(way, model, dataset, checkpoint=folder, restore=True, **settings)
    assert history.stopped is None and history.steps.loss.tolist() == expected.steps.loss.tolist()
    assert [row.test_loss for row in history.epochs] == [row.test_loss for row in expected.epochs]
    assert farthest(model, reference) == 0
    again = make("dnn", seed=9)
    together(way, again, dataset, checkpoint=folder, restore=True, **settings)  # nothing is left to do
    assert farthest(again, reference) == 0


@pytest.mark.parametrize("name", ["tensor", "pipeline", "matrices"])
def test_a_slow_rank_computes_longer(name: str) -> None:
    pause = Pause(0.03, every=1)
    history = together({"name": name}, make("dnn"), noise(comm.size * 16), slow={comm.size - 1: pause})
    assert comm.rank < comm.size - 1 or (history.steps.compute_s >= 0.03).all()


def test_a_batch_size_is_found_with_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make("dnn"), []
    monkeypatch.setattr(
        "labkit.train.batch_size.find_batch_size", lambda m, *a, **k: (asked.append(m), BatchSize(4))[1]
    )
    history = together({"name": "tensor"}, model, noise(comm.size * 16), batch_size="auto")
    assert asked == [model] and history.settings["batch_size"] == 4 and len(history.steps) == 4


def test_pipelines_that_cannot_be_are_refused_on_all_ranks() -> None:
    dataset = noise(20)
    refused: list[tuple[nn.Module, dict[str, Any], type[Exception], str]] = [
        (DNN(1, 6), {"schedule": "gpip"}, ValueError, 'schedule must be "gpipe" or "1f1b"'),
        (DNN(1, 6), {"micro_batches": 0}, ValueError, "micro_batches must be"),
        (DNN(1, 6), {"cut": [0] * comm.size}, TrainError, "does not cut 7 pieces into"),
        (Asking(), {}, TrainError, "the forward of Asking cannot be read"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 10)), {}, TrainError, "does not return log-probabilities"),
    ]
    for model, settings, error, text in refused:
        with pytest.raises(error, match=text):
            pipeline(model, dataset, progress=False, device="cpu", **settings)
    if comm.size > 1:
        cut = list(range(3, 2 + comm.size))
        with pytest.raises(TrainError, match=r"both need 3\.weight"):
            pipeline(tied(), dataset, progress=False, device="cpu", cut=cut, loss=functional.cross_entropy)
        with pytest.raises(TrainError, match="model: rank 0: 'DNN"):
            run("tensor", DNN(1, 6) if comm.rank == 0 else LeNet(), dataset, progress=False)
    with pytest.raises(TrainError, match=r"no nn\.Linear layer"):
        run("tensor", nn.Sequential(nn.Conv2d(1, 10, 6)), dataset, progress=False)
    comm.barrier()
