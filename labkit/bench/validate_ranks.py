"""The part of the validation benchmark that runs on the ranks: ``python -m labkit.bench.validate_ranks FILE``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from labkit import comm, data
from labkit.train import Alone, History, LeNet, single, synchronous

__all__ = ["main"]

BATCH, EPOCHS = 64, 12
SHARE = 0.31
"""Of the run with the test inline: what rank 0 needs to test, about as in the document D1."""
WAYS = ("none", "inline", "distributed", "thread")
TRAINED, QUICK_TRAINED = 1_280, 320
"""Training images of one rank."""
ROUNDS, QUICK_ROUNDS = 5, 1


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    trained, rounds = (QUICK_TRAINED, QUICK_ROUNDS) if quick else (TRAINED, ROUNDS)
    dataset = sized(data.load("auto", size=comm.size * trained))
    ways = [way for way in WAYS if way != "distributed" or comm.size > 1]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tests: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            comm.barrier()
            history = train(dataset, way)
            longest = comm.all_gather_object((history.seconds, sum(row.test_seconds for row in history.epochs)))
            if number > 0:  # the first warms everything up
                seconds[way].append(max(whole for whole, _ in longest))
                tests[way].append(longest[0][1])
    if comm.rank == 0:
        about = {"dataset": dataset.name, "free_cores": max(0, len(os.sched_getaffinity(0)) - comm.size)}
        Path(path).write_text(json.dumps(about | {"seconds": seconds, "test_seconds": tests}))


def train(dataset: data.Dataset, way: str) -> History:
    """Train once, tested in that way."""
    torch.manual_seed(0)
    return synchronous(
        LeNet(),
        dataset,
        epochs=EPOCHS,
        batch_size=BATCH,
        validate=False if way == "none" else way,
        check_replicas=False,
        progress=False,
        device="cpu",
    )


def sized(dataset: data.Dataset) -> data.Dataset:
    """Return the data set with so many test images, some of them several times, that the test takes its share."""
    rates = []
    for part in range(3):  # the first warms everything up
        small = dataset.train.take(torch.arange(part * BATCH, (part + 10) * BATCH) % len(dataset.train))
        tried = data.Dataset(dataset.name, small, dataset.test, dataset.classes, dataset.source)
        comm.barrier()  # all ranks compute, as later
        history = single(LeNet(), tried, batch_size=BATCH, progress=False, device="cpu", over=Alone())
        row = history.epochs[0]
        rates.append(row.images_per_s * row.test_seconds / len(dataset.test))
    images = len(dataset.train) / comm.size * SHARE / (1 - SHARE) / rates[-1]
    count = int(comm.broadcast_object(round(images)))
    test = dataset.test.take(torch.arange(count) % len(dataset.test))
    return data.Dataset(dataset.name, dataset.train, test, dataset.classes, dataset.source)


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
