"""The part of the update benchmark that applies updates: ``mpiexec -n 1 python -m labkit.bench.update_costs FILE``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.bench.step_ranks import MODELS
from labkit.train import Updater, count_parameters
from labkit.train.updates import WAYS

__all__ = ["SETTINGS", "main"]

SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"lr": 1e-3, "momentum": 0.85}, "adam": {"lr": 1e-3}}
ROUND_S, MOST_UPDATES = 0.1, 50
"""In a round each way applies updates for about so many seconds, one at a time and all ways in turn; the round's figure
is their median."""
ROUNDS, QUICK_ROUNDS = 9, 2


def main(path: str, quick: bool) -> None:
    """Measure, and write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    measured = [
        _compare(name, make, optimizer, device, QUICK_ROUNDS if quick else ROUNDS)
        for device in devices
        for optimizer in SETTINGS
        for name, make in MODELS.items()
    ]
    Path(path).write_text(json.dumps(measured))


def _compare(name: str, make: Callable[[], nn.Module], optimizer: str, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds that an update takes in each way, once a round, all in turn."""
    updaters = {way: _ready(make().to(device), way, optimizer) for way in WAYS}
    first = _medians_ms(updaters, 3, device)  # the moments are there now
    updates = max(3, min(MOST_UPDATES, int(1e3 * ROUND_S / first["loop"])))
    rows = [_medians_ms(updaters, updates, device) for _ in range(rounds)]
    return {
        "model": name,
        "parameters": count_parameters(make()),
        "optimizer": optimizer,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "ms": {way: [each[way] for each in rows] for way in updaters},
    }


def _ready(model: nn.Module, way: str, optimizer: str) -> Updater:
    """An updater whose model has gradients."""
    updater = Updater(model, way, optimizer, **SETTINGS[optimizer])
    for parameter in model.parameters():
        gradient = torch.randn_like(parameter) * 1e-3
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
    return updater


def _medians_ms(updaters: dict[str, Updater], updates: int, device: str) -> dict[str, float]:
    """Milliseconds of an update, in the median of so many."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken: dict[str, list[float]] = {way: [] for way in updaters}
    for number in range(updates):
        for way in updaters if number % 2 else reversed(updaters):
            wait()
            began = time.perf_counter()
            updaters[way].step()
            wait()
            taken[way].append(time.perf_counter() - began)
    return {way: float(torch.tensor(each).quantile(0.5)) * 1e3 for way, each in taken.items()}


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
