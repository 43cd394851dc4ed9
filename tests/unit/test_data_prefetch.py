"""The next file is read while the current one trains, and no thread outlives that."""

from __future__ import annotations

import gc
import importlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import data
from labkit.data import prefetch
from labkit.data.prefetch import read_ahead
from labkit.data.readers import Header
from tests.conftest import eventually

from .sample_files import (
    SIZES,
    N,
    raw,
    write_files,
)

MODULE = importlib.import_module("labkit.data.files")  # the function of that name hides it


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "labkit-read"]


class Gate:
    """A load that tells when it begins and goes on when it is let."""

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in range(4)]
        self.let = [threading.Event() for _ in range(4)]

    def load(self, item: int) -> int:
        self.begun[item].set()
        assert self.let[item].wait(30)
        return item


def test_the_next_is_read_while_the_caller_works_and_no_further() -> None:
    gate, items = Gate(), iter(range(4))
    asked: list[int] = []

    def ask() -> int | None:
        asked.append(threading.get_ident())
        return next(items, None)

    going = read_ahead(ask, gate.load)
    gate.let[0].set()
    assert next(going) == 0
    assert gate.begun[1].wait(30)  # while this thread has 0
    gate.let[1].set()
    [thread] = reading_threads() or [None]
    if thread is not None:
        thread.join(30)
    assert not gate.begun[2].is_set()  # 2 is begun only when 1 is asked for
    for rest in gate.let:
        rest.set()
    assert list(going) == [1, 2, 3]
    assert set(asked) == {threading.get_ident()}  # asking sends messages: it is the main thread's
    assert not reading_threads()


def test_files_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data.files(write_files(tmp_path, "npz", SIZES))
    begun, let = threading.Event(), threading.Event()
    order: list[str] = []
    real = MODULE.read_samples

    def slow(header: Header) -> Any:
        order.append(header.path.name)
        if len(order) == 2:
            begun.set()
            assert let.wait(30)
        return real(header)

    monkeypatch.setattr(MODULE, "read_samples", slow)
    going = dataset.feed(0, 1, 4).epoch(0)
    first = next(going)
    assert begun.wait(30) and len(order) == 2  # the second file is being read, the first trains
    let.set()
    assert len(raw(dataset, [first, *going])) == N and len(set(order)) == 4
    assert not reading_threads()


def train_until_interrupted(going: Iterator[int], gate: Gate) -> None:
    for _ in going:
        assert gate.begun[1].wait(30)
        gate.let[1].set()
        raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["closed", "forgotten", "interrupted"])
def test_no_thread_outlives_an_iterator_that_is_given_up(way: str) -> None:
    gate = Gate()
    gate.let[0].set()
    going = read_ahead(iter([0, 1, 2]).__next__, gate.load)
    if way == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted(going, gate)
    else:
        assert next(going) == 0 and gate.begun[1].wait(30)
        gate.let[1].set()
    if way == "closed":
        going.close()
    del going
    gc.collect()
    assert eventually(lambda: not reading_threads()) and not gate.begun[2].is_set()


def test_giving_up_waits_no_longer_than_a_moment_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.01)
    gate = Gate()
    gate.let[0].set()
    going = read_ahead(iter([0, 1]).__next__, gate.load)
    next(going)
    [thread] = reading_threads()
    going.close()
    assert thread.is_alive() and thread.daemon
    gate.let[1].set()
    thread.join(30)
    assert not thread.is_alive()


def test_an_interrupt_ends_the_waiting_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.01)
    gate = Gate()
    main = threading.main_thread().ident

    def interrupt() -> None:
        assert gate.begun[0].wait(30) and main is not None
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(read_ahead(iter([0, 1]).__next__, gate.load))
    thread.join(30)
    gate.let[0].set()
    # Not join: Python 3.11 takes a thread for ended once a join of it was interrupted (python/cpython#90882).
    assert eventually(lambda: not reading_threads())


def test_what_goes_wrong_in_the_thread_is_raised_where_the_file_is_used() -> None:
    def load(item: int) -> int:
        if item == 1:
            raise MemoryError("too large")
        return item

    going = read_ahead(iter([0, 1, 2]).__next__, load)
    assert next(going) == 0
    with pytest.raises(MemoryError, match="too large"):
        next(going)
    assert next(going, None) is None and not reading_threads()


def test_files_already_passed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data.files(write_files(tmp_path, "npz", [4] * 6))
    whole = list(dataset.feed(0, 1, 4).epoch(0))
    read: list[str] = []
    real = MODULE.read_samples
    monkeypatch.setattr(MODULE, "read_samples", lambda header: read.append(header.path.name) or real(header))
    rest = list(dataset.feed(0, 1, 4).epoch(0, first=4))
    assert len(read) == 2 and raw(dataset, rest) == raw(dataset, whole)[16:]
