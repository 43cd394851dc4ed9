"""A piece of code under way on the ranks, and the errors it can end with."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.cluster.deadlock import Verdict
from labkit.cluster.implementations import survives_death
from labkit.cluster.seen import rank_list

if TYPE_CHECKING:
    from ipyparallel import AsyncResult, Client

__all__ = [
    "Cell",
    "CellDeadlineError",
    "CellError",
    "CellInterrupted",
    "DeadlockError",
    "RankFailure",
    "rank_list",
]


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
    died
        Whether the rank's process has ended.
    """

    rank: int
    name: str
    message: str
    traceback: str
    died: bool = False

    @property
    def follows(self) -> bool:
        """Whether it is no more than what a rank is told that waits for one whose process has ended."""
        return self.name in ("CommError", "RevokedError") or "MPI_ERR_PROC_FAILED" in self.message

    def __str__(self) -> str:
        first = self.message.strip().splitlines()[0].rstrip(":") if self.message.strip() else ""
        return f"{self.name}: {first}" if first else self.name


# What labkit itself raises to say what a cell did wrong; where in labkit it was found out helps nobody.
OWN_ERRORS = {
    *("ArgumentError", "CommError", "DataError", "DeadlineError", "MismatchError", "TrainError"),
    *("RankDiedError", "RevokedError", "StaleError"),
}
FRAME = re.compile(r"(\x1b\[[\d;]*m)*File (\x1b\[[\d;]*m)*\S*/labkit/(comm|data|train|exercises)/")
WATCHING = re.compile(r"(\x1b\[[\d;]*m)*File (\x1b\[[\d;]*m)*\S*/labkit/(comm/watched|exercises/)")


def without_own_frames(name: str, traceback: str) -> str:
    """IPython's traceback of an error of labkit's own, down to the cell's line that called it.

    Of others, the frames that merely watch a raw MPI call, or check an exercise, are left out.
    """
    own = FRAME if name in OWN_ERRORS else WATCHING
    return "\n\n".join(block for block in traceback.split("\n\n") if not own.match(block.lstrip()))


class CellError(RuntimeError):
    """A cell failed on at least one rank.

    Attributes
    ----------
    first
        The failure that came first; None where no rank failed by itself.
    states
        What became of every rank that took part, in a few words.
    stuck
        Ranks that did not come back, and why.
    seen
        What every rank was doing when the others were freed, a line each.
    verdict
        The proof, if the cell was ended because ranks could never have gone on.
    """

    verdict: Verdict | None = None

    def __init__(
        self,
        first: RankFailure | None,
        states: Mapping[int, str],
        stuck: Mapping[int, str] | None = None,
        seen: Sequence[str] = (),
    ) -> None:
        self.first, self.states, self.stuck, self.seen = first, dict(states), dict(stuck or {}), list(seen)
        super().__init__("\n".join(self._plain()))

    def _plain(self) -> list[str]:
        assert self.first is not None
        return [f"rank {self.first.rank} failed first: {self.first}", *describe(self.states, self.stuck)]

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the first rank's own traceback, then every other rank in a line."""
        assert self.first is not None
        lines = [f"rank {self.first.rank} failed first:", *self.first.traceback.splitlines()]
        others = {rank: state for rank, state in self.states.items() if rank != self.first.rank}
        return lines + ([""] if others or self.stuck else []) + describe(others, self.stuck)


class DeadlockError(CellError):
    """Some ranks of a cell could never have gone on; they were freed, and their variables are kept."""

    def __init__(self, verdict: Verdict, states: Mapping[int, str], stuck: Mapping[int, str] | None = None) -> None:
        self.verdict = self.proof = verdict
        super().__init__(None, states, stuck, verdict.lines)

    def _plain(self) -> list[str]:
        return [*str(self.proof).splitlines(), freed(self.stuck), *describe({}, self.stuck)]

    def _render_traceback_(self) -> list[str]:
        first, *rest = self._plain()
        name = "MismatchError" if self.proof.kind == "mismatch" else "DeadlockError"
        return [f"{name}: {first}", *rest]


class CellDeadlineError(CellError, TimeoutError):
    """A cell was ended because its deadline had passed; the ranks' variables are kept."""

    def __init__(
        self, seconds: float, seen: Sequence[str], states: Mapping[int, str], stuck: Mapping[int, str] | None = None
    ) -> None:
        self.seconds = seconds
        super().__init__(None, states, stuck, seen)

    def _plain(self) -> list[str]:
        head = f"the cell was not done after {self.seconds:g} s. Then"
        return [head, *(f"  {line}" for line in self.seen), freed(self.stuck), *describe({}, self.stuck)]

    def _render_traceback_(self) -> list[str]:
        first, *rest = self._plain()
        return [f"DeadlineError: {first}", *rest]


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted from the notebook; the ranks' variables are kept."""

    def __init__(
        self, states: Mapping[int, str], stuck: Mapping[int, str] | None = None, seen: Sequence[str] = ()
    ) -> None:
        self.states, self.stuck, self.seen = dict(states), dict(stuck or {}), list(seen)
        super().__init__("\n".join(self._render_traceback_()))

    def _render_traceback_(self) -> list[str]:
        were = ["Until then:", *(f"  {line}" for line in self.seen)] if self.seen else []
        return [f"Interrupted. {freed(self.stuck)}".rstrip(), *were, *describe({}, self.stuck)]


def freed(stuck: Mapping[int, str]) -> str:
    """What has become of the ranks, in a sentence."""
    return "" if stuck else "Every rank is back at its prompt, its variables are kept."


def describe(states: Mapping[int, str], stuck: Mapping[int, str]) -> list[str]:
    """One line a rank, equal ones together, and the cure for those that did not come back."""
    together: dict[str, list[int]] = {}
    for rank, state in states.items():
        together.setdefault(state, []).append(rank)
    lines = [f"  {rank_list(ranks)}: {state}" for state, ranks in together.items()]
    lines += [f"  {rank_list([rank]).capitalize()} did not come back: {why}." for rank, why in stuck.items()]
    if any("SIGSTOP" not in why for why in stuck.values()):
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
                # A rank that was ended because of another's failure did not fail by itself.
                own = getattr(error, "ename", "") not in ("KeyboardInterrupt", "RevokedError")
                died = "EngineError" in (type(error).__name__, getattr(error, "ename", ""))
                failed.append((not died, not own, when.timestamp() if when else time.time(), rank, error))
        return [self._failure(rank, error) for *_, rank, error in sorted(failed, key=lambda item: item[:4])]

    def _failure(self, rank: int, error: BaseException) -> RankFailure:
        remote = getattr(error, "ename", None) is not None
        name = error.ename if remote else type(error).__name__  # type: ignore[attr-defined]
        message = error.evalue if remote else str(error)  # type: ignore[attr-defined]
        if name == "EngineError":
            cure = "lab.heal() or lab.shrink()" if survives_death() else "lab.restart()"
            name, message = "RankDiedError", f"the process of rank {rank} is gone. Cure: {cure}"
            return RankFailure(rank, name, message, f"{name}: {message}", died=True)
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

    def wait_for_output(self) -> None:
        """Output travels on another socket than the reply: give it time to arrive, within reason."""
        deadline = time.monotonic() + 2
        for result in self.results.values():
            if result.done():
                result.wait_for_output(max(0.0, deadline - time.monotonic()))

    def states(self) -> dict[int, str]:
        """What became of each rank, in a few words."""
        failed = {failure.rank: failure for failure in self.failures()}
        died = [rank for rank, failure in failed.items() if failure.died]
        words = {}
        for rank, result in self.results.items():
            if not result.done():
                words[rank] = "still at work"
            elif rank not in failed:
                words[rank] = "finished"
            elif died and failed[rank].follows:
                words[rank] = f"freed, because {rank_list(died)} {'is' if len(died) == 1 else 'are'} gone"
            elif failed[rank].name == "KeyboardInterrupt":
                words[rank] = "interrupted" + (f" in {failed[rank].message}" if failed[rank].message else "")
            else:
                words[rank] = str(failed[rank]) if failed[rank].died else str(failed[rank]).split(" Cure:")[0]
        return words

    def forget(self) -> None:
        """Let the client forget the results, which it would otherwise keep for ever."""
        done = [result for result in self.results.values() if result.done()]
        for result in done:
            self.client.purge_local_results(result)
            for remembers in (type(result).__len__, type(result)._count_chunks):  # 128 results each
                getattr(remembers, "cache_clear", int)()
