"""A master's sums over the epochs, which its workers enter and leave at different times."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .exchange import Push
from .history import EpochRow
from .recorder import Recorder

__all__ = ["Tallies"]


class Tallies:
    """Adds up what the workers say they did, until an epoch's samples have all been used.

    Epochs end in their order. Where a queue hands the samples out, a quick worker can be through with all of the next
    epoch before a slow one ends its last piece of this.

    Parameters
    ----------
    samples
        Of an epoch.
    recorder
        Tells the time.
    first
        The first epoch's number, from 0.
    """

    def __init__(self, samples: int, recorder: Recorder, first: int = 0) -> None:
        self._next = first
        self._samples = samples
        self._recorder = recorder
        self._open: dict[float, Push] = {}
        self._lost: dict[float, float] = {}
        self._begun = recorder.elapsed

    def add(self, push: Push) -> Iterator[EpochRow]:
        """Add a push's figures; return the rows of the epochs that end by it."""
        if not push.samples:  # its epoch may be closed
            return iter(())
        before = self._open.get(push.epoch)
        self._open[push.epoch] = before.plus(push) if before else push
        return self._finished()

    def lose(self, push: Push) -> Iterator[EpochRow]:
        """Count the samples of a push that was not used; return the rows of the epochs that end by it."""
        if not push.samples:
            return iter(())
        self._open.setdefault(push.epoch, Push(epoch=push.epoch))
        self._lost[push.epoch] = self._lost.get(push.epoch, 0) + push.samples
        return self._finished()

    def rest(self) -> EpochRow | None:
        """Return what was done of epochs that nobody will end, in one row; None when there is nothing."""
        unfinished = [self._open.pop(epoch) for epoch in sorted(self._open)]
        if not unfinished:
            return None
        first, *others = unfinished
        for other in others:
            first = first.plus(other)
        return self._row(first)

    def resume(self) -> None:
        """Begin to time the next epoch: it was interrupted by a test, during which no push was taken."""
        self._begun = self._recorder.elapsed

    def progress(self, epoch: float) -> tuple[int, float]:
        """Return the batches of an open epoch so far and their mean loss, or 0 and NaN."""
        done = self._open.get(epoch, Push())
        return int(done.batches), done.loss / done.samples if done.samples else math.nan

    def _finished(self) -> Iterator[EpochRow]:
        while (done := self._open.get(self._next)) and done.samples + self._lost.get(self._next, 0) >= self._samples:
            del self._open[self._next]
            self._next += 1
            yield self._row(done)

    def _row(self, done: Push) -> EpochRow:
        now = self._recorder.elapsed
        seconds, self._begun = now - self._begun, now
        loss, accuracy = (done.loss / done.samples, done.right / done.samples) if done.samples else (math.nan,) * 2
        return EpochRow(
            epoch=int(done.epoch) + 1,
            steps=int(done.batches),
            loss=loss,
            accuracy=accuracy,
            rank_loss=loss,
            rank_accuracy=accuracy,
            seconds=seconds,
            images_per_s=done.samples / seconds if seconds > 0 else math.nan,
            time_s=now,
        )
