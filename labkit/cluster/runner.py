"""Running cells on the ranks, and bringing the ranks back whatever happens."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from labkit.cluster import healing, remote
from labkit.cluster.bring_up import World
from labkit.cluster.cells import Cell, CellError, CellInterrupted, DeadlockError, rank_list
from labkit.cluster.errors import ClusterError
from labkit.cluster.implementations import survives_death
from labkit.cluster.output import CellOutput, show_graph
from labkit.cluster.ranks import Ranks
from labkit.cluster.watch import bring_back, follow, stuck_ranks

__all__ = ["CellRunner"]


class CellRunner(Ranks):
    """Ranks that run cells; `Lab` says what the attributes are."""

    on_death: str | None = None

    def __init__(self, world: World, deadline: float | None = None) -> None:
        super().__init__(world)
        self.deadline = deadline
        self.setup: list[tuple[str, list[int] | None]] = []
        self.after_cell: list[Callable[[], None]] = []
        self._recovery_due = False
        """A cell was ended, and the ranks still have the communicators that were revoked for it."""

    def _act_on_death(self) -> None:
        """Do what is to be done when a rank's process has ended."""

    def run(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        block: bool = True,
        show: bool = True,
        deadline: float | None = None,
        setup: bool = False,
    ) -> Cell:
        """Run `code` on the ranks, as a `%%px` cell does.

        Parameters
        ----------
        code
            Python, as in a notebook cell.
        ranks
            The ranks that run it (default: all).
        block
            Wait until every rank is back.
        show
            Show what the ranks print, in rank order, while it comes.
        deadline
            Seconds after which it is ended (default: the lab's deadline). Not for cells that are not waited for.
        setup
            Let a rank that is started again run it, too. It must not need the other ranks.

        Raises
        ------
        CellError
            When the code fails on a rank; the others are interrupted.
        DeadlockError
            When ranks wait for each other, or for one that has left the cell; they are freed.
        CellDeadlineError
            When the deadline has passed.
        CellInterrupted
            When it is interrupted from here.
        ClusterError
            When the lab is stopped, a rank is gone, still busy, or not there.
        """
        engines = self._engines(ranks)
        cell = self.last = Cell(self.client, engines, code)
        if setup:
            mine = (code, None if len(engines) == self.size else list(engines))
            self.setup = [other for other in self.setup if other != mine] + [mine]
        if not block:
            return cell
        try:
            self._wait(cell, show, deadline)
        finally:
            for function in list(self.after_cell):
                function()
        return cell

    def wait(self, deadline: float | None = None) -> None:
        """Wait for a cell that was started without waiting, and show what it printed; as `run` does."""
        if self.last is not None:
            self._wait(self.last, True, deadline)

    def _wait(self, cell: Cell, show: bool, deadline: float | None) -> None:
        output = CellOutput(cell) if show else None
        limit = self.deadline if deadline is None else deadline
        try:
            follow(
                cell,
                self._watch,
                output.refresh if output else lambda: None,
                deadline_s=limit,
                ended=lambda: self._alarm.reason,
            )
        except (CellError, CellInterrupted) as problem:
            self._recovery_due = True
            self._recover_once_idle()
            if show and isinstance(problem, DeadlockError):
                show_graph(problem.proof)
            raise
        else:
            lost = [failure.rank for failure in cell.failures()]
            if lost and show:
                cure = "lab.heal() starts it again" if len(lost) == 1 else "lab.heal() starts them again"
                print(f"labkit: {rank_list(lost)} died, the others went on; {cure}", flush=True)
        finally:
            if output:
                output.finish()
            cell.forget()

    def _engines(self, ranks: Sequence[int] | None) -> dict[int, int]:
        """Engine id of each rank asked for, once it is sure that each can take a cell."""
        if not self.running:
            raise ClusterError("This lab is stopped.", cure="lab.restart(), or labkit.start()")
        engines = {info.rank: info.engine for info in self.ranks}
        wanted = list(engines) if ranks is None else list(ranks)
        missing = [rank for rank in wanted if rank not in engines]
        if missing or not wanted:
            asked = f"There is no {rank_list(missing)}" if missing else "No rank is named"
            raise ClusterError(f"{asked}: this lab has {rank_list(list(engines))}.")
        gone = [rank for rank in wanted if rank in healing.gone(self._world)]
        if gone and self.on_death:
            self._act_on_death()
            return self._engines(ranks)
        if gone:
            some = "The process of {} is gone." if len(gone) == 1 else "The processes of {} are gone."
            cure = "lab.restart() begins anew"
            if survives_death():
                cure = f"lab.heal() starts it again, lab.shrink() goes on without it, {cure}"
            raise ClusterError(some.format(rank_list(gone)), cure)
        busy = [rank for rank in (self.last.pending if self.last else []) if rank in wanted]
        if busy:
            raise ClusterError(
                f"{rank_list(busy).capitalize()} {'is' if len(busy) == 1 else 'are'} still at work on an earlier cell.",
                cure="lab.wait(), lab.interrupt(), or lab.restart()",
            )
        self._recover_once_idle()
        return {rank: engines[rank] for rank in wanted}

    def push(self, ranks: Sequence[int] | None = None, **variables: Any) -> None:
        """Set variables on the ranks: ``lab.push(lr=0.1)``."""
        engines = list(self._engines(ranks).values())
        self.client[engines].push(variables, block=True)

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """What `expression` is on each rank, in rank order: ``lab.pull("history.epochs")``.

        Raises
        ------
        CellError
            When it cannot be computed on a rank.
        """
        # Pickled there and not by ipyparallel, which would sort every dictionary on the way.
        code = f"import pickle as _pickle\n_pulled = _pickle.dumps({expression}, protocol=5)"
        cell = Cell(self.client, self._engines(ranks), code)
        follow(cell, self._watch)
        pulled = self.client[list(cell.engines.values())].pull("_pulled", block=True)
        return [pickle.loads(value) for value in pulled]

    def interrupt(self) -> None:
        """Send Ctrl-C to every rank that is at work, and wait for it to come back."""
        if self.last is not None and self.last.pending:
            self._recovery_due = True
            bring_back(self.last, self._watch)
            stuck = stuck_ranks(self.last, self._watch)
            if stuck:
                who = "; ".join(f"rank {rank} is {why}" for rank, why in stuck.items())
                stopped = next((rank for rank in stuck if self._watch.stopped(rank)), None)
                cure = "lab.restart()"
                if stopped is not None:
                    cure = f"lab.resume({stopped}) and then lab.interrupt(), or lab.replace({stopped})"
                raise ClusterError(f"Not every rank came back: {who}.", cure)
        self._recover_once_idle()

    def _recover_once_idle(self) -> None:
        """Recover from a cell that was ended, unless a rank is still in it: one that was stopped may be back later."""
        if self._recovery_due and not (self.last is not None and self.last.pending):
            self._recovery_due = False
            self._recover()

    def _recover(self) -> None:
        """All ranks on a fresh communicator, so that no half-done message meets the next cell."""
        if healing.gone(self._world):
            if self.on_death:
                try:
                    self._act_on_death()
                except ClusterError as problem:  # the cell's own error is what the user must see
                    print(f"labkit: {problem}", file=sys.stderr)
            return
        from ipyparallel.error import CompositeError

        self._watch.wardens.settle(info.pid for info in self.ranks)
        try:
            generation = 1 + max(self.view.apply_async(remote.prepare, self._addresses).get(timeout=10))
            self.view.apply_async(remote.renew_communicator, generation).get(timeout=10)
        except (TimeoutError, FutureTimeout, CompositeError):  # a rank may have died meanwhile
            print(
                "labkit: the ranks could not move to a fresh communicator; lab.restart() is safer than going on.",
                file=sys.stderr,
            )
