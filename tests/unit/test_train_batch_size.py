"""The batch size grows while it pays and fits; the model and the random numbers stay as they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit import train
from labkit.data import Dataset, from_tensors
from labkit.train import batch_size
from labkit.train.batch_size import Kept, find_batch_size


def noise(n: int = 5000) -> Dataset:
    images = torch.randint(0, 256, (n, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_tensors(images, torch.arange(n) % 10)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(64, 10), nn.BatchNorm1d(10), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.first(x.flatten(1)))).log_softmax(1)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how long a step takes for a batch size; all the rest is real."""

    def use(of: Any) -> None:
        monkeypatch.setattr(batch_size._Trial, "_seconds", lambda _, images, labels: of(len(labels)))

    return use


def find(model: nn.Module | None = None, **settings: Any) -> train.BatchSize:
    return find_batch_size(model or Net(), noise(), over=train.Alone(), device="cpu", **settings)


def test_it_grows_while_twice_the_size_brings_five_percent(seconds: Any) -> None:
    seconds(lambda n: 1.0 + n / 100)  # n/(1 + n/100) images a second
    found = find()
    rates = {each.batch_size: each.images_per_s for each in found.tried}
    assert list(rates) == [8 * 2**k for k in range(len(rates))]
    assert all(rates[n] == pytest.approx(n / (1 + n / 100)) for n in rates)
    assert found.value == 1024 and list(rates)[-1] == 2048
    assert "2048 brings 4.7% more images/s, less than 5%" in found.reason and found.reason in str(found)
    assert find(gain=0.3).value == 128
    assert find(gain=0).value > 1024


def test_it_stops_at_what_the_data_set_has_or_the_caller_says(seconds: Any) -> None:
    seconds(lambda n: 1.0)
    assert find(largest=100).value == 100
    found = find()
    assert found.value == len(noise().train) == 4500 and "data set has no more" in found.reason


def test_it_stays_inside_its_share_of_the_memory(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds(lambda n: 1.0)
    free = {"bytes": 400_000}
    memory = type("memory", (), {"available": property(lambda _: free["bytes"])})
    monkeypatch.setattr("psutil.virtual_memory", memory)
    half, whole = find(), find(memory_share=1.0)
    assert whole.value == 2 * half.value and "does not fit into the memory of rank 0" in half.reason
    assert max(each.memory_mb for each in half.tried[:-1]) <= 0.2 and math.isnan(half.tried[-1].images_per_s)
    free["bytes"] = 100
    with pytest.raises(train.TrainError, match="the model needs too much memory for any batch size"):
        find()


def test_a_step_that_runs_out_of_memory_ends_the_search(seconds: Any) -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 40:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    seconds(lambda n: 1.0)
    found = find(Large())
    assert found.value == 32 and found.reason == "64 does not fit into the memory of rank 0"


def test_real_steps_leave_the_model_and_the_random_numbers_alone() -> None:
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = find(model, largest=16)
    assert found.value in (8, 16) and all(each.images_per_s > 0 for each in found.tried)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_forward_keeps_grows_with_the_batch_and_leaves_the_weights_out() -> None:
    layers = nn.Sequential(nn.Linear(100, 200), nn.Sigmoid())
    kept = {}
    for n in (10, 20):
        kept[n] = Kept(layers)
        with torch.autograd.graph.saved_tensors_hooks(kept[n].keep, lambda tensor: tensor):
            layers(torch.ones(n, 100))
    assert kept[10].bytes == 4 * 10 * (100 + 200) and kept[20].bytes == 2 * kept[10].bytes


def test_training_takes_it_for_auto(seconds: Any) -> None:
    seconds(lambda n: 1.0 if n <= 64 else n / 64)
    history = train.single(Net(), noise(), batch_size="auto", progress=False, device="cpu")
    assert history.settings["batch_size"] == 64 and history.steps.samples[0] == 64


@pytest.mark.parametrize("given", ["large", 0, 2.5, True])
def test_what_is_no_batch_size_is_refused(given: Any) -> None:
    with pytest.raises(train.SettingError, match="batch_size must be a whole number of at least 1"):
        train.Settings(batch_size=given)
    with pytest.raises(ValueError, match="gain must be at least 0 and memory_share in"):
        find(gain=-1)
