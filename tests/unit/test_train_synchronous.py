"""Training in one process: what it refuses, and what it leaves behind."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from labkit.data import Dataset, from_tensors
from labkit.train import Alone, FlatGradients, LeNet, OverlappedGradients, Progress, TrainError, synchronous
from labkit.train.synchronous import SYNCS


def noise(n: int = 50, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=generator)
    return from_tensors(images, torch.arange(n) % 10)


def train(model: nn.Module, **settings: Any) -> Any:
    return synchronous(model, noise(), over=Alone(), progress=False, device="cpu", **settings)


@pytest.mark.parametrize("sync", SYNCS)
def test_it_is_plain_sgd_when_alone(sync: str) -> None:
    torch.manual_seed(0)
    model, reference = LeNet(), LeNet()
    reference.load_state_dict(model.state_dict())
    dataset = noise()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    from labkit.data import Shard

    for epoch in range(2):
        for part in Shard(len(dataset.train), 0, 1, 16, seed=3).epoch(epoch):
            images, labels = dataset.train.batch(part.indices)
            optimizer.zero_grad()
            nn.functional.nll_loss(reference(images), labels).backward()
            optimizer.step()
    synchronous(
        model,
        dataset,
        epochs=2,
        batch_size=16,
        lr=0.05,
        momentum=0.9,
        seed=3,
        sync=sync,
        over=Alone(),
        progress=False,
    )
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"momentum": -1}, "momentum must be a finite number"),
        ({"sync": "async"}, 'sync must be "per_parameter", "fused", "overlap" or "ddp", not'),
        ({"sync": "ddp", "backend": "ucc"}, 'backend must be "mpi", "gloo" or "nccl", not'),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(LeNet(), **settings)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Flatten has no parameters to train"):
        train(nn.Flatten())


def test_outputs_that_are_no_log_probabilities_are_refused_unless_a_loss_is_given() -> None:
    raw = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(TrainError, match="does not return log-probabilities"):
        train(raw)
    history = train(raw, loss=nn.functional.cross_entropy)
    assert history.settings["loss"] == "cross_entropy"


def test_the_callers_random_numbers_and_mode_are_left_alone() -> None:
    model = LeNet(dropout=0.5).eval()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(model)
    assert torch.equal(torch.rand(3), expected)
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())


def test_the_same_seed_gives_the_same_dropout_and_another_another() -> None:
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        model = LeNet(dropout=0.5)
        train(model, seed=seed, lr=0.1)
        results.append(model.fc2.weight.detach().clone())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_an_interrupt_leaves_a_model_that_trains_on() -> None:
    model, calls = LeNet(), 0

    def interrupted(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return nn.functional.nll_loss(output, labels)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        train(model, loss=interrupted, batch_size=10)
    assert interrupt.value.__notes__ == ["Training was interrupted after step 2; the model keeps its weights."]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(train(model).epochs) == 1


def test_progress_is_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    synchronous(LeNet(), noise(), epochs=2, over=Alone(), progress=Progress(stream))
    assert [line[:9] for line in stream.getvalue().splitlines()] == ["epoch 1/2", "epoch 2/2"]
    synchronous(LeNet(), noise(), epochs=3, over=Alone())
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_where_the_line_can_be_rewritten_it_tells_how_far_the_epoch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.train.progress.PAUSE_S", 0.0)
    stream = io.StringIO()
    synchronous(LeNet(), noise(), epochs=1, over=Alone(), progress=Progress(stream, rewrite=True))
    first, *others = stream.getvalue().split("\r")
    assert first.startswith("epoch 1/1  step 1/")
    assert "test accuracy" in others[-1]
    assert others[-1].endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_without_validation_and_check_nothing_is_said_of_them() -> None:
    history = train(LeNet(), validate=False, check_replicas=False)
    assert "test" not in repr(history) and "replicas" not in repr(history)


def test_flat_gradients_are_written_in_place_and_copies_counted() -> None:
    model = LeNet()
    flat = FlatGradients(model)
    assert sum(buffer.numel() for buffer in flat.buffers) == 21_840 and len(flat.buffers) == 1
    model(torch.randn(2, 1, 28, 28)).sum().backward()
    first = model.conv1.weight.grad
    assert first is not None and torch.equal(flat.buffers[0][:250], first.flatten()) and first.any()
    flat.all_reduce(Alone(), "mean")
    assert flat.copies == 0
    model.fc1.weight.grad = torch.full_like(model.fc1.weight, 2.0)
    model.fc2.bias.grad = None
    flat.all_reduce(Alone(), "mean")
    assert flat.copies == 2
    assert (flat.buffers[0] == 2.0).sum() == model.fc1.weight.numel()
    assert model.fc2.bias.grad is not None and not model.fc2.bias.grad.any()


def test_buckets_hold_the_last_parameters_first_and_one_dtype_each() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(2, 50), nn.Linear(50, 2))
    model[3].bias.requires_grad_(False)
    buckets = OverlappedGradients(model, Alone(), "mean", 400).buckets
    assert [(bucket.dtype, bucket.numel()) for bucket in buckets] == [
        (torch.float32, 100),
        (torch.float32, 50),
        (torch.float32, 100),
        (torch.float64, 6),
        (torch.float32, 8),  # these would have fitted beside the first, but not beside the last of their kind
    ]


def test_mixed_dtypes_and_frozen_parameters_have_their_own_or_no_place() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    flat = FlatGradients(model)
    assert [(buffer.dtype, buffer.numel()) for buffer in flat.buffers] == [
        (torch.float32, 8),
        (torch.float64, 6),
    ]
    assert model[2].weight.grad is None


def test_an_optimizer_that_drops_its_gradients_still_trains_right() -> None:
    class Dropping(torch.optim.SGD):
        def step(self, *arguments: Any, **keywords: Any) -> Any:
            result = super().step(*arguments, **keywords)
            self.zero_grad(set_to_none=True)
            return result

    models = []
    for kind in (torch.optim.SGD, Dropping):
        torch.manual_seed(0)
        model = LeNet()
        train(model, optimizer=lambda p, kind=kind: kind(p, lr=0.1))
        models.append(model)
    assert torch.equal(models[0].fc1.weight, models[1].fc1.weight)
