"""The all-reduce algorithms on threads in place of ranks: right sums, and the counts their docstrings promise."""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from labkit.comm.algorithms import ALGORITHMS


class Wires:
    """One queue for each ordered pair of ranks."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)


class ThreadLink:
    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.wires, self.rank, self.size = wires, rank, size
        self.messages = self.nbytes = 0

    def send(self, x: Any, dst: int) -> None:
        assert dst != self.rank
        self.messages += 1
        self.nbytes += x.nbytes
        self.wires.queues[self.rank, dst].put(x.copy())

    def recv(self, x: Any, src: int) -> None:
        x[...] = self.wires.queues[src, self.rank].get(timeout=20)

    def exchange(self, outgoing: Any, dst: int, incoming: Any, src: int) -> None:
        self.send(outgoing, dst)
        self.recv(incoming, src)


def run(algorithm: str, size: int, arrays: list[Any], combine: Any = np.add) -> list[ThreadLink]:
    wires = Wires()
    wires.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    links = [ThreadLink(wires, rank, size) for rank in range(size)]
    threads = [
        threading.Thread(target=ALGORITHMS[algorithm], args=(arrays[rank], combine, links[rank]))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return links


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_has_the_sum(algorithm: str, size: int) -> None:
    for length in (0, 1, 2, size - 1, size, 50):
        draw = np.random.default_rng(length)
        arrays = [draw.normal(size=length) for _ in range(size)]
        wanted = np.sum(arrays, axis=0)
        run(algorithm, size, arrays)
        for array in arrays:
            np.testing.assert_allclose(array, wanted, atol=1e-12)
            np.testing.assert_array_equal(array, arrays[0])  # to the last bit


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ring"])
def test_all_but_the_ring_combine_in_rank_order(algorithm: str, size: int) -> None:
    def join(lower: Any, higher: Any, out: Any) -> None:
        out[...] = [a + b for a, b in zip(lower, higher, strict=True)]

    arrays = [np.array([str(rank)] * 20, dtype=object) for rank in range(size)]
    run(algorithm, size, arrays, join)
    for array in arrays:
        assert list(array) == ["".join(map(str, range(size)))] * 20


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_messages_and_bytes_are_as_documented(size: int) -> None:
    length = 16 * 5
    nbytes, rounds, share = length * 8, int(math.log2(size)), 2 * (size - 1) * length * 8 // size
    counts = {
        name: [(link.messages, link.nbytes) for link in run(name, size, arrays(size, length))] for name in ALGORITHMS
    }
    assert counts["to_root"] == [(size - 1, (size - 1) * nbytes)] + [(1, nbytes)] * (size - 1)
    assert max(counts["tree"]) == (rounds, rounds * nbytes)
    assert counts["recursive_doubling"] == [(rounds, rounds * nbytes)] * size
    assert counts["ring"] == [(2 * (size - 1), share)] * size
    assert counts["rabenseifner"] == [(2 * rounds, share)] * size


def arrays(size: int, length: int) -> list[Any]:
    return [np.ones(length) for _ in range(size)]
