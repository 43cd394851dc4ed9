"""The part of the methods benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.methods_ranks FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from labkit import comm, data, train
from labkit.train.options import parse
from labkit.train.worker import method_settings

__all__ = ["main"]

EPOCHS, QUICK_IMAGES = 3, 2000


def main(path: str, quick: bool) -> None:
    """Train by each method, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    dataset = data.load("auto", size=QUICK_IMAGES if quick else None)
    rows = []
    for name in train.METHODS:
        defaults = parse(["--method", name, "--no-cuda"])
        settings = method_settings(defaults, train.MPITransport())
        settings["progress"] = False
        settings["epochs"] = 1 if quick else max(EPOCHS, settings["epochs"])
        torch.manual_seed(0)
        # The small convolutional network in place of the large one: a tenth of the time.
        model = train.MODELS["lenet" if defaults.model == "cnn" else defaults.model]()
        comm.barrier()
        if name == "single":
            settings["batch_size"] *= comm.size  # the same steps as synchronous
            if comm.rank != 0:
                continue
        history = train.run(name, model, dataset, **settings)
        if comm.rank == 0:
            print(f"{name}: {history}", file=sys.stderr, flush=True)
            summary = train.Summary.of(history)
            rows.append(
                {
                    "method": name,
                    "ranks": history.world_size,
                    "epochs": len(history.epochs),
                    "batch": history.settings["batch_size"],
                    "accuracy": summary.accuracy,
                    "seconds": summary.seconds,
                    "images_per_s": summary.images_per_s,
                    "communication": summary.communication,
                    "staleness": summary.mean_staleness,
                    "dataset": dataset.name,
                }
            )
    if comm.rank == 0:
        Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
