"""The part of the all-reduce benchmark that runs on the ranks: ``mpiexec … python -m labkit.bench.allreduce_ranks``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit import comm
from labkit.bench.pinning import settle
from labkit.comm.mpi import MPI

__all__ = ["SIZES", "main"]

SIZES = (8, 1 << 10, 64 << 10, 1_800_000, 44_000_000, 64_000_000)
"""Bytes of the array."""
ROUND_S, MOST_CALLS = 0.05, 40
"""In a round each way is called so often, but no longer than about so many seconds; the fastest is no guide to the
others, so the round's figure is the median of its calls."""
ROUNDS, QUICK_ROUNDS = 11, 2


class Way(NamedTuple):
    """One way to do it, and the array it works on."""

    call: Callable[[], object]
    x: torch.Tensor


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    torch.set_num_threads(1)
    rows = []
    groups = _process_groups()
    settle()
    for nbytes in SIZES[:3] if quick else SIZES:
        us = _compare(_ways(nbytes // 4, groups), QUICK_ROUNDS if quick else ROUNDS)
        rows.append({"nbytes": nbytes, "us": us})
    for group in groups.values():
        dist.destroy_process_group(group)
    if comm.rank == 0:
        Path(path).write_text(json.dumps(rows))


def _process_groups() -> dict[str, Any]:
    """Groups of all ranks: torch.distributed's own back end gloo, and labkit's."""
    dist.init_process_group("gloo", init_method="mpi://")
    groups: dict[str, Any] = {"gloo": dist.group.WORLD}
    # By its other name, which stands for the whole group: "mpi" beside gloo is one of a group's several back ends.
    groups["torch mpi"] = dist.new_group(backend="labkit", timeout=timedelta(seconds=60))
    return dict(reversed(groups.items()))  # the default group is destroyed last


def _ways(count: int, groups: dict[str, Any]) -> dict[str, Way]:
    """Each with memory of its own."""
    source = torch.zeros(count)
    target, shared = torch.zeros(count), torch.as_tensor(comm.shared_zeros(count, torch.float32))
    plain, raw = torch.zeros(count), torch.zeros(count)
    mpi, array = comm.world().mpi, raw.numpy()
    ways = {
        "copy": Way(lambda: target.copy_(source), source),
        "labkit, shared": Way(lambda: comm.all_reduce(shared), shared),
        "labkit": Way(lambda: comm.all_reduce(plain), plain),
        "mpi4py": Way(lambda: mpi.Allreduce(MPI.IN_PLACE, array), raw),
    }
    for name, group in reversed(groups.items()):
        x = torch.zeros(count)
        ways[name] = Way(_with_group(x, group), x)
    return ways


def _with_group(x: torch.Tensor, group: Any) -> Callable[[], object]:
    return lambda: dist.all_reduce(x, group=group)


def _compare(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Microseconds that a call takes in each way, once a round, all in turn."""
    calls = {name: _calls(way) for name, way in ways.items()}  # and caches are warm, memory is there, clocks are up
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            taken[name].append(_median(ways[name], calls[name]))
    return taken


def _calls(way: Way) -> int:
    """How often to call it in a round."""
    _median(way, 3)
    return max(1, min(MOST_CALLS, int(ROUND_S / (_median(way, 3) * 1e-6))))


def _median(way: Way, calls: int) -> float:
    """Microseconds of a call: the slowest rank's, in the median of so many calls."""
    fresh = torch.full_like(way.x, float(comm.rank + 1))
    taken = torch.zeros(calls, dtype=torch.float64)
    for number in range(calls):
        way.x.copy_(fresh)
        comm.barrier()
        began = time.perf_counter()
        way.call()
        taken[number] = time.perf_counter() - began
    comm.all_reduce(taken, "max")
    return float(taken.median()) * 1e6


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
