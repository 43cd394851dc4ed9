"""The part of the step benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.step_ranks FILE``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from labkit import comm
from labkit.bench.pinning import settle
from labkit.train import CNN, SGD, Alone, DDPGradients, LeNet, MPITransport, count_parameters
from labkit.train.synchronous import choose_gradients

__all__ = ["main"]

BATCH = 64
ROUND_S, FEWEST_STEPS, MOST_STEPS = 0.3, 3, 20
"""In a round each way makes steps for about so many seconds, one at a time and all ways in turn; the round's figure is
their median."""
ROUNDS, QUICK_ROUNDS = 9, 2
WAYS = {  # name → sync and backend of `train.synchronous`; without a name for the first: no communication
    "none": ("", ""),
    "none again": ("", ""),
    "per_parameter": ("per_parameter", ""),
    "fused": ("fused", ""),
    "overlap": ("overlap", ""),
    "ddp on mpi": ("ddp", "mpi"),
    "ddp on gloo": ("ddp", "gloo"),
}


class MLP(nn.Module):
    """Three hidden layers of 2,160 units: 11,052,730 parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (28 * 28, 2160, 2160, 2160)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.last = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, N×10, for images, N×1×28×28."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return functional.log_softmax(self.last(x), dim=1)


MODELS: dict[str, Callable[[], nn.Module]] = {"LeNet": LeNet, "CNN": CNN, "MLP": MLP}


class Trained:
    """A model that makes one step after the other on the same batch, with its gradients reduced in one way."""

    def __init__(self, make: Callable[[], nn.Module], sync: str, backend: str) -> None:
        torch.manual_seed(0)
        model = make()
        self._images, self._labels = torch.rand(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
        self._over = MPITransport() if sync else Alone()
        self._gradients = choose_gradients(sync or "per_parameter", model, self._over, "mean", backend)
        self._forward = self._gradients.forward if isinstance(self._gradients, DDPGradients) else model
        self._optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.85)
        self.release = self._gradients.release

    def step(self) -> None:
        """Forward, backward, reduction, and the optimizer's step."""
        self._gradients.zero()
        functional.nll_loss(self._forward(self._images), self._labels).backward()
        self._gradients.all_reduce(self._over, "mean")
        self._optimizer.step()


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method="mpi://")
    settle()
    measured = [_compare(name, make, QUICK_ROUNDS if quick else ROUNDS) for name, make in MODELS.items()]
    distributed.destroy_process_group()
    if comm.rank == 0:
        Path(path).write_text(json.dumps(measured))


def _compare(name: str, make: Callable[[], nn.Module], rounds: int) -> dict[str, Any]:
    """Milliseconds of a step in each way, once a round, all in turn."""
    ways = {way: Trained(make, *how) for way, how in WAYS.items()}
    first = _medians_ms(ways, FEWEST_STEPS)  # memory is there now, DistributedDataParallel has made its buckets
    steps = max(FEWEST_STEPS, min(MOST_STEPS, int(1e3 * ROUND_S / first["none"])))
    measured = [_medians_ms(ways, steps) for _ in range(rounds)]
    taken = {way: [each[way] for each in measured] for way in ways}
    for trained in ways.values():
        trained.release()
    return {"model": name, "parameters": count_parameters(make()), "ms": taken}


def _medians_ms(ways: dict[str, Trained], steps: int) -> dict[str, float]:
    """Milliseconds of a step: the slowest rank's, in the median of so many; all ranks begin each step together."""
    taken = {way: torch.zeros(steps, dtype=torch.float64) for way in ways}
    for number in range(steps):
        for way in ways if number % 2 else reversed(ways):
            comm.barrier()
            began = time.perf_counter()
            ways[way].step()
            taken[way][number] = time.perf_counter() - began
    for each in taken.values():
        comm.all_reduce(each, "max")
    return {way: float(each.quantile(0.5)) * 1e3 for way, each in taken.items()}


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
