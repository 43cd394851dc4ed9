"""The part of the balance benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.balance_ranks FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from labkit import comm, data, train

from .balance import FACTOR

__all__ = ["main"]

BATCH, CHUNK = 64, 128
IMAGES, QUICK_IMAGES = 12_000, 2_000
ROUNDS, QUICK_ROUNDS = 7, 2


def main(path: str, quick: bool) -> None:
    """Train by both ways in turn, round by round, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    dataset = data.load("auto", size=QUICK_IMAGES if quick else IMAGES)
    ways = {"equal shards": dataset, "queue": dataset.queued(CHUNK)}
    slow = comm.size - 1
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    slow_percent: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(QUICK_ROUNDS if quick else ROUNDS):
        for way, samples in ways.items():
            torch.manual_seed(0)
            history = train.downpour(
                train.LeNet(),
                samples,
                batch_size=BATCH,
                slow={slow: FACTOR},
                validate=False,
                progress=False,
                device="cpu",
            )
            taken = comm.all_gather_object(float(history.steps.samples.sum()))
            if number == 0:  # the first round finds cold caches
                continue
            seconds[way].append(history.epochs[0].seconds)
            slow_percent[way].append(100 * taken[slow] / sum(taken))
    if comm.rank == 0:
        workers = comm.size - 1
        measured = {"seconds": seconds, "slow_percent": slow_percent, "workers": workers, "dataset": dataset.name}
        Path(path).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
