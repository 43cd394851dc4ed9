"""Scatter, gather and broadcast with plain matrices train as autograd does, with the data at the root alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm, data
from labkit.data import Dataset, from_tensors, share
from labkit.train import (
    CNN,
    DNN,
    Adam,
    History,
    MPITransport,
    TorchTransport,
    TrainError,
    load_checkpoint,
    matrices,
    replica_differences,
    single,
)
from labkit.train.matrices import collect, scatter
from labkit.train.validation import validate_shared
from tests.unit.sample_files import write_idx


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(n: int, seed: int = 5) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n + 11, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n + 11,), generator=generator)
    return from_tensors(images[:n], labels[:n], images[n:], labels[n:], classes=[str(each) for each in range(10)])


def network(seed: int = 0) -> DNN:
    torch.manual_seed(seed)
    return DNN(1, 6, 10, (9, 7)).double()


def train(model: nn.Module, dataset: Dataset, **settings: Any) -> History:
    return matrices(model, dataset, **{"progress": False, "device": "cpu", "epochs": 2, **settings})


def alone(dataset: Dataset, **settings: Any) -> tuple[DNN, History]:
    """The same steps by autograd in one process."""
    model = network()
    defaults = {"lr": 1.0, "momentum": 0.9, "epochs": 2, "progress": False, "device": "cpu"}
    return model, single(model, dataset, **defaults | settings)


def farthest(one: nn.Module, other: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("n", [0, 1, 7, 20])
def test_scatter_gives_each_rank_its_share_in_order(n: int) -> None:
    whole = torch.arange(2 * n).reshape(n, 2)
    first, last = share(n, comm.rank, comm.size)
    part = torch.zeros(last - first, 2, dtype=torch.float64)
    scatter(part, whole if comm.rank == 0 else None, MPITransport())
    assert part.tolist() == whole[first:last].tolist()


@pytest.mark.parametrize("way", ["gather", "reduce"])
def test_gathered_and_reduced_gradients_are_the_ranks_sum_at_the_root(way: str) -> None:
    gradients = [torch.full((3, 2), 1.0 + comm.rank), torch.full((4,), 10.0 * comm.rank)]
    collect(gradients, way, MPITransport())
    ranks = range(comm.size) if comm.rank == 0 else [comm.rank]
    assert gradients[0].unique().tolist() == [sum(1.0 + rank for rank in ranks)]
    assert gradients[1].unique().tolist() == [sum(10.0 * rank for rank in ranks)]


@pytest.mark.parametrize("gather", ["gather", "reduce"])
@pytest.mark.parametrize("left_over", [1, 8])  # 1: the last step leaves most ranks without a sample
def test_it_takes_the_steps_of_one_process(gather: str, left_over: int) -> None:
    dataset = noise(3 * comm.size * 8 + left_over)
    model = network(seed=comm.rank)  # the root's weights count
    ours = train(model, dataset, gather=gather, batch_size=8, seed=1)
    reference, theirs = alone(dataset, batch_size=8 * comm.size, seed=1)
    assert farthest(model, reference) <= 1e-6
    assert replica_differences(model) == [0.0] * comm.size
    assert ours.steps.loss == pytest.approx(theirs.steps.loss, abs=1e-9)
    for row, expected in zip(ours.epochs, theirs.epochs, strict=True):
        assert (row.accuracy, row.test_accuracy) == (expected.accuracy, expected.test_accuracy)
        assert row.test_loss == pytest.approx(expected.test_loss, abs=1e-6)
    assert sum(comm.all_gather_object(int(ours.steps.samples.sum()))) == 2 * len(dataset.train)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_textbooks_recipe_is_gradient_descent_on_all_samples() -> None:
    dataset = noise(31)
    model, reference = network(), network()
    history = train(model, dataset, epochs=20, lr=0.1, momentum=0, validate=False)
    images, labels = dataset.train.batch(slice(None))
    for _ in range(20):
        functional.nll_loss(reference(images.double()), labels).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert len(history.steps) == len(history.epochs) == 20 and farthest(model, reference) <= 1e-6
    assert history.settings["batch_size"] == -(-31 // comm.size)


@pytest.fixture
def fashion() -> Iterator[Path]:
    """Files as Fashion-MNIST's: each class is a bright row of pixels in noise. Written by rank 0, read by all."""
    with tempfile.TemporaryDirectory() as mine:
        root = Path(comm.broadcast_object(mine, src=0))
        if comm.rank == 0:
            raw = root / "FashionMNIST" / "raw"
            raw.mkdir(parents=True)
            generator = np.random.default_rng(0)
            for part, n in (("train", 203), ("t10k", 50)):
                labels = generator.permutation(n).astype(np.uint8) % 10
                images = generator.integers(0, 60, (n, 28, 28), dtype=np.uint8)
                images[np.arange(n), 2 + 2 * labels] = 250
                write_idx(raw / f"{part}-images-idx3-ubyte.gz", images, labels)
        comm.barrier()
        yield root
        comm.barrier()


def test_fashion_mnist_by_the_textbooks_recipe(fashion: Path) -> None:
    """60 iterations at 0.1, the best by the samples held back is tested once: as one process finds it."""
    choosing, test = data.load("fashion-mnist", fashion).split(validation=40)
    assert (choosing.samples, len(choosing.test), len(test)) == (163, 40, 50) and choosing.classes[9] == "Ankle boot"
    settings = {"epochs": 60, "lr": 0.1, "momentum": 0}
    torch.manual_seed(0)
    model, reference = (DNN(1, 28, 10, (12, 12)).double() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    history = train(model, choosing, checkpoint=fashion / "run", **settings)
    single(reference, choosing, batch_size=163, progress=False, device="cpu", **settings)
    assert farthest(model, reference) <= 1e-6
    scores = [row.test_accuracy for row in history.epochs]
    assert len(scores) == 60 and history.epochs[-1].loss < history.epochs[0].loss
    best = load_checkpoint(fashion / "run", "best")
    assert best["epoch"] == 1 + scores.index(max(scores))
    model.load_state_dict(best["model"])
    _, accuracy = validate_shared(model, choosing.test, functional.nll_loss, MPITransport())
    assert accuracy == pytest.approx(max(scores))
    loss, _ = validate_shared(model, test, functional.nll_loss, MPITransport())
    assert loss < math.log(10)  # that of guessing


def test_only_the_root_reads_training_samples() -> None:
    dataset, others = noise(50), noise(50, seed=6)
    model = network()
    train(model, dataset if comm.rank == 0 else others, batch_size=8, validate=False)
    assert farthest(model, alone(dataset, batch_size=8 * comm.size, validate=False)[0]) <= 1e-6


def test_a_batch_of_all_samples_is_scattered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    scatterv = comm.scatterv
    monkeypatch.setattr(comm, "scatterv", lambda out, *a, **k: (calls.append(out), scatterv(out, *a, **k)))
    train(network(), noise(30), epochs=5, batch_size=30)
    assert len(calls) == 2
    train(network(), noise(30), epochs=5, batch_size=-(-15 // comm.size))
    assert len(calls) == 2 + 2 * 2 * 5


def test_the_parts_of_a_step_are_timed_apart() -> None:
    history = train(network(), noise(30), batch_size=4)
    names = ["scatter_s", "forward_s", "backward_s", "gather_s", "update_s", "broadcast_s"]
    assert list(history.parts) == names
    parts = sum(history.parts.values())
    steps = history.steps.compute_s + history.steps.wait_s + history.steps.transfer_s
    assert len(parts) == len(steps) and (history.parts["forward_s"] > 0).all() and (parts <= steps + 1e-9).all()


def test_another_optimizer_works_at_the_root() -> None:
    model, dataset = network(), noise(50)
    train(model, dataset, batch_size=8, optimizer=lambda p: Adam(p, lr=0.01))
    reference, _ = alone(dataset, batch_size=8 * comm.size, optimizer=lambda p: Adam(p, lr=0.01))
    assert farthest(model, reference) <= 1e-6


@pytest.mark.parametrize("batch_size", [8, None])
def test_a_stopped_training_goes_on_from_its_checkpoint_as_if_it_had_never_ended(
    batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dataset = comm.broadcast_object(str(tmp_path)), noise(comm.size * 24)
    model, reference, steps = network(seed=9), network(), iter(range(1, 5))
    settings: dict[str, Any] = {"batch_size": batch_size, "epochs": 6}
    expected = train(reference, dataset, **settings)
    with monkeypatch.context() as patch:
        patch.setattr("labkit.train.wishes.Wishes.stop", lambda _: next(steps) == 4)
        assert train(network(), dataset, checkpoint=folder, **settings).stopped
    history = train(model, dataset, checkpoint=folder, restore=True, **settings)
    assert history.stopped is None and history.steps.loss.tolist() == expected.steps.loss.tolist()
    assert farthest(model, reference) == 0


@pytest.mark.parametrize(
    ("model", "settings", "error", "text"),
    [
        (DNN(1, 6), {"gather": "scan"}, ValueError, 'gather must be "gather" or "reduce"'),
        (DNN(1, 6), {"batch_size": 0}, ValueError, "batch_size must be"),
        (DNN(1, 6), {"loss": functional.cross_entropy}, ValueError, "leave loss out"),
        (DNN(1, 6), {"gathr": "reduce"}, TypeError, "did you mean 'gather'"),
        (CNN(1, 28), {}, TrainError, "must be made of Linear layers"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.Softmax(1)), {}, TrainError, "computes something else"),
        (DNN(1, 6), {"over": TorchTransport.__new__(TorchTransport)}, Exception, "use --backend mpi|group"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    model: nn.Module, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        train(model, noise(20), **settings)
    comm.barrier()
