"""The part of the methods benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.methods_ranks FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit import comm, data, train
from labkit.train.options import parse

__all__ = ["main"]

EPOCHS, QUICK_IMAGES = 3, 2000
OWN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "matrices": (train.DNN, {"optimizer": None, "epochs": 8}),  # sigmoids learn slowly at first
}
"""Method → its own network, and settings, where it cannot have those of all."""


def main(path: str, quick: bool) -> None:
    """Train by each method, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    dataset = data.load("auto", size=QUICK_IMAGES if quick else None)
    defaults = parse([])
    rows = []
    for name in train.METHODS:
        make, own = OWN.get(name, (train.LeNet, {}))
        settings: dict[str, Any] = {
            "epochs": 1 if quick else EPOCHS,
            "batch_size": defaults.batch_size,
            "optimizer": lambda parameters: train.Adam(parameters, lr=defaults.learning_rate),
            "progress": False,
            "device": "cpu",
        }
        torch.manual_seed(0)
        model = make()
        comm.barrier()
        if name == "single":
            settings["batch_size"] *= comm.size  # the same steps as synchronous
            if comm.rank != 0:
                continue
        history = train.run(name, model, dataset, **settings | own)
        if comm.rank == 0:
            print(f"{name}: {history}", file=sys.stderr, flush=True)
            rows.append(
                {
                    "method": name,
                    "ranks": history.world_size,
                    **asdict(train.Summary.of(history)),
                    "dataset": dataset.name,
                }
                | {"epochs": len(history.epochs), "batch": history.settings["batch_size"]}
            )
    if comm.rank == 0:
        Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
