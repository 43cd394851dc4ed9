"""The part of the wait benchmark that runs on the ranks: ``mpiexec -n 2 python -m labkit.bench.wait_ranks FILE``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from labkit import comm
from labkit.comm.mpi import MPI
from labkit.comm.plain import Plain

__all__ = ["SIZES", "main"]

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 44 << 20)
"""Bytes in a message."""
SIZES_WATCHED = SIZES[:3:2]
BATCH_S, ROUNDS = 0.04, 15
"""A way is measured in batches of about so many seconds; in a round each way has one batch."""
WAIT_S = 5.0

_Once = Callable[[], object]
_Array = np.ndarray[Any, Any]


def main(path: str, quick: bool) -> None:
    """Measure, and let rank 0 write everything as JSON to the file `path`."""
    sizes, rounds = (SIZES[:3], 3) if quick else (SIZES, ROUNDS)
    rows = [
        *_rows("all_reduce", _reductions, sizes, rounds),
        *_rows("send, recv", _ping_pongs, sizes, rounds, messages=2),
    ]
    # As long as ranks have a core each: otherwise a rank that spins takes time from the one it waits for.
    cpu = {name: _cpu_share(wait, 0.5 if quick else WAIT_S) for name, wait in _waits().items()} if comm.size < 3 else {}
    try:
        watched = import_module("labkit.comm.watched")
    except ImportError:
        watched = None
    if watched is not None:
        watched.install()
        rows += _rows("watched Allreduce", _raw_reductions, SIZES_WATCHED, rounds)
        rows += _rows("watched Send, Recv", _raw_ping_pongs, SIZES_WATCHED, rounds, messages=2)
        watched.remove()
    if comm.rank == 0:
        Path(path).write_text(json.dumps({"rows": rows, "cpu": cpu}))


def _rows(
    what: str, ways: Callable[[_Array], dict[str, _Once]], sizes: Sequence[int], rounds: int, messages: int = 1
) -> list[dict[str, Any]]:
    """For each size, the microseconds that each way takes in each round, per message."""
    rows = []
    for nbytes in sizes:
        taken = _compare(ways(np.zeros(nbytes // 4, np.float32)), rounds)
        us = {name: [seconds / messages * 1e6 for seconds in each] for name, each in taken.items()}
        rows.append({"what": what, "nbytes": nbytes, "us": us})
    return rows


def _compare(ways: dict[str, _Once], rounds: int) -> dict[str, list[float]]:
    """Seconds that a call takes in each way, once a round, all in turn. The slowest rank counts."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    first = next(iter(ways.values()))
    count = max(2, min(2000, int(BATCH_S / (_batch(first, 3) / 3))))
    for way in ways.values():
        _batch(way, max(2, count // 4))  # caches warm, clocks up
    names = list(ways)
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            taken[name].append(_batch(ways[name], count) / count)
    return taken


def _batch(once: _Once, count: int) -> float:
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(count):
        once()
    return _longest(time.perf_counter() - began)


def _longest(seconds: float) -> float:
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))


def _reductions(x: _Array) -> dict[str, _Once]:
    raw = comm.world().mpi.Allreduce
    return {"raw": lambda: raw(MPI.IN_PLACE, x), "ours": lambda: comm.all_reduce(x)}


def _ping_pongs(x: _Array) -> dict[str, _Once]:
    mpi = comm.world().mpi
    return {
        "raw": _there_and_back(x, mpi.Send, mpi.Recv),
        "ours": _there_and_back(x, comm.send, comm.recv),
    }


def _raw_reductions(x: _Array) -> dict[str, _Once]:
    mpi, watched = Plain(MPI.COMM_WORLD), MPI.COMM_WORLD
    return {
        "raw": lambda: mpi.Allreduce(MPI.IN_PLACE, x),
        "ours": lambda: watched.Allreduce(MPI.IN_PLACE, x),
    }


def _raw_ping_pongs(x: _Array) -> dict[str, _Once]:
    mpi = Plain(MPI.COMM_WORLD)
    return {
        "raw": _there_and_back(x, mpi.Send, mpi.Recv),
        "ours": _there_and_back(x, MPI.COMM_WORLD.Send, MPI.COMM_WORLD.Recv),
    }


def _there_and_back(x: _Array, send: Callable[[_Array, int], object], recv: Callable[[_Array, int], object]) -> _Once:
    """Between the neighbours 0 and 1, 2 and 3."""
    peer = comm.rank ^ 1

    def lower() -> None:
        send(x, peer)
        recv(x, peer)

    def higher() -> None:
        recv(x, peer)
        send(x, peer)

    return lower if comm.rank < peer else higher


def _waits() -> dict[str, _Once]:
    """Ways to wait for the last rank, which comes late."""
    x = np.zeros(2, np.float32)
    mpi, last = comm.world().mpi, comm.size - 1

    def message(send: Callable[[_Array, int], object], recv: Callable[[_Array, int], object]) -> _Once:
        def wait() -> None:
            if comm.rank != last:
                recv(x, last)
                return
            for rank in range(last):
                send(x, rank)

        return wait

    return {
        "labkit recv": message(comm.send, comm.recv),
        "labkit all_reduce": lambda: comm.all_reduce(x),
        "raw Recv": message(mpi.Send, mpi.Recv),
        "raw Allreduce": lambda: mpi.Allreduce(MPI.IN_PLACE, x),
    }


def _cpu_share(wait: _Once, seconds: float) -> float:
    """CPU time per second of a rank that waits so long in `wait` for the last one; the largest of all ranks."""
    MPI.COMM_WORLD.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(seconds)
    used, began = time.process_time(), time.perf_counter()
    wait()
    share = (time.process_time() - used) / (time.perf_counter() - began)
    return _longest(0.0 if comm.rank == comm.size - 1 else share)


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
