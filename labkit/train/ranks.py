"""The ranks that split one training's work among them, and the batches they work on together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from labkit.data import Batch, Feed, share

from .replicas import TrainError
from .transport import Alone, MPITransport, Transport

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["CommonFeed", "Ranks", "ranks_of", "whole_feed"]

Ranks: TypeAlias = MPITransport | Alone
"""Those who take part: the ranks of a communicator, or this process alone, without MPI."""


def ranks_of(over: Transport | None, method: str) -> Ranks:
    """Return `over`, which must be labkit's MPI, as the ranks that `method` splits its work over.

    Raises
    ------
    TrainError
        For another transport.
    """
    if over is None:
        return MPITransport()
    if not isinstance(over, MPITransport | Alone):
        raise TrainError(f'method "{method}" runs over labkit\'s MPI alone, not over {over.name}: use --backend mpi')
    return over


def whole_feed(run: Run) -> Feed:
    """Return what hands out, on any rank, the whole batches of R·B samples, for R ranks with batch size B."""
    together = run.batch_size * run.over.size
    whole: Feed = run.dataset.feed(0, 1, together, run.settings.seed, run.device, weights=[1.0])
    return whole


class CommonFeed:
    """Batches on which all ranks work together, though each counts as its own only its share of the samples.

    So losses, right answers and images a second add up over the ranks as they do where each has its own batches.

    Parameters
    ----------
    feed
        Hands out whole batches, the same on all ranks.
    rank, size
        This rank, and how many there are.

    Attributes
    ----------
    whole
        The batch of which this rank's share was handed out last.
    """

    together = True
    missing = 0
    whole: Batch

    def __init__(self, feed: Feed, rank: int, size: int) -> None:
        self._feed, self._rank, self._size = feed, rank, size

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self._feed.steps

    def share(self, n: int) -> slice:
        """Return which of a batch's `n` samples count as this rank's."""
        return slice(*share(n, self._rank, self._size))

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through epoch `number`, beginning with batch `first`: this rank's share of each."""
        for whole in self._feed.epoch(number, first):
            self.whole = whole
            mine = self.share(len(whole.labels))
            yield Batch(whole.images[mine], whole.labels[mine], whole.total)
