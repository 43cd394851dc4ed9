"""The ranks of a lab, to be looked at: who they are, what each does at this moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from labkit.cluster import remote
from labkit.cluster.bring_up import RankInfo, World
from labkit.cluster.card import RankStatus, card_html, card_text
from labkit.cluster.live_card import LiveCard
from labkit.cluster.seen import Seen, in_words
from labkit.cluster.sessions import Session
from labkit.cluster.stacks import Stacks
from labkit.cluster.wardens import Wardens, socket_path
from labkit.cluster.watch import Watch

if TYPE_CHECKING:
    from labkit.cluster.cells import Cell
    from labkit.cluster.guard import Alarm

__all__ = ["Ranks"]


class Ranks:
    """The ranks of one MPI world.  As the last line of a cell it shows itself as a card.

    Attributes
    ----------
    last
        The last cell that ran: `lab.last.text(rank, "stdout")`.
    """

    _alarm: Alarm

    def __init__(self, world: World) -> None:
        self._world = world
        self._watch = self._new_watch()
        self.last: Cell | None = None
        self._card: LiveCard | None = None

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
        return self._rows(self.seen() if self.running else {})

    def _rows(self, seen: dict[int, Seen]) -> list[RankStatus]:
        now, rows = time.time(), []
        for info in self.ranks:
            one, process = seen.get(info.rank), info.process()
            memory = process.memory_info().rss if one and process and one.condition != "gone" else None
            state, doing = ("gone", "") if one is None else in_words(info.rank, seen, now)
            rows.append(RankStatus(info.rank, info.host, info.pid, info.device, info.threads, memory, state, doing))
        return rows

    def watch(self) -> LiveCard:
        """Show a card that follows the ranks, twice a second, until the lab ends or another one is shown.

        It shows what each rank computes or waits for also while they are blocked, and while a cell runs.
        """
        self._stop_card()
        watch = self._new_watch()

        def look(done: bool) -> str | None:
            nonlocal watch
            if done or not self.running:
                watch.close()
                return None
            if watch.ranks is not self.ranks:  # some were started again
                watch.close()
                watch = self._new_watch()
            cell = self.last
            return card_html(self._title(), self._rows(watch.seen(cell if cell and cell.pending else None)))

        self._card = LiveCard(look)
        return self._card

    def _stop_card(self) -> None:
        if self._card is not None:
            self._card.close()
            self._card = None

    def _title(self) -> str:
        state = "" if self.running else " (stopped)"
        return f"labkit: {self.size} rank{'s' if self.size > 1 else ''} · {self.session.mpi}{state}"

    def __repr__(self) -> str:
        return card_text(self._title(), self.status())

    def _repr_html_(self) -> str:
        return card_html(self._title(), self.status())

    def prepare(self, timeout: float | None = None) -> None:
        """Let the ranks make their communicator while the user looks at the card; the first cell comes after it.

        Parameters
        ----------
        timeout
            Seconds to wait for it at most; None: it is not waited for.
        """
        prepared = self.view.apply_async(remote.prepare, self._addresses)
        if timeout is not None:
            prepared.get(timeout=timeout)

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
