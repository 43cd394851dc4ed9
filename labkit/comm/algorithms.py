"""All-reduce, five ways, from nothing but send and receive.

Every rank has an array `x` of N bytes and, at the end, the sum (or product, maximum, …) over all p ranks in its place.
What differs is how many messages follow one another (each costs a latency α) and how many bytes a rank sends (each
costs β): a small array wants few messages, a large one few bytes.

==================  ======================  ===========================  ==========================================
algorithm           messages in a row       bytes a rank sends, at most  good for
==================  ======================  ===========================  ==========================================
to_root             2 (p − 1), at rank 0    (p − 1) N, at rank 0         explaining
tree                2 ⌈log₂ p⌉              ⌈log₂ p⌉ N, at rank 0        few ranks, a root that wants the result
recursive_doubling  log₂ p                  log₂ p · N                   small arrays
ring                2 (p − 1)               2 (p − 1)/p · N              large arrays on few ranks
rabenseifner        2 log₂ p                2 (p − 1)/p · N              large arrays on many ranks
==================  ======================  ===========================  ==========================================

The last three rows for recursive_doubling and rabenseifner hold for p a power of two; else two messages and up to
2 N bytes are added (see `_fold`).

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Performance Computing Applications 19(1), 2005 (tree, recursive doubling, Rabenseifner's algorithm);
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel and
Distributed Computing 69(2), 2009 (ring).

All but the ring combine in rank order, so that ``combine`` need not be commutative: its first argument always comes
from the lower ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

__all__ = ["ALGORITHMS", "Link", "rabenseifner", "recursive_doubling", "ring", "to_root", "tree"]

Vector: TypeAlias = np.ndarray[Any, Any]
"""A flat array; slices of it share its memory."""

Combine: TypeAlias = Callable[..., object]
"""``combine(lower, higher, out=x)`` writes the element-wise result into `x`; numpy's ``np.add`` is one."""


class Link(Protocol):
    """How a rank reaches the others."""

    rank: int
    size: int

    def send(self, x: Vector, dst: int) -> None:
        """Send all of `x` to rank `dst`."""

    def recv(self, x: Vector, src: int) -> None:
        """Fill `x` from rank `src`."""

    def exchange(self, outgoing: Vector, dst: int, incoming: Vector, src: int) -> None:
        """Send `outgoing` to `dst` and fill `incoming` from `src` at the same time."""


def to_root(x: Vector, combine: Combine, link: Link) -> None:
    """Everybody sends to rank 0, which adds up and sends the result to everybody.

    Rank 0 receives p − 1 messages of N bytes and sends as many; the others send and receive one.
    All of it passes through rank 0, one message after the other: the time grows with p.
    """
    if link.rank != 0:
        link.send(x, 0)
        link.recv(x, 0)
        return
    other = np.empty_like(x)
    for rank in range(1, link.size):
        link.recv(other, rank)
        combine(x, other, out=x)
    for rank in range(1, link.size):
        link.send(x, rank)


def tree(x: Vector, combine: Combine, link: Link) -> None:
    """A binomial tree up to rank 0, and the same tree down again.

    In round k, ranks that are odd multiples of 2ᵏ send what they have to the rank 2ᵏ below and are done.
    After ⌈log₂ p⌉ rounds rank 0 has the result, which goes back the same ways in reverse.
    A rank sends at most ⌈log₂ p⌉ messages of N bytes (rank 0, on the way down) and receives as many.
    """
    rank, size = link.rank, link.size
    other = np.empty_like(x)
    distance = 1
    while distance < size:  # up
        if rank & distance:
            link.send(x, rank - distance)
            break
        if rank + distance < size:
            link.recv(other, rank + distance)
            combine(x, other, out=x)
        distance *= 2
    if rank != 0:  # down: from where it was sent to
        link.recv(x, rank - distance)
    distance //= 2
    while distance >= 1:
        if rank + distance < size:
            link.send(x, rank + distance)
        distance //= 2


def recursive_doubling(x: Vector, combine: Combine, link: Link) -> None:
    """In round k each rank swaps all it has with the rank whose number differs in bit k.

    After round k everybody holds the sum over a block of 2ᵏ⁺¹ ranks, so log₂ p rounds do.
    A rank sends log₂ p messages of N bytes: the fewest rounds possible, but every round moves the whole array.
    """
    team = _fold(x, combine, link)
    if team.member is not None:
        other = np.empty_like(x)
        distance = 1
        while distance < team.size:
            partner = team.member ^ distance
            link.exchange(x, team.rank_of(partner), other, team.rank_of(partner))
            if partner < team.member:
                combine(other, x, out=x)
            else:
                combine(x, other, out=x)
            distance *= 2
    _unfold(x, link, team)


def ring(x: Vector, combine: Combine, link: Link) -> None:
    """Cut the array into p parts and let them travel round a ring, twice.

    First round trip (reduce-scatter): each rank passes a part to its right neighbour and adds the part that comes
    from the left to its own; after p − 1 steps rank r holds the finished part r + 1.
    Second round trip (all-gather): the finished parts are passed on until everybody has all.
    A rank sends 2 (p − 1) messages of N/p bytes, 2 (p − 1)/p · N in all, which is the least possible.
    Each part's sum begins at another rank, so `combine` must be commutative.
    """
    rank, size = link.rank, link.size
    right, left = (rank + 1) % size, (rank - 1) % size
    bounds = [len(x) * part // size for part in range(size + 1)]
    parts = [x[bounds[part] : bounds[part + 1]] for part in range(size)]
    other = np.empty(len(x) // size + 1, x.dtype)
    for step in range(size - 1):  # reduce-scatter
        outgoing, incoming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        arrived = other[: len(incoming)]
        link.exchange(outgoing, right, arrived, left)
        combine(arrived, incoming, out=incoming)
    for step in range(size - 1):  # all-gather
        link.exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)


def rabenseifner(x: Vector, combine: Combine, link: Link) -> None:
    """Recursive halving to scatter the sums, recursive doubling to gather them.

    Reduce-scatter: in round k a rank and its partner (bit k) share the piece both still work on: each sends the
    half it gives away and adds the half it keeps. After log₂ p rounds each rank holds 1/p of the array, finished.
    All-gather: the same partners in reverse order give each other what they have finished.
    A rank sends 2 log₂ p messages and (1/2 + 1/4 + … + 1/p) · 2 N = 2 (p − 1)/p · N bytes: as few bytes as the ring,
    in far fewer messages.
    """
    team = _fold(x, combine, link)
    if team.member is not None:
        other = np.empty(len(x) - len(x) // 2, x.dtype)
        low, high = 0, len(x)
        path: list[tuple[int, slice, slice]] = []
        distance = 1
        while distance < team.size:  # reduce-scatter
            partner = team.member ^ distance
            middle = (low + high) // 2
            lower, upper = slice(low, middle), slice(middle, high)
            keep, give = (lower, upper) if team.member < partner else (upper, lower)
            arrived = other[: keep.stop - keep.start]
            link.exchange(x[give], team.rank_of(partner), arrived, team.rank_of(partner))
            if partner < team.member:
                combine(arrived, x[keep], out=x[keep])
            else:
                combine(x[keep], arrived, out=x[keep])
            path.append((team.rank_of(partner), keep, give))
            low, high = keep.start, keep.stop
            distance *= 2
        for rank, keep, give in reversed(path):  # all-gather
            link.exchange(x[keep], rank, x[give], rank)
    _unfold(x, link, team)


class _Team:
    """The largest power of two of ranks, after the others have handed their arrays over."""

    def __init__(self, rank: int, size: int) -> None:
        self.size = 1 << (size.bit_length() - 1)
        self.surplus = size - self.size
        # Of the first 2·surplus ranks each odd one hands over to the even one below; so the order of ranks is kept.
        self.pairs = 2 * self.surplus
        self.member: int | None
        """This rank's number in the team, None if it has handed over."""
        if rank >= self.pairs:
            self.member = rank - self.surplus
        else:
            self.member = None if rank % 2 else rank // 2

    def rank_of(self, member: int) -> int:
        return 2 * member if member < self.surplus else member + self.surplus


def _fold(x: Vector, combine: Combine, link: Link) -> _Team:
    """Make p a power of two: p − 2^⌊log₂ p⌋ ranks send their array to a neighbour and step aside (N bytes)."""
    team = _Team(link.rank, link.size)
    if link.rank < team.pairs:
        if team.member is None:
            link.send(x, link.rank - 1)
        else:
            other = np.empty_like(x)
            link.recv(other, link.rank + 1)
            combine(x, other, out=x)
    return team


def _unfold(x: Vector, link: Link, team: _Team) -> None:
    """Give the result to the ranks that stepped aside (N bytes)."""
    if link.rank < team.pairs:
        if team.member is None:
            link.recv(x, link.rank - 1)
        else:
            link.send(x, link.rank + 1)


ALGORITHMS: dict[str, Callable[[Vector, Combine, Link], None]] = {
    "to_root": to_root,
    "tree": tree,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
}
"""What ``all_reduce(algorithm=…)`` knows beside ``"library"``, MPI's own."""
