"""What it costs a rank to log a step, whether each step arrives, and whether the store stays as small as it began."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import queue
import struct
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from labkit.bench import Goal, Outcome, spread
from labkit.telemetry import COLUMNS, Collector, Emitter, Store

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

__all__ = ["run"]

RANKS, RATE = 4, 200
"""Ranks, and steps a second of each."""
LIMIT_US = 5.0

_Log = Callable[[int], None]


def run(*, quick: bool = False) -> Outcome:
    """Measure ours and two plain ways in turn: 4 processes, 200 steps a second, 10 s each (quick: 1 s).

    The peers are one ZeroMQ message a step, and one printed line of JSON a step, to ``/dev/null``: the least
    that printing can cost, for a notebook's engine would also carry the line to its client.
    """
    steps = RATE * (1 if quick else 10)
    rows, ours = [], {}
    for way in WAYS:
        row, costs = _measure(way, steps)
        rows.append(row)
        if way == "labkit":
            ours = {"costs": costs, **row}
    memory = _store_growth()
    rows.append(memory)
    goals = [
        Goal("logging a step at the rank, median in µs", median(ours["costs"]), LIMIT_US),
        Goal("steps sent minus steps received", abs(ours["sent"] - ours["received"]), 0),
        Goal("steps dropped", ours["dropped"], 0),
        Goal("growth of the store over 10 times its capacity, KiB", memory["growth_kib"], 0),
    ]
    return Outcome("telemetry", rows, goals)


def _measure(way: str, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Let the ranks log in one way; return a row, and each rank's median cost in µs."""
    spawn = multiprocessing.get_context("spawn")
    answers: Queue[dict[str, Any]] = spawn.Queue()
    barrier = spawn.Barrier(RANKS)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        reader = _Collected(folder) if way == "labkit" else _Counted(folder)
        ranks = [
            spawn.Process(target=_rank, args=(way, reader.address, rank, steps, barrier, answers), daemon=True)
            for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.start()
            results = [_answer(answers, ranks) for _ in ranks]
            for process in ranks:
                process.join(30)
            sent = sum(result["sent"] for result in results)
            received = reader.finish(sent)
        finally:
            for process in ranks:
                process.kill()
            reader.close()
    costs = [result["median_us"] for result in results]
    row = {
        "what": WAYS[way][0],
        "ranks": RANKS,
        "steps_per_s": RATE,
        "median_us": spread(costs),
        "p99_us": max(result["p99_us"] for result in results),
        "sent": sent,
        "received": received if way != "print" else None,
        "dropped": sum(result["dropped"] for result in results),
    }
    return row, costs


def _answer(answers: Queue[dict[str, Any]], ranks: Sequence[BaseProcess]) -> dict[str, Any]:
    """Return the next rank's answer, or say which rank died."""
    while True:
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            dead = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]
            if dead:
                raise RuntimeError("rank {} of the benchmark died, exit code {}".format(*dead[0])) from None


def _rank(way: str, address: str, rank: int, steps: int, barrier: Barrier, answers: Queue[dict[str, Any]]) -> None:
    log, finish = WAYS[way][1](address, rank)
    cost = np.empty(steps)
    barrier.wait(60)
    begun = time.perf_counter()
    for step in range(steps):
        time.sleep(max(0.0, begun + step / RATE - time.perf_counter()))
        before = time.perf_counter()
        log(step)
        cost[step] = time.perf_counter() - before
    sent, dropped = finish()
    middle, high = np.percentile(cost * 1e6, [50, 99])
    answers.put({"median_us": float(middle), "p99_us": float(high), "sent": sent or steps, "dropped": dropped})


def _labkit(address: str, rank: int) -> tuple[_Log, Callable[[], tuple[int, int]]]:
    emitter = Emitter(address, rank)

    def log(step: int) -> None:
        emitter.log(step=step, loss=1 / (step + 1), compute_s=0.003, wait_s=0.001, transfer_s=0.001, samples=64)

    def finish() -> tuple[int, int]:
        emitter.close()
        return emitter.sent, emitter.dropped

    return log, finish


def _push(address: str, rank: int) -> tuple[_Log, Callable[[], tuple[int, int]]]:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    pack = struct.Struct(f"<i{len(COLUMNS)}d").pack

    def log(step: int) -> None:
        socket.send(pack(rank, step, 0, time.time(), 1 / (step + 1), 0.003, 0.001, 0.001, 64), zmq.NOBLOCK)

    def finish() -> tuple[int, int]:
        context.destroy(linger=1000)
        return 0, 0

    return log, finish


def _print(address: str, rank: int) -> tuple[_Log, Callable[[], tuple[int, int]]]:
    nowhere = open(os.devnull, "w")  # noqa: SIM115 (closed by finish)

    def log(step: int) -> None:
        values = (step, 0, time.time(), 1 / (step + 1), 0.003, 0.001, 0.001, 64)
        line = json.dumps({"rank": rank, **dict(zip(COLUMNS, values, strict=True))})
        print(line, file=nowhere, flush=True)

    def finish() -> tuple[int, int]:
        nowhere.close()
        return 0, 0

    return log, finish


WAYS: dict[str, tuple[str, Callable[[str, int], tuple[_Log, Callable[[], tuple[int, int]]]]]] = {
    "labkit": ("labkit: batched", _labkit),
    "push": ("a ZeroMQ message each", _push),
    "print": ("a printed JSON line each", _print),
}


class _Collected:
    """The collector, as the notebook has it."""

    def __init__(self, folder: str) -> None:
        self._collector = Collector(RANKS, folder)
        self.address = self._collector.endpoints.metrics

    def finish(self, sent: int) -> int:
        """Wait for what is on its way, at most 10 s, and return how many steps came."""
        end = time.monotonic() + 10
        while self._collector.counts.received < sent and time.monotonic() < end:
            time.sleep(0.01)
        return self._collector.counts.received

    def close(self) -> None:
        self._collector.close()


class _Counted:
    """A bare socket that counts messages."""

    def __init__(self, folder: str) -> None:
        self._received = 0
        self._end = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 100_000
        self.address = f"ipc://{folder}/push"
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._end.is_set():
            while self._socket.poll(100):
                self._socket.recv()
                self._received += 1

    def finish(self, sent: int) -> int:
        """Wait for what is on its way, at most 1 s, and return how many messages came."""
        end = time.monotonic() + 1
        while self._received < sent and time.monotonic() < end:
            time.sleep(0.01)
        return self._received

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._context.destroy(linger=0)


def _store_growth() -> dict[str, Any]:
    """Fill a store with ten times what it holds; return what it took and how much it grew."""
    batch = np.zeros((20, len(COLUMNS)))

    def fill(store: Store) -> None:
        for first in range(0, 10 * store.capacity, len(batch)):
            batch[:, 0] = np.arange(first, first + len(batch))
            for rank in range(RANKS):
                store.add(rank, batch)

    tracemalloc.start()
    fill(Store(ranks=RANKS, capacity=10))  # what Python and numpy take once, at the first use
    store = Store(ranks=RANKS)
    taken = store.nbytes
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    fill(store)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What Python took beside the buffers, such as a counter that outgrew a small integer, is below 1 KiB.
    growth = max(0, after - before) + store.nbytes - taken
    return {
        "what": "store, filled 10 times over",
        "ranks": RANKS,
        "received": store.received,
        "store_kib": taken // 1024,
        "growth_kib": growth // 1024,
    }
