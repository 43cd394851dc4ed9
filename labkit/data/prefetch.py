"""Reading ahead: while one file is trained on, a thread reads the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["CLOSE_S", "read_ahead"]

CLOSE_S = 0.5
"""How long an iterator that is given up waits for a reading under way: an interrupt must come back within a second."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(ask: Callable[[], Item | None], load: Callable[[Item], Result]) -> Iterator[Result]:
    """Go through ``load(ask())`` until `ask` returns None, each loaded while the caller works on the one before.

    At most two results are in memory at a time: the caller's and the next. Each is loaded by a thread of its own, which
    ends with it. An iterator that is closed, left in the middle or interrupted waits at most `CLOSE_S` for a reading
    under way. No read can be broken off from outside: one that takes longer ends with its file, and what it read is
    forgotten.

    Parameters
    ----------
    ask
        Returns what to load next, or None; called in the caller's thread.
    load
        Loads it; called in the thread.

    Raises
    ------
    BaseException
        What `load` raised, in the caller's thread, in place of that result; the iterator is then at its end.
    """
    item = ask()
    reading = None if item is None else Reading(load, item)
    try:
        while reading is not None:
            result = reading.result()
            item = ask()
            reading = None if item is None else Reading(load, item)
            yield result
            del result  # the caller is through with it: its memory is needed for the one after the next
    finally:
        if reading is not None:
            reading.drop()


class Reading(Generic[Result]):
    """One call of `load`, in a thread."""

    def __init__(self, load: Callable[[Item], Result], item: Item) -> None:
        self._results: list[Result] = []
        self._error: BaseException | None = None
        # A daemon: a read that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(load, item), name="labkit-read", daemon=True)
        self._thread.start()

    def _run(self, load: Callable[[Item], Result], item: Item) -> None:
        try:
            self._results.append(load(item))
        except BaseException as error:  # raised where the result is asked for
            self._error = error

    def result(self) -> Result:
        """Wait for the result and return it; Ctrl-C ends the waiting."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results.pop()

    def drop(self) -> None:
        """Wait a moment for the thread to end; its result is not wanted."""
        # The garbage collector can close an iterator in any thread, this one too.
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
