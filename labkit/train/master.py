"""The master: takes pushes from whoever comes first, applies them, and answers with its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from .exchange import ASK, LOST, TALLY, UPDATE, Answer, Channel, Push
from .history import EpochRow
from .loop import Run
from .rule import Rule
from .tallies import Tallies

__all__ = ["Master"]


class Master:
    """Serves its workers until each has said that it is done.

    Parameters
    ----------
    run
        This rank's.
    channel
        To the workers.
    rule
        How a push changes the weights.
    statistics
        What the model counts by itself; the last push's are kept.
    children
        Ranks of the workers.
    batches
        Of an epoch, for the progress line.

    Attributes
    ----------
    version
        Updates that the weights have seen.
    active
        The workers that are not done.
    """

    def __init__(
        self,
        run: Run,
        channel: Channel,
        rule: Rule,
        statistics: list[Tensor],
        children: Iterable[int],
        batches: int,
    ) -> None:
        self.run, self.channel, self.rule = run, channel, rule
        self.active = set(children)
        self.version = 0
        self._into = [*rule.sent, *statistics]
        self._batches = batches
        self._stop, self._rate = 0.0, math.nan
        self._tallies = Tallies(run.dataset.samples, run.recorder, len(run.history.epochs))
        self._queue = run.dataset.work_queue(run.settings.seed) if run.dataset.by_queue else None

    def serve(self) -> None:
        """Go on until every worker is done."""
        while self.active:
            source, push = self.channel.next_push(self._into)
            if push.kind == UPDATE:
                self.take(source, push)
            elif push.kind in (TALLY, LOST):
                self.count(push, lost=push.kind == LOST)
            elif push.kind == ASK:
                self.hand_out(source, push)
            else:
                self.active.discard(source)
                self.left()
        self.finish()

    def take(self, source: int, push: Push) -> None:
        """Apply an update and answer it."""
        self.ask()
        staleness = self.version - push.version
        if self.rule.answers_first:
            self.answer(source, staleness)
            self.rule.apply()
            self.version += 1
        else:
            self.rule.apply()
            self.version += 1
            self.answer(source, staleness)
        self.count(push)
        self.run.after_update()

    def hand_out(self, source: int, push: Push) -> None:
        """Tell a worker which piece of the data it shall take next."""
        assert self._queue is not None
        self.channel.hand_out(source, self._queue.next(int(push.epoch)))

    def left(self) -> None:
        """A worker is done: the others go on by themselves."""

    def finish(self) -> None:
        """All are done: close an epoch that was stopped on the way."""
        row = self._tallies.rest()
        if row is not None:
            self._close(row)
        self.run.finish()

    def answer(self, worker: int, staleness: float) -> None:
        """Send the weights to `worker`."""
        header = Answer(self.version, staleness, self._stop, self._rate)
        self.channel.answer(worker, header, self.rule.answered)

    def ask(self) -> None:
        """Learn what the notebook asks for; the next answers carry it."""
        self.heed(*self.run.wishes.read())

    def heed(self, stop: float, rate: float) -> None:
        """Keep what is asked for, for the next answers, and for this rank's optimizer."""
        if self.run.wishes.obey(stop, rate) and not self.run.history.stopped:
            self.run.history.stopped = f"stopped from the notebook after update {self.version}"
        # Once said it holds: the workers are told one after the other.
        self._stop, self._rate = max(self._stop, stop), rate

    def count(self, push: Push, lost: bool = False) -> None:
        """Add up what a worker did, or what of it was `lost`; close the epochs that end by it."""
        ended = False
        for row in self._tallies.lose(push) if lost else self._tallies.add(push):
            self._close(row)
            ended = True
        if not ended and self.run.told is not None:
            batches, loss = self._tallies.progress(push.epoch)
            self.run.told.step(int(push.epoch) + 1, self.run.settings.epochs, batches, self._batches, loss)

    def _close(self, row: EpochRow) -> None:
        self.run.validate(row)
        self.run.end_epoch(row)
        self._tallies.resume()
        if self.run.history.stopped:
            self._stop = 1.0
