"""Running a piece of code on the ranks, and following it rank by rank until every rank is back."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipyparallel import AsyncResult, Client

__all__ = ["Cell", "CellError", "CellInterrupted", "RankFailure", "rank_list"]

# After the first error the other ranks get this long to finish by themselves before they are interrupted.
GRACE_AFTER_ERROR_S = 0.5
# A rank that does not react to an interrupt within this time is blocked in a call that ignores it.
GRACE_AFTER_INTERRUPT_S = 5.0


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1 and 3", "ranks 0 to 3"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed in a cell.

    Attributes
    ----------
    rank
        The rank.
    name
        Name of the exception's class.
    message
        The exception's text.
    traceback
        As IPython on that rank formatted it (with terminal colours).
    """

    rank: int
    name: str
    message: str
    traceback: str

    def __str__(self) -> str:
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        return f"{self.name}: {first}" if first else self.name


# What labkit itself raises to say what a cell did wrong; where in labkit it was found out helps nobody.
OWN_ERRORS = {"ArgumentError", "CommError", "DataError", "DeadlineError", "MismatchError", "TrainError"}
FRAME = re.compile(r"(\x1b\[[\d;]*m)*File (\x1b\[[\d;]*m)*\S*/labkit/(comm|data|train)/")


def without_own_frames(name: str, traceback: str) -> str:
    """IPython's traceback of an error of labkit's own, down to the cell's line that called it."""
    if name not in OWN_ERRORS:
        return traceback
    return "\n\n".join(block for block in traceback.split("\n\n") if not FRAME.match(block.lstrip()))


class CellError(RuntimeError):
    """A cell failed on at least one rank.

    Attributes
    ----------
    first
        The failure that came first.
    states
        One line for every rank that took part.
    """

    def __init__(self, first: RankFailure, states: Mapping[int, str], stuck: Sequence[int] = ()) -> None:
        self.first, self.states, self.stuck = first, dict(states), list(stuck)
        super().__init__("\n".join([f"rank {first.rank} failed first: {first}", *describe(states, stuck)]))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the first rank's own traceback, then every other rank in a line."""
        lines = [f"rank {self.first.rank} failed first:", *self.first.traceback.splitlines()]
        others = {rank: state for rank, state in self.states.items() if rank != self.first.rank}
        return lines + ([""] if others or self.stuck else []) + describe(others, self.stuck)


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted from the notebook; the ranks' variables are kept."""

    def __init__(self, states: Mapping[int, str], stuck: Sequence[int] = ()) -> None:
        self.states, self.stuck = dict(states), list(stuck)
        super().__init__("\n".join(self._render_traceback_()))

    def _render_traceback_(self) -> list[str]:
        kept = (
            "Interrupted." if self.stuck else "Interrupted: every rank is back at its prompt, its variables are kept."
        )
        return [kept, *describe(self.states, self.stuck)]


def describe(states: Mapping[int, str], stuck: Sequence[int]) -> list[str]:
    """One line a rank, equal ones together, and the cure for those that did not come back."""
    together: dict[str, list[int]] = {}
    for rank, state in states.items():
        together.setdefault(state, []).append(rank)
    lines = [f"  {rank_list(ranks)}: {state}" for state, ranks in together.items()]
    if stuck:
        lines.append(f"  {rank_list(stuck).capitalize()} did not come back: blocked in a call that ignores interrupts.")
        lines.append("  Cure: lab.restart() (the ranks' variables are lost).")
    return lines


class Cell:
    """One piece of code under way on some ranks.

    Parameters
    ----------
    client
        ipyparallel client of the lab.
    engines
        Engine id of each rank that takes part, by rank.
    code
        The code, as typed.
    """

    def __init__(self, client: Client, engines: Mapping[int, int], code: str) -> None:
        self.client = client
        self.engines = dict(sorted(engines.items()))
        self.code = code
        self.results: dict[int, AsyncResult] = {
            rank: client[engine].execute(code, silent=False, block=False) for rank, engine in self.engines.items()
        }

    @property
    def pending(self) -> list[int]:
        """Ranks that are not back yet."""
        return [rank for rank, result in self.results.items() if not result.done()]

    def failures(self) -> list[RankFailure]:
        """Failures so far, the first one first (by the ranks' own clocks)."""
        failed = []
        for rank, result in self.results.items():
            error = result.exception() if result.done() else None
            if error is not None:
                when = result.metadata.get("completed")
                # A rank that was interrupted because of another's failure did not fail by itself.
                own = getattr(error, "ename", "") != "KeyboardInterrupt"
                failed.append((not own, when.timestamp() if when else time.time(), rank, error))
        return [self._failure(rank, error) for _, _, rank, error in sorted(failed, key=lambda item: item[:3])]

    def _failure(self, rank: int, error: BaseException) -> RankFailure:
        remote = getattr(error, "ename", None) is not None
        name = error.ename if remote else type(error).__name__  # type: ignore[attr-defined]
        message = error.evalue if remote else str(error)  # type: ignore[attr-defined]
        if name == "EngineError":
            name, message = "RankDiedError", f"the process of rank {rank} is gone. Cure: lab.restart()"
        traceback = getattr(error, "traceback", None) or f"{name}: {message}"
        return RankFailure(rank, name, message, without_own_frames(name, traceback))

    def text(self, rank: int, stream: str) -> str:
        """What `rank` has written so far to "stdout" or "stderr"."""
        return str(self.results[rank].metadata[stream] or "")

    def displays(self, rank: int) -> list[dict[str, Any]]:
        """What `rank` has displayed so far, then its last expression's value: MIME bundles."""
        metadata = self.results[rank].metadata
        value = metadata["execute_result"]
        return [*metadata["outputs"], *([value] if value else [])]

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Send Ctrl-C to `ranks`."""
        engines = [self.engines[rank] for rank in ranks if self.engines[rank] in self.client.ids]
        if engines:
            # Through each rank's own watcher process: signalling the whole engine set would end the MPI job.
            self.client.send_signal(signal.SIGINT, targets=engines, block=False)

    def bring_back(self, limit_s: float = GRACE_AFTER_INTERRUPT_S) -> list[int]:
        """Interrupt every rank that is at work until it is back; gives those that are not after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while (pending := self.pending) and time.monotonic() < deadline:
            # Again and again: a rank that has not begun with the cell yet ignores the signal.
            self.interrupt(pending)
            wait([self.results[rank] for rank in pending], timeout=0.5)
        return self.pending

    def wait(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is back, calling `on_change` a few times a second.

        A first error, or Ctrl-C here, interrupts the ranks that are still at work.

        Raises
        ------
        CellError
            When the code failed on a rank.
        CellInterrupted
            When it was interrupted from here.
        """
        interrupted = False
        first_error: float | None = None
        try:
            while pending := self.pending:
                wait([self.results[rank] for rank in pending], timeout=0.05, return_when=FIRST_COMPLETED)
                on_change()
                if first_error is None and self.failures():
                    first_error = time.monotonic()
                if first_error is not None and time.monotonic() > first_error + GRACE_AFTER_ERROR_S:
                    self.bring_back()
                    break
        except KeyboardInterrupt:
            interrupted = True
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: waiting is no longer wanted
                self.bring_back()
        self._wait_for_output()
        on_change()
        stuck = self.pending
        if interrupted:
            raise CellInterrupted(self.states(), stuck)
        failures = self.failures()
        if failures:
            raise CellError(failures[0], self.states(), stuck)

    def _wait_for_output(self) -> None:
        """Output travels on another socket than the reply: give it time to arrive, within reason."""
        deadline = time.monotonic() + 2
        for result in self.results.values():
            if result.done():
                result.wait_for_output(max(0.0, deadline - time.monotonic()))

    def states(self) -> dict[int, str]:
        """What became of each rank, in a few words."""
        failed = {failure.rank: failure for failure in self.failures()}
        words = {}
        for rank, result in self.results.items():
            if not result.done():
                words[rank] = "still at work"
            elif rank not in failed:
                words[rank] = "finished"
            elif failed[rank].name == "KeyboardInterrupt":
                words[rank] = "interrupted" + (f" in {failed[rank].message}" if failed[rank].message else "")
            else:
                words[rank] = str(failed[rank])
        return words

    def forget(self) -> None:
        """Let the client forget the results, which it would otherwise keep for ever."""
        done = [result for result in self.results.values() if result.done()]
        for result in done:
            self.client.purge_local_results(result)
