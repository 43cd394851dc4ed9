"""The lab: ranks that run cells, can be asked how they are, and are stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.cluster import current, guard, healing, remote
from labkit.cluster.bring_up import RankInfo, World, bring_up
from labkit.cluster.cells import rank_list
from labkit.cluster.errors import ClusterError
from labkit.cluster.processes import await_end, send
from labkit.cluster.runner import CellRunner
from labkit.cluster.watch import bring_back

if TYPE_CHECKING:
    from labkit.charts.live import Live
    from labkit.telemetry import Collector

__all__ = ["Lab"]


class Lab(CellRunner):
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
    on_death
        What is done by itself when a rank's process ends: "heal", "shrink", or None: nothing.
    setup
        Cells that a rank runs which is started again, in this order, and the ranks they are for (None: all).
    """

    def __init__(
        self,
        world: World,
        *,
        owned: bool,
        profile: str = "local",
        deadline: float | None = None,
        on_death: str | None = None,
    ) -> None:
        if on_death not in (None, "heal", "shrink"):
            raise ClusterError(f"on_death={on_death!r} is nothing a lab does.", 'on_death="heal", "shrink" or None')
        super().__init__(world, deadline)
        self.owned = owned
        self.profile = profile
        self.on_death = on_death
        self._collector: Collector | None = None
        self._live: Live | None = None
        self._alarm = guard.Alarm(world.session, self._fallen)

    # ---- ranks that are gone -------------------------------------------------------------------------------------

    def heal(self, *, copy: str | Sequence[str] = (), source: int | None = None, timeout: float = 60.0) -> list[int]:
        """Start the ranks again whose processes are gone, under their old numbers; gives these numbers.

        The other ranks keep their variables and get a fresh communicator; what `Communicator.split` and
        `Communicator.dup` made before must be made again. The new ranks run the setup cells (``%%px --setup``).

        Parameters
        ----------
        copy
            Names of variables that a new rank gets from another one: ``copy="model optimizer"``.
        source
            The rank they come from (default: the nearest below that was not gone, or above).
        timeout
            Seconds that the new ranks have to come up.

        Raises
        ------
        ClusterError
            When no rank is left, the MPI cannot do it, ranks are still at work, or the new ones do not come up.
        CellError
            When a setup cell fails on a new rank, or a variable cannot be copied.
        """
        missing = self._gone_and_rest_idle()
        if missing:
            began = time.monotonic()
            healing.respawn(self._world, missing, timeout)
            self._regroup(missing)
            for code, ranks in self.setup:
                self.run(code, [rank for rank in missing if ranks is None or rank in ranks])
            if copy:
                names = copy.replace(",", " ").split() if isinstance(copy, str) else list(copy)
                alive = [info.rank for info in self.ranks if info.rank not in missing]
                near = [rank for rank in alive if rank < missing[0]][-1:] or alive
                origin = near[0] if source is None else source
                self.run(healing.COPY.format(source=origin, targets=missing, names=names), sorted({origin, *missing}))
            took = time.monotonic() - began
            print(f"labkit: {rank_list(missing)} started again, {took:.1f} s", flush=True)
        return missing

    def shrink(self) -> list[int]:
        """Go on without the ranks whose processes are gone; gives their numbers.

        The others are numbered anew, in their old order, and keep their variables (``mpi_rank`` and ``mpi_size`` are
        set anew).

        Raises
        ------
        ClusterError
            When no rank is left, the MPI cannot do it, or ranks are still at work.
        """
        missing = self._gone_and_rest_idle()
        if missing:
            healing.shrink(self._world, missing)
            self._regroup(list(range(self.size)))
            print(f"labkit: without {rank_list(missing)}: {self.size} ranks now", flush=True)
        return missing

    def resume(self, rank: int) -> None:
        """Let a rank go on that was stopped by a signal (SIGSTOP)."""
        process = self._info(rank).process()
        if process is not None:
            send(process, signal.SIGCONT)

    def replace(self, rank: int, **options: Any) -> list[int]:
        """End a rank that is stopped or cannot be freed, and start it again; `options` are those of `heal`."""
        process = self._info(rank).process()
        if process is not None:
            process.kill()
            await_end([process], 5.0)
        if self.last is not None and self.last.pending:  # who was in the middle of a message with it
            bring_back(self.last, self._watch)
        return self.heal(**options)

    def _info(self, rank: int) -> RankInfo:
        if not 0 <= rank < self.size:
            raise ClusterError(f"There is no rank {rank}: this lab has {rank_list(range(self.size))}.")
        return self.ranks[rank]

    def _act_on_death(self) -> None:
        self.heal() if self.on_death == "heal" else self.shrink()

    def _gone_and_rest_idle(self) -> list[int]:
        """Ranks that are gone, once it is sure that no other is at work."""
        if not self.running:
            raise ClusterError("This lab is stopped.", cure="lab.restart(), or labkit.start()")
        missing = healing.gone(self._world)
        busy = [rank for rank in (self.last.pending if self.last else []) if rank not in missing]
        if busy:
            raise ClusterError(
                f"{rank_list(busy).capitalize()} {'is' if len(busy) == 1 else 'are'} still at work on an earlier cell.",
                "lab.interrupt() first",
            )
        self._watch.wardens.settle(info.pid for info in self.ranks if info.rank not in missing)
        return missing

    def _regroup(self, anew: list[int]) -> None:
        """The ranks are other processes or have other numbers: look at those, and let `anew` report again."""
        self._watch.close()
        self._watch = self._new_watch()
        self.last, self._recovery_due = None, False
        self.prepare(30)
        if self._collector is not None:
            endpoints = self._collector.endpoints
            engines = [self.ranks[rank].engine for rank in anew]
            self.client[engines].apply_sync(remote.connect_telemetry, endpoints.metrics, endpoints.control)

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
        idle = self.running and not (self.last and self.last.pending) and not healing.gone(self._world)
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
        self._stop_card()
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
        self._stop_card()
        self._watch.close()
        self.client.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
