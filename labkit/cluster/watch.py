"""Following a running cell rank by rank: who waits for whom, the first failure, a proven deadlock, the deadline.

Whatever ends a cell early, the way out is the same. Each rank that is still at work gets Ctrl-C, from its own warden;
that frees Python code and labkit's waits. What is then still blocked is in a raw MPI call, and is freed by revoking
the communicators (MPI's user-level fault mitigation), where no message is under way by TCP (see
`labkit.cluster.traffic`). The lab then moves all ranks to fresh ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Literal

import psutil

from labkit.cluster.cells import Cell, CellDeadlineError, CellError, CellInterrupted, DeadlockError, RankFailure
from labkit.cluster.deadlock import RAW, Verdict, verdict
from labkit.cluster.errors import ClusterError
from labkit.cluster.processes import stopped
from labkit.cluster.seen import Condition, Seen, describe, rank_list, stragglers
from labkit.cluster.traffic import Traffic
from labkit.cluster.wardens import Wardens
from labkit.telemetry.states import RankState

if TYPE_CHECKING:
    from labkit.cluster.bring_up import RankInfo

__all__ = ["Watch", "bring_back", "follow"]

TICK_S = 0.05
FIRST_LOOK_S, LOOK_EACH_S = 0.3, 0.15
"""A cell is first looked at after so long, and then so often: short cells cost nothing."""
GRACE_AFTER_ERROR_S = 0.5
"""After the first error the other ranks get this long to finish by themselves before they are interrupted."""
GRACE_AFTER_INTERRUPT_S = 5.0
"""A rank that does not come back within this time is in a call that ignores interrupts."""
GRACE_BESIDE_STOPPED_S = 1.5
"""The same where a rank is stopped by a signal: others may be in the middle of a message from its memory."""
REVOKE_AFTER_S, AGAIN_AFTER_S = 0.08, 0.5
SILENT_S = 2.0
"""A rank that does not answer for so long gets Ctrl-C without being asked. Sooner it may just be writing its error,
of which that would leave nothing."""


class Watch:
    """What the notebook sees of all ranks.

    Parameters
    ----------
    ranks
        All ranks of the world.
    wardens
        The way to ask them.
    """

    def __init__(self, ranks: list[RankInfo], wardens: Wardens) -> None:
        self.ranks = ranks
        self.wardens = wardens
        self._processes = {info.rank: info.process() for info in ranks}
        self.traffic = Traffic(self._processes.values(), any(info.rejoined for info in ranks))

    def seen(self, cell: Cell | None) -> dict[int, Seen]:
        """Every rank at this moment; `cell` is the one that runs, if any does."""
        conditions = {info.rank: self._condition(info, cell) for info in self.ranks}
        asked = [info.pid for info in self.ranks if conditions[info.rank] not in ("gone", "stopped")]
        at = time.time()
        answers = self.wardens.ask(asked, "state")
        found = {}
        for info in self.ranks:
            condition, answer = conditions[info.rank], answers.get(info.pid)
            state = None if answer is None else RankState.from_json(answer)
            if condition == "running" and state is None:
                # It may have ended, or been stopped, since it was looked at.
                condition = self._condition(info, cell)
                if condition == "running" and self.wardens.reaches(info.pid):
                    condition = "silent"
            found[info.rank] = Seen(condition, state, at)
        return found

    def close(self) -> None:
        """Ask no more."""
        self.wardens.close()

    def stopped(self, rank: int) -> bool:
        """Whether the rank's process is stopped by a signal."""
        process = self._processes[rank]
        return process is not None and stopped(process)

    def _status(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            if process is not None and process.is_running():
                return str(process.status())
        except psutil.NoSuchProcess:
            pass
        return str(psutil.STATUS_DEAD)

    def _condition(self, info: RankInfo, cell: Cell | None) -> Condition:
        status = self._status(info.rank)
        if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
            return "gone"
        if status == psutil.STATUS_STOPPED:
            return "stopped"
        result = cell.results.get(info.rank) if cell is not None else None
        if result is None:
            return "absent"
        if not result.done():
            return "running"
        return "failed" if result.exception() is not None else "finished"


def follow(
    cell: Cell,
    watch: Watch,
    on_change: Callable[[], None] = lambda: None,
    *,
    deadline_s: float | None = None,
    ended: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait until every rank is back from `cell`, calling `on_change` a few times a second.

    Parameters
    ----------
    cell, watch
        What to follow, and the eyes to do it with.
    on_change
        Called between looks, in this thread.
    deadline_s
        Seconds after which the cell is ended; None: never.
    ended
        Says why the whole lab has ended, None while it has not: no rank's answer will come then.

    Raises
    ------
    CellError
        When the code failed on a rank; the others were freed.
    DeadlockError
        When some ranks could never have gone on; they were freed.
    CellDeadlineError
        When the deadline passed.
    CellInterrupted
        When it was interrupted from here.
    ClusterError
        When the lab has ended.
    """
    began = time.monotonic()
    first_error: float | None = None
    settled: set[int] = set()
    """Ranks whose deaths all others have gone on from."""
    look_at = began + FIRST_LOOK_S
    before: dict[int, Seen] = {}
    proof: Verdict | None = None
    overdue = interrupted = False
    seen: dict[int, Seen] = {}
    try:
        while pending := cell.pending:
            wait([cell.results[rank] for rank in pending], timeout=TICK_S, return_when=FIRST_COMPLETED)
            on_change()
            if reason := ended():
                raise ClusterError(reason)
            now = time.monotonic()
            failures = [failure for failure in cell.failures() if failure.rank not in settled]
            goes_on = borne(cell, watch, failures) if failures else "yes"
            if goes_on == "yes":
                settled.update(failure.rank for failure in failures)
            first_error = (first_error or now) if goes_on == "no" else None
            if first_error is not None:
                if now > first_error + GRACE_AFTER_ERROR_S:
                    seen = watch.seen(cell)
                    break
            elif deadline_s is not None and now > began + deadline_s:
                seen, overdue = watch.seen(cell), True
                break
            elif now > look_at:
                look_at = now + LOOK_EACH_S
                before, seen = seen, watch.seen(cell)
                proof = verdict(before, seen) if before and not death_being_noticed(seen) else None
                if proof is not None:
                    break
    except KeyboardInterrupt:
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            seen = watch.seen(cell)
    if cell.pending:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: waiting is no longer wanted
            bring_back(cell, watch)
    cell.wait_for_output()
    on_change()
    lines = [*describe(seen), *stragglers(seen)] if seen else []
    stuck = stuck_ranks(cell, watch) if cell.pending else {}
    if proof is not None:
        raise DeadlockError(proof, cell.states(), stuck)
    if overdue:
        raise CellDeadlineError(deadline_s or 0.0, lines, cell.states(), stuck)
    if interrupted:
        raise CellInterrupted(cell.states(), stuck, lines)
    failures = cell.failures()
    if failures and borne(cell, watch, failures) == "no":
        raise CellError(failures[0], cell.states(), stuck, lines)


def borne(cell: Cell, watch: Watch, failures: Sequence[RankFailure]) -> Literal["yes", "no", "for now"]:
    """Whether these failures are no more than deaths, and all other ranks of the cell go on without the dead ones.

    A rank says so by having gone on without them ("yes"), or, while it is at work, by being in code that will
    ("for now"): see `labkit.comm.surviving`.
    """
    dead = {failure.rank for failure in failures}
    others = set(cell.results) - {failure.rank for failure in cell.failures() if failure.died}
    if not others or not all(failure.died for failure in failures):
        return "no"
    seen = watch.seen(cell)
    answers = set()
    for rank in others:
        state, running = seen[rank].state, seen[rank].condition == "running"
        went_on = state is not None and dead <= set(state.without)
        answers.add("yes" if went_on else "for now" if state is not None and state.bears and running else "no")
    return "no" if "no" in answers else "for now" if "for now" in answers else "yes"


def death_being_noticed(seen: Mapping[int, Seen]) -> bool:
    """Whether a rank waits that will go on without one that is gone, and has not heard of it yet."""
    gone = {rank for rank, one in seen.items() if one.condition == "gone"}
    states = [one.state for one in seen.values() if one.condition == "running" and one.state is not None]
    return any(state.bears and not gone <= set(state.without) for state in states)


def bring_back(cell: Cell, watch: Watch) -> None:
    """Interrupt and free every rank that is at work, until it is back or known not to come."""
    pids = {info.rank: info.pid for info in watch.ranks}
    began = time.monotonic()
    interrupt_at, revoke_at = began, began + REVOKE_AFTER_S
    while pending := cell.pending:
        now = time.monotonic()
        stopped = [watch.stopped(rank) for rank in pending]
        if now > began + (GRACE_BESIDE_STOPPED_S if any(stopped) else GRACE_AFTER_INTERRUPT_S) or all(stopped):
            return
        if now >= interrupt_at:
            # Again and again: a rank that has not begun with the cell yet ignores it.
            heard = watch.wardens.ask([pids[rank] for rank in pending], "interrupt", timeout_s=0.2)
            if now > began + SILENT_S:
                cell.interrupt([rank for rank in pending if pids[rank] not in heard])
            interrupt_at = now + AGAIN_AFTER_S
        if now >= revoke_at and watch.traffic.allows_revoking(now - began):
            # On all ranks of the world: each revokes its own, so that none depends on another's help.
            watch.wardens.ask(pids.values(), "free", timeout_s=0.2)
            revoke_at = now + AGAIN_AFTER_S
        wait([cell.results[rank] for rank in pending], timeout=REVOKE_AFTER_S / 2)


def stuck_ranks(cell: Cell, watch: Watch) -> dict[int, str]:
    """Ranks that are not back, and why each is not."""
    seen = watch.seen(cell)
    stopped = [rank for rank, one in seen.items() if one.condition == "stopped"]
    reasons = {}
    for rank in cell.pending:
        one = seen[rank]
        call = (one.wait.text or one.wait.operation) if one.wait else "a call"
        if one.condition == "stopped":
            reasons[rank] = (
                f"stopped by a signal (SIGSTOP): lab.resume({rank}) lets it go on, lab.replace({rank}) ends it"
            )
        elif stopped and one.condition in ("running", "silent"):
            reasons[rank] = f"in {call} with {rank_list(stopped)}, stopped in the middle of a message (SIGSTOP)"
        elif one.condition == "silent":
            reasons[rank] = "in C code that ignores interrupts and lets nothing else run"
        elif one.wait is not None and one.wait.communicator.startswith(RAW):
            reasons[rank] = (
                f"blocked in {call}, a raw mpi4py call, which this MPI cannot end "
                "(labkit.comm's own calls can be ended under every MPI)"
            )
        else:
            reasons[rank] = f"in {call}, which ignores interrupts"
    return reasons
