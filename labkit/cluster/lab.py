"""The lab: ranks that run cells, can be asked how they are, and are stopped."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from labkit.cluster import current, guard, remote
from labkit.cluster.bring_up import RankInfo, World, bring_up
from labkit.cluster.card import RankStatus, card_html, card_text
from labkit.cluster.cells import Cell, CellError, CellInterrupted, rank_list
from labkit.cluster.errors import ClusterError
from labkit.cluster.output import CellOutput
from labkit.cluster.seen import Seen, in_words
from labkit.cluster.sessions import Session
from labkit.cluster.stacks import Stacks
from labkit.cluster.wardens import Wardens, socket_path
from labkit.cluster.watch import Watch, bring_back, follow, stuck_ranks

if TYPE_CHECKING:
    from labkit.charts.live import Live
    from labkit.telemetry import Collector

__all__ = ["Lab"]


class Lab:
    """Ranks of one MPI world, driven from here.

    Made by `labkit.start()` or `labkit.connect()`.  As the last line of a cell it shows itself as a card.

    Attributes
    ----------
    ranks
        Who the ranks are, in rank order.
    client
        ipyparallel's client, for whatever labkit has no name for.
    after_cell
        Functions called in the main thread after every `%%px` cell.
    last
        The last cell that ran: `lab.last.text(rank, "stdout")`.
    deadline
        Seconds after which a cell is ended that says nothing else; None: never.
    """

    def __init__(self, world: World, *, owned: bool, profile: str = "local", deadline: float | None = None) -> None:
        self._world = world
        self.owned = owned
        self.profile = profile
        self.deadline = deadline
        self._watch = self._new_watch()
        self.after_cell: list[Callable[[], None]] = []
        self.last: Cell | None = None
        self._collector: Collector | None = None
        self._live: Live | None = None
        self._alarm = guard.Alarm(world.session, self._fallen)

    # ---- who is there -------------------------------------------------------------------------------------------

    @property
    def client(self) -> Any:
        """ipyparallel's client."""
        return self._world.client

    @property
    def ranks(self) -> list[RankInfo]:
        """Who the ranks are, in rank order."""
        return self._world.ranks

    @property
    def size(self) -> int:
        """World size."""
        return len(self._world.ranks)

    @property
    def session(self) -> Session:
        """The record of this lab on this machine."""
        return self._world.session

    @property
    def running(self) -> bool:
        """Whether the lab's controller and launcher still run."""
        return self._alarm.reason is None and self.session.running

    @property
    def view(self) -> Any:
        """ipyparallel's view on all ranks, in rank order; it does not wait."""
        view = self.client[[info.engine for info in self.ranks]]
        view.block = False
        return view

    def status(self) -> list[RankStatus]:
        """What every rank is doing and how much memory it holds."""
        seen, now = self.seen() if self.running else {}, time.time()
        rows = []
        for info in self.ranks:
            one, process = seen.get(info.rank), info.process()
            memory = process.memory_info().rss if one and process and one.condition != "gone" else None
            state, doing = ("gone", "") if one is None else in_words(one, now)
            rows.append(RankStatus(info.rank, info.host, info.pid, info.device, info.threads, memory, state, doing))
        return rows

    def _title(self) -> str:
        state = "" if self.running else " (stopped)"
        return f"labkit: {self.size} rank{'s' if self.size > 1 else ''} · {self.session.mpi}{state}"

    def __repr__(self) -> str:
        return card_text(self._title(), self.status())

    def _repr_html_(self) -> str:
        return card_html(self._title(), self.status())

    def prepare(self) -> None:
        """Let the ranks make their communicator while the user looks at the card; the first cell comes after it."""
        self.view.apply_async(remote.prepare, self._addresses)

    @property
    def _addresses(self) -> str:
        """Where each rank listens, with its process id to be filled in."""
        return str(socket_path(self.session.folder, "{pid}"))

    def _new_watch(self) -> Watch:
        return Watch(self._world.ranks, Wardens(self._world.session.folder))

    def seen(self) -> dict[int, Seen]:
        """What every rank is doing at this moment, as it says itself, also while it is blocked."""
        return self._watch.seen(self.last if self.last and self.last.pending else None)

    def where(self) -> Stacks:
        """The stack of each rank's main thread, without interrupting it."""
        answers = self._watch.wardens.ask([info.pid for info in self.ranks], "stack")
        return Stacks({info.rank: answers.get(info.pid) for info in self.ranks})

    # ---- running code -------------------------------------------------------------------------------------------

    def run(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        block: bool = True,
        show: bool = True,
        deadline: float | None = None,
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
            if not problem.stuck:
                self._recover()
            raise
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
        gone = [rank for rank in wanted if engines[rank] not in self.client.ids]
        if gone:
            raise ClusterError(f"The process of {rank_list(gone)} is gone.", cure="lab.restart()")
        busy = [rank for rank in (self.last.pending if self.last else []) if rank in wanted]
        if busy:
            raise ClusterError(
                f"{rank_list(busy).capitalize()} is still at work on an earlier cell.",
                cure="lab.wait(), lab.interrupt(), or lab.restart()",
            )
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
            bring_back(self.last, self._watch)
            stuck = stuck_ranks(self.last, self._watch)
            if stuck:
                who = "; ".join(f"rank {rank} is {why}" for rank, why in stuck.items())
                raise ClusterError(f"Not every rank came back: {who}.", "lab.restart()")
            self._recover()

    def _recover(self) -> None:
        """After a failed cell: all ranks on a fresh communicator, so that no half-done message meets the next cell."""
        if not all(info.engine in self.client.ids for info in self.ranks):
            return
        try:
            generation = 1 + max(self.view.apply_async(remote.prepare, self._addresses).get(timeout=10))
            self.view.apply_async(remote.renew_communicator, generation).get(timeout=10)
        except (TimeoutError, FutureTimeout):
            print(
                "labkit: the ranks could not move to a fresh communicator; lab.restart() is safer than going on.",
                file=sys.stderr,
            )

    # ---- watching ----------------------------------------------------------------------------------------------

    @property
    def collector(self) -> Collector:
        """Where the ranks' measurements arrive; opened at the first use, which also tells the ranks where to send."""
        if self._collector is None:
            from labkit.telemetry import Collector

            # One folder a notebook: two that watch the same lab must not take each other's sockets.
            folder = self.session.folder / f"live-{os.getpid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._collector = Collector(self.size, folder)
            endpoints = self._collector.endpoints
            self.view.apply_async(remote.connect_telemetry, endpoints.metrics, endpoints.control).get(timeout=30)
        return self._collector

    def live(self, title: str = "Training") -> Live:
        """A live chart of per-rank loss and step time, with a Stop button and a learning-rate slider."""
        from labkit.charts.live import Live

        if self._live is not None:
            self._live.close()
            self.after_cell.remove(self._live.settle)
        self._live = Live(self.collector, self.size, title=title)
        self.after_cell.append(self._live.settle)
        return self._live

    def facts(self) -> dict[str, list[str]]:
        """What this lab is and what its ranks used so far (data sets, seeds, models), for a report."""
        threads = sorted({info.threads for info in self.ranks})
        found = {
            "ranks": [f"{self.size} × {'/'.join(map(str, threads))} thread{'s' if threads != [1] else ''}"],
            "MPI": [self.session.mpi],
            "hosts": sorted({info.host for info in self.ranks}),
            "devices": sorted({info.device for info in self.ranks}),
        }
        idle = self.running and not (self.last and self.last.pending)
        for used in self.view.apply_async(remote.facts).get(timeout=5) if idle else []:
            for kind, values in used.items():
                known = found.setdefault(kind, [])
                known += [value for value in values if value not in known]
        return found

    # ---- ending ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the ranks and remove everything of this lab from the machine.  A second call does nothing."""
        self._alarm.stop()
        current.leave(self)
        with self.session.ending():
            self._close()
            self.session.remove()

    def _fallen(self, what: str) -> None:
        """The lab ended without having been stopped from here: tell the user at once."""
        print(f"labkit: {what}", file=sys.stderr, flush=True)

    def _close(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = self._live = None
        self.after_cell.clear()
        self._watch.close()
        self.client.close()
        cluster, self._world.cluster = self._world.cluster, None
        if cluster is not None and self.running:
            cluster.stop_cluster_sync()

    def restart(self) -> Lab:
        """Stop, and start again with as many ranks; their variables are lost."""
        self.stop()
        self._world = bring_up(self.size, self.profile, detached=self.session.detached)
        self._alarm = guard.Alarm(self.session, self._fallen)
        self._watch = self._new_watch()
        self.owned = True
        self.last = None
        self.prepare()
        current.become(self)
        return self

    def disconnect(self) -> None:
        """Leave a lab that was joined, without stopping it."""
        self._alarm.stop()
        current.leave(self)
        self.after_cell.clear()
        self._watch.close()
        self.client.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
