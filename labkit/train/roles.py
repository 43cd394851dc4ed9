"""Who is a master and who a worker, and who talks to whom."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.data import share

from .replicas import TrainError

__all__ = ["Role", "assign"]


@dataclass(frozen=True)
class Role:
    """What one rank does.

    Attributes
    ----------
    worker
        Number of the worker that this rank belongs to, or -1: it is a master.
    workers
        How many workers there are.
    master
        Rank of the master above; -1 for the topmost.
    children
        The ranks that talk to this master; of a worker none.
    place
        Its number among the ranks that compute, or -1.
    leads
        Whether it talks to the master for its worker.
    """

    worker: int
    workers: int
    master: int
    children: tuple[int, ...]
    place: int
    leads: bool

    @property
    def top(self) -> bool:
        """Whether this is the topmost master."""
        return self.master < 0


def assign(method: str, rank: int, size: int, masters: int = 1, ranks_per_worker: int = 1) -> Role:
    """Return the role of `rank` among `size` ranks.

    Rank 0 is the master and the others are workers. With several masters rank 0 stands above them: each of the
    others has a stretch of ranks, itself the first of them, and its workers the rest.

    Parameters
    ----------
    method
        Its name, for the error.
    rank, size
        This rank, and how many there are.
    masters
        1, or how many there are under the topmost.
    ranks_per_worker
        Ranks that share each worker's batch.

    Raises
    ------
    TrainError
        When there are too few ranks, or they do not divide into workers.

    Examples
    --------
    >>> [assign("downpour", rank, 4).children for rank in range(4)]
    [(1, 2, 3), (), (), ()]
    >>> [assign("downpour", rank, 7, masters=2).children for rank in range(7)]
    [(1, 4), (2, 3), (), (), (5, 6), (), ()]
    """
    each = ranks_per_worker
    above = 1 if masters == 1 else 1 + masters
    least = above + masters * each
    if size < least:
        raise TrainError(
            f"{method} needs at least {least} ranks ({above} to be master{'s' if above > 1 else ''}), and there "
            f"{'are' if size > 1 else 'is'} {size}: start more, for example labkit.start(ranks={least}), "
            + ("or ask for fewer masters or ranks_per_worker" if least > 2 else 'or train with "single"')
        )
    if (size - above) % each:
        raise TrainError(
            f"{size - above} of the {size} ranks compute, which does not divide into workers of "
            f"ranks_per_worker={each}: start {size - (size - above) % each} ranks, or choose another number"
        )
    workers = (size - above) // each
    leads: dict[int, range] = {}  # the first rank of each worker, by the rank of its master
    following = above - masters  # 1 where rank 0 stands above the masters
    for number in range(masters):
        first, last = share(workers, number, masters)
        head, following = following, following + 1 + (last - first) * each
        leads[head] = range(head + 1, following, each)
    if rank in leads:
        return Role(-1, workers, 0 if masters > 1 else -1, tuple(leads[rank]), -1, True)
    if rank == 0:
        return Role(-1, workers, -1, tuple(leads), -1, True)
    passed = [head for head in leads if head < rank]
    place = rank - len(passed) - (masters > 1)
    return Role(place // each, workers, passed[-1], (), place, place % each == 0)
