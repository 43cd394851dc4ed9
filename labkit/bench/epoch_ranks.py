"""The part of the epoch benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.epoch_ranks FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labkit import comm, data
from labkit.bench.pinning import settle
from labkit.train import CNN, Alone, MPITransport, synchronous

__all__ = ["main"]

BATCH, STEPS, QUICK_STEPS = 64, 12, 3
"""Images of one rank at a step, and steps in a round: a part of an epoch, whose rate is the same throughout."""
ROUNDS, QUICK_ROUNDS = 9, 2
SYNC = "overlap"


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    settle()
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    everything = data.load("auto", size=comm.size * BATCH * steps)
    mine = data.load("auto", size=BATCH * steps)
    models = [CNN() for _ in range(3)]

    def train(model: CNN, dataset: data.Dataset, *, together: bool) -> float:
        """Images a second of those that train, in one go through `dataset`."""
        over = MPITransport() if together else Alone()
        options: dict[str, Any] = {"progress": False, "validate": False, "check_replicas": False, "device": "cpu"}
        return synchronous(model, dataset, batch_size=BATCH, sync=SYNC, over=over, **options).epochs[0].images_per_s

    ways: dict[str, Callable[[], float]] = {
        "one": lambda: train(models[0], mine, together=False) if comm.rank == 0 else 0.0,
        "apart": lambda: train(models[1], mine, together=False),
        "together": lambda: train(models[2], everything, together=True),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            comm.barrier()
            rate = ways[way]()
            slowest = min(comm.all_gather_object(rate) if way != "one" else comm.all_gather_object(rate)[:1])
            if number > 0:  # the first warms everything up
                rates[way].append(slowest * (comm.size if way == "apart" else 1))
    if comm.rank == 0:
        about = {"dataset": everything.summary, "steps": steps, "batch": BATCH, "sync": SYNC}
        Path(path).write_text(json.dumps(about | {"images_per_s": rates}))


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
