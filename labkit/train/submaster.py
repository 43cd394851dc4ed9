"""A master under another: serves its own workers, and is a worker of the one above."""

from __future__ import annotations

from .exchange import DONE, LOST, TALLY, Channel, Push
from .flat_weights import FlatWeights
from .loop import Run
from .master import Master
from .roles import Role
from .rule import Rule

__all__ = ["SubMaster"]


class SubMaster(Master):
    """Applies its workers' pushes to weights of its own; now and then pushes what has changed, and takes the top's.

    The master above adds the change, θ ← θ + (θ_now − θ_last), and answers with the sum of everybody's.

    Parameters
    ----------
    run, channel, rule
        As for `Master`.
    weights
        Of this rank's model.
    role
        This rank's.
    sync_every
        Updates from one push to the next.
    """

    def __init__(
        self, run: Run, channel: Channel, rule: Rule, weights: FlatWeights, role: Role, sync_every: int
    ) -> None:
        super().__init__(run, channel, rule, weights.statistics, role.children, 0)
        self._above = role.master
        self._weights = weights
        self._sync_every = sync_every
        self._updates = 0
        self._version_above = 0.0
        self._pending: dict[float, Push] = {}
        self._last = [buffer.clone() for buffer in weights.buffers]

    def take(self, source: int, push: Push) -> None:
        """Apply an update and answer it; when it is time, go to the master above."""
        super().take(source, push)
        self._updates += 1
        if self._updates % self._sync_every == 0:
            self._report()

    def ask(self) -> None:
        """Do nothing: the master above tells what the notebook asks for."""

    def hand_out(self, source: int, push: Push) -> None:
        """Ask the master above, who knows what is left."""
        self.channel.hand_out(source, self.channel.ask(self._above, push))

    def count(self, push: Push, lost: bool = False) -> None:
        """Keep the figures for the master above; tell it at once what is lost."""
        if lost:
            self.channel.push(self._above, push._replace(kind=LOST))
            return
        before = self._pending.get(push.epoch)
        self._pending[push.epoch] = before.plus(push) if before else push

    def finish(self) -> None:
        """Push what is left, and be done."""
        if self._updates % self._sync_every:
            self._report()
        self.channel.push(self._above, Push(DONE))

    def _report(self) -> None:
        *others, last = self._pending.values()
        self._pending = {}
        for push in others:
            self.channel.push(self._above, push._replace(kind=TALLY))
        change = [now - before for now, before in zip(self._weights.buffers, self._last, strict=True)]
        header = last._replace(version=self._version_above)
        self.channel.push(self._above, header, [*change, *self._weights.statistics])
        answer = self.channel.next_answer(self._above, self._weights.buffers)
        for weight, before in zip(self._weights.buffers, self._last, strict=True):
            before.copy_(weight)
        self._version_above = answer.version
        self.version += int(answer.staleness)  # the others' updates are in these weights, too
        self.heed(answer.stop, answer.rate)
