"""The part of the update benchmark that runs on a master and its workers: ``mpiexec … labkit.bench.update_ranks FILE``.

The master receives a gradient from any worker, applies it, and sends the weights back. The workers do not compute: two
cores cannot compute for sixteen, and the master would have to share its core with them. Each sleeps as long as a
step's computing took when it was measured alone, so that the master sees the requests that as many workers with a core
each would send. A worker needs no torch for that, which keeps it small.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit import comm

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["WAYS", "WORKERS", "main", "saturation"]

WAYS = ("loop", "flat fused")
WORKERS = (1, 2, 3, 4, 8, 16)
BEYOND, FEWEST_WORKERS = 3.0, 4
"""No more than so many times the workers at which the master should saturate are tried, but at least so many."""
ROUNDS, QUICK_ROUNDS = 3, 1
ROUND_S, QUICK_ROUND_S, FEWEST_UPDATES = 0.5, 0.1, 8
STEPS, QUICK_STEPS, WARM_STEPS = 15, 3, 3
GO_ON, STOP = 0, 1
"""Tags of the weights: another step, or no more."""


class Served(NamedTuple):
    """What a master did with some workers: its rate, and its median time from a gradient's announcement on."""

    updates_per_s: float
    service_s: float


class Plan(NamedTuple):
    """What the ranks do next: so many workers sleep `compute_s` seconds, send `elements` float32, and so on."""

    workers: int
    elements: int
    compute_s: float


class Master(NamedTuple):
    """The model as a master has it: one tensor to receive into, one to send, and what applies the one to the other."""

    gradient: Tensor
    weights: Tensor
    apply: Callable[[], object]


def saturation(compute: float, service: float) -> float:
    """Number of workers at which the master is always busy: (Z + S) / S.

    A worker computes for Z seconds and is then served for S, if nobody is before it. So N workers send at most
    N / (Z + S) updates a second, and the master serves at most 1 / S; both bounds meet at that N (P. J. Denning,
    J. P. Buzen, "The operational analysis of queueing network models", ACM Computing Surveys 10, 1978).
    """
    return (compute + service) / service


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    if comm.rank == 0:
        Path(path).write_text(json.dumps(_measure(quick)))
        comm.broadcast_object(None)
        return
    while (plan := comm.broadcast_object(None)) is not None:
        if comm.rank <= plan.workers:
            _work(plan)


def _work(plan: Plan) -> int:
    """Work until the master says stop; return how many gradients it got."""
    gradient, weights = np.full(plan.elements, 1e-3, np.float32), np.empty(plan.elements, np.float32)
    sent, tag = 0, GO_ON
    while tag == GO_ON:
        time.sleep(plan.compute_s)
        comm.send(gradient, 0)
        tag = comm.recv(weights, 0).tag
        sent += 1
    return sent


def _measure(quick: bool) -> list[dict[str, Any]]:
    import torch

    from labkit.bench.step_ranks import MODELS

    torch.set_num_threads(1)
    measured = []
    for name, make in MODELS.items():
        compute_s = _computing_s(make(), QUICK_STEPS if quick else STEPS)
        masters = {way: _master(make(), way) for way in WAYS}
        served: dict[str, dict[int, list[Served]]] = {way: {} for way in WAYS}
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for way, master in masters.items():
                for workers in range(1, comm.size) if quick else WORKERS:
                    if workers > FEWEST_WORKERS and workers > BEYOND * saturation(
                        compute_s, served[way][1][0].service_s
                    ):
                        break
                    plan = Plan(workers, len(master.weights), compute_s)
                    comm.broadcast_object(plan)
                    done = _serve(plan, master, QUICK_ROUND_S if quick else ROUND_S)
                    served[way].setdefault(workers, []).append(done)
        measured += [
            {
                "model": name,
                "way": way,
                "compute_ms": compute_s * 1e3,
                "workers": list(each),
                "updates_per_s": [[one.updates_per_s for one in rounds] for rounds in each.values()],
                "service_ms": [[one.service_s * 1e3 for one in rounds] for rounds in each.values()],
            }
            for way, each in served.items()
        ]
    return measured


def _computing_s(model: nn.Module, steps: int) -> float:
    """Seconds of a worker's step without the update: forward and backward, in the median."""
    import torch
    from torch.nn import functional

    from labkit.bench.step_ranks import BATCH

    images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    taken = []
    for _ in range(WARM_STEPS + steps):
        began = time.perf_counter()
        model.zero_grad()
        functional.nll_loss(model(images), labels).backward()
        taken.append(time.perf_counter() - began)
    return median(taken[WARM_STEPS:])


def _master(model: nn.Module, way: str) -> Master:
    import torch

    from labkit.bench.update_costs import SETTINGS
    from labkit.train import Adam, FlatParameters

    parameters = FlatParameters(model)
    (weights,), (gradient,) = parameters.flat, parameters.gradients.buffers
    if way == "loop":
        return Master(gradient, weights.detach(), Adam(model.parameters(), **SETTINGS["adam"]).step)
    return Master(gradient, weights.detach(), torch.optim.Adam([weights], fused=True, **SETTINGS["adam"]).step)


def _serve(plan: Plan, master: Master, seconds: float) -> Served:
    """Serve the workers for so many seconds, after each had its turns, and tell them to stop."""
    services, ends = [], []
    warm, working, stop = 2 * plan.workers, plan.workers, False
    while working:
        src = comm.probe().src
        began = time.perf_counter()
        comm.recv(master.gradient, src)
        master.apply()
        comm.send(master.weights, src, STOP if stop else GO_ON)
        ended = time.perf_counter()
        working -= stop
        if not stop:
            ends.append(ended)
            services.append(ended - began)
            stop = len(ends) > warm + FEWEST_UPDATES and ended - ends[warm] > seconds
    return Served((len(ends) - 1 - warm) / (ends[-1] - ends[warm]), median(services[warm:]))


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
