"""The worker: computes on its samples, pushes what came of it, and goes on with the master's answer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.data import Batch, Feed

from .exchange import ASK, DONE, LOST, Answer, Channel, Push
from .flat import FlatGradients
from .loop import Run
from .recorder import Result
from .roles import Role
from .rule import Rule
from .transport import Transport

__all__ = ["Worker"]


class Worker:
    """Trains at its own pace.

    Parameters
    ----------
    run
        This rank's.
    channel
        To the master.
    rule
        What to push, and what an answer does.
    role
        This rank's.
    team
        The ranks of this worker, which step together.
    gradients
        The model's.
    statistics
        What the model counts by itself; pushed along.
    sync_every
        Steps from one push to the next; the epoch's last batch is pushed in any case.
    every_batch
        Push after a batch without samples, too: the master waits for each step.

    Attributes
    ----------
    own
        This rank's sums of loss, right answers and samples by epoch, from 0.
    """

    def __init__(
        self,
        run: Run,
        channel: Channel,
        rule: Rule,
        role: Role,
        team: Transport,
        gradients: FlatGradients,
        statistics: list[Tensor],
        *,
        sync_every: int = 1,
        every_batch: bool = False,
    ) -> None:
        self.run, self.channel, self.rule, self.role, self.team = run, channel, rule, role, team
        self.own: dict[int, Push] = {}
        self._gradients = gradients
        self._out = [*rule.sent, *statistics]
        self._sync_every, self._every_batch = sync_every, every_batch
        self._version = 0.0
        self._pending = Push()
        self._header = torch.zeros(len(Answer()), dtype=torch.float64, device=run.device)

    def train(self, first: int = 0) -> None:
        """Go through all epochs from number `first` on, or until the master says stop; then tell it."""
        feed = self.run.feed or self._queue_feed()
        stop = self.run.history.stopped is not None  # a checkpoint of a run that had reached its target
        for epoch in range(first, first if stop else self.run.settings.epochs):
            self.run.model.train()
            self.run.recorder.begin_epoch(epoch)
            self._pending, self.own[epoch] = Push(epoch=epoch), Push(epoch=epoch)
            for number, (batch, last) in enumerate(with_last(feed.epoch(epoch)), start=1):
                with self.run.recorder.timed_step(batch, self.run.optim) as result:
                    self._compute(batch, result, epoch)
                    due = last or number % self._sync_every == 0
                    if due and (self._pending.samples or self._every_batch):
                        stop = self._exchange(result)
                if stop:
                    break
            self.run.recorder.end_own_epoch()
            if stop:
                break
            self._tell_missing(feed, epoch)
        if self.role.leads:
            self.channel.push(self.role.master, Push(DONE))

    def _queue_feed(self) -> Feed:
        """Return the batches of what the master hands out; the ranks of a worker share each of them."""
        run, team = self.run, self.team
        handed = torch.zeros(1, dtype=torch.int64, device=run.device)

        def ask(epoch: int) -> int | None:
            if self.role.leads:
                piece = self.channel.ask(self.role.master, Push(ASK, epoch=epoch))
                handed[0] = -1 if piece is None else piece
            team.broadcast(handed)
            return None if handed < 0 else int(handed)

        part = team.rank, team.size
        return run.dataset.queue_feed(ask, run.batch_size, run.settings.seed, run.device, part=part)

    def _tell_missing(self, feed: Feed, epoch: int) -> None:
        """Let the master know how many samples of the epoch nobody will push."""
        missing = torch.tensor([feed.missing], dtype=torch.float64, device=self.run.device)
        self.team.all_reduce(missing)
        if self.role.leads and missing:
            self.channel.push(self.role.master, Push(LOST, epoch=epoch, samples=float(missing)))

    def _compute(self, batch: Batch, result: Result, epoch: int) -> None:
        """Leave the worker's mean gradient in the model and let the rule have it."""
        team, samples = self.team, len(batch.labels)
        self._gradients.zero()
        # Alone the mean as it is; in a team sums, since some ranks may have fewer samples, or none.
        result.loss, result.right = self.run.forward_and_backward(batch, weight=1.0 if team.size == 1 else samples)
        mine = Push(loss=result.loss * samples if samples else 0.0, right=result.right, samples=samples, batches=1)
        self.own[epoch] = self.own[epoch].plus(mine)
        sums = torch.tensor(mine[3:], dtype=torch.float64, device=self.run.device)
        team.all_reduce(sums)
        self._gradients.all_reduce(team, "sum")
        loss, right, total, batches = sums.tolist()
        if not total:
            return
        if team.size > 1:
            for buffer in self._gradients.buffers:
                buffer /= total
        self._pending = self._pending.plus(Push(0, 0, 0, loss, right, total, batches / team.size))
        self.rule.local_step()

    def _exchange(self, result: Result) -> bool:
        """Push what is pending and take the answer; return whether to stop."""
        if self.role.leads:
            self.channel.push(self.role.master, self._pending._replace(version=self._version), self._out)
            answer = self.channel.next_answer(self.role.master, self.rule.answered)
            self._header[:] = torch.tensor(answer, dtype=torch.float64)
        for tensor in (self._header, *self.rule.answered):
            self.team.broadcast(tensor)
        self._pending = Push(epoch=self._pending.epoch)
        self.rule.pushed()
        self._version, staleness, stop, rate = self._header.tolist()
        result.staleness = int(staleness)
        return self.run.wishes.obey(stop, rate)


def with_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last; some feeds know that only at the end."""
    before = None
    for batch in batches:
        if before is not None:
            yield before, False
        before = batch
    if before is not None:
        yield before, True


def own_mean(own: Push | None) -> tuple[float, float]:
    """Return a rank's mean loss and share of right answers; NaN without samples."""
    if own is None or not own.samples:
        return math.nan, math.nan
    return own.loss / own.samples, own.right / own.samples
