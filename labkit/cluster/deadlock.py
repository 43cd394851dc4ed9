"""Proving that ranks can never go on, from what every rank says about itself.

Nothing here talks to a rank: states in, a verdict out. A rank *can go on* if it computes, or if something that can
still happen would end its wait. That is the least fixpoint of the rules in `_Snapshot.possible`: begin with the
ranks that compute, and add ranks whose wait one of them could end, until none is added. The rest is stuck for ever.

A rank is slow for many reasons; none of them is a proof. So only a rank that stood in one and the same wait in two
snapshots counts, that got processor time between them, and so looked at what had come for it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from labkit.cluster.cures import Mismatch, cure_for
from labkit.cluster.seen import (
    Condition,
    Seen,
    awaited,
    describe,
    leaves,
    missing,
    peer_of,
    rank_list,
    stragglers,
)
from labkit.telemetry.states import RankState, Wait

__all__ = ["Condition", "Kind", "Seen", "Verdict", "describe", "stragglers", "verdict"]

Kind = Literal["deadlock", "mismatch", "unmatched", "missing"]

OVER = ("finished", "failed", "absent", "gone")

SLOWEST, UNKNOWN_S = 5e6, 60.0
"""Bytes per second that any network moves, and the seconds allowed to a message of unknown size."""

RAW = "MPI."
"""Communicators of plain mpi4py have names that begin so, labkit's own have not."""

SYNCHRONISING = {
    *("barrier", "allreduce", "allgather", "alltoall", "reduce_scatter", "reduce_scatter_block"),
    *("dup", "dup_with_info", "clone", "split", "split_type", "create"),
}
"""Collectives of MPI that end nowhere before all ranks have come. In others some ranks may leave earlier: the root
of a broadcast, or one whose part is empty."""


@dataclass(frozen=True)
class Verdict:
    """Ranks that can never go on, and why.

    Attributes
    ----------
    kind
        "deadlock": they wait for each other. "mismatch": they are in different collectives. "unmatched": a message's
        other side has left the cell. "missing": a rank has left the cell without a collective.
    ranks
        World ranks that are stuck, ascending.
    headline
        Who is stuck, as a sentence.
    lines
        What every rank does, aligned.
    cure
        What to change.
    cycle
        Ranks each of which waits for the next, and the last for the first; empty where there is none.
    edges
        Who waits for whom, in which call: ``(waiting rank, awaited rank, call)``.
    nodes
        What each rank does, in a word: "waiting", "computing", "idle", or its condition.
    """

    kind: Kind
    ranks: tuple[int, ...]
    headline: str
    lines: tuple[str, ...]
    cure: str
    cycle: tuple[int, ...] = ()
    edges: tuple[tuple[int, int, str], ...] = ()
    nodes: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        cycle = f"Cycle {' → '.join(map(str, (*self.cycle, self.cycle[0])))}. " if self.cycle else ""
        return "\n".join([self.headline, *(f"  {line}" for line in self.lines), f"{cycle}{self.cure}"])


def verdict(
    before: Mapping[int, Seen],
    now: Mapping[int, Seen],
    *,
    settled_s: float = 0.3,
    patience_s: float = 1.0,
    at: float | None = None,
) -> Verdict | None:
    """Whether some ranks can never go on.

    Parameters
    ----------
    before, now
        Every rank of the world, twice, at least 0.1 s apart. `before` was complete before `now` was begun.
    settled_s
        How long a rank must have been in its wait. It must also have been in it before the first rank of `before`
        was asked: whatever others sent it before they stopped, it has then had its chance to find.
    patience_s
        For how long a send and a receive that fit count as about to meet, beside the time that their data may take
        (see `SLOWEST`). Two ranks that both wait longer have met before: MPI's ``Sendrecv`` shows only as a whole,
        and one of its sides may be over.
    at
        When `now` was taken, seconds since the epoch; default the clock.

    Returns
    -------
    Verdict or None
        None as long as nothing is proven.
    """
    moment = time.time() if at is None else at
    snapshot = _Snapshot(before, now, settled_s, patience_s, moment)
    stuck = snapshot.stuck()
    mismatch = snapshot.first_mismatch()
    if mismatch is not None:
        stuck |= mismatch.blocked
    if not stuck:
        return None
    edges = _edges(stuck, now, mismatch)
    cycle = () if mismatch is not None else _shortest_cycle(stuck, edges)
    kind = _kind(edges, cycle, mismatch, now)
    everybody = "no rank can go on." if len(stuck) == len(now) else f"{rank_list(sorted(stuck))} cannot go on."
    return Verdict(
        kind=kind,
        ranks=tuple(sorted(stuck)),
        headline=everybody,
        lines=tuple(describe(now, moment)),
        cure=cure_for(sorted(stuck), cycle, edges, mismatch, now),
        cycle=cycle,
        edges=tuple((rank, other, leaf.text or leaf.operation) for rank, other, leaf in edges),
        nodes={
            rank: one.state.doing if one.condition == "running" and one.state else one.condition
            for rank, one in sorted(now.items())
        },
    )


class _Snapshot:
    """Two looks at the ranks, and what follows from them."""

    def __init__(
        self, before: Mapping[int, Seen], now: Mapping[int, Seen], settled_s: float, patience_s: float, moment: float
    ) -> None:
        self.before, self.now = before, now
        self.patience_s, self.moment = patience_s, moment
        begun = min((one.at for one in before.values()), default=moment)
        limit = min(moment - settled_s, begun)
        self.over = {rank for rank in now if self._over_since(rank, limit)}
        self.settled = {rank: wait for rank, one in now.items() if (wait := one.wait) and self._settled(rank, limit)}

    def _over_since(self, rank: int, limit: float) -> bool:
        """Whether it has left the cell, and had so when the first look began: its own account is then up to date."""
        now, before = self.now[rank], self.before.get(rank)
        if now.condition not in OVER or before is None or before.condition != now.condition:
            return False
        if now.condition == "gone":
            return True
        return now.state is not None and now.state.doing == "idle" and now.state.since <= limit

    def _settled(self, rank: int, limit: float) -> bool:
        before, state = self.before.get(rank), self.now[rank].state
        if before is None or before.wait is None or before.state is None or state is None or state.wait is None:
            return False
        same = (before.state.pid, before.state.serial) == (state.pid, state.serial)
        return same and state.cpu_s > before.state.cpu_s and (state.wait.since or state.since) <= limit

    def stuck(self) -> set[int]:
        """The settled ranks that no rank can help."""
        can = {rank for rank in self.now if rank not in self.over and rank not in self.settled}
        grown = True
        while grown:
            helped = {rank for rank, wait in self.settled.items() if rank not in can and self.possible(rank, wait, can)}
            grown = bool(helped)
            can |= helped
        return set(self.settled) - can

    def possible(self, rank: int, wait: Wait, can: set[int]) -> bool:
        """Whether `wait` can end, given the ranks that can go on."""
        if wait.kind in ("all", "any") and wait.parts:
            return (all if wait.kind == "all" else any)(self.possible(rank, part, can) for part in wait.parts)
        if wait.kind == "collective" and wait.members and wait.sequence:
            return self._complete(wait, can)
        if wait.kind in ("receive", "send"):
            peer = peer_of(wait)
            if peer is None and (wait.peer is not None or not wait.members):
                return True  # a peer that is not known could be any rank
            others = wait.members if peer is None else (peer,)
            return any(self._helps(other, rank, wait, can) for other in others)
        return True

    def _helps(self, other: int, rank: int, wait: Wait, can: set[int]) -> bool:
        if other not in self.now or (other in can and other != rank):
            return True
        return any(
            _meet(wait, rank, offer, other) and not self._stale(rank, wait, other, offer)
            for offer in self._offers(other)
        )

    def _stale(self, rank: int, wait: Wait, other: int, offer: Wait) -> bool:
        """Whether these two ends have been there for so long that they would have met."""
        if other not in self.settled and other not in self.over:
            return False
        begun = max(one.state.since for one in (self.now[rank], self.now[other]) if one.state is not None)
        return self.moment - begun > self.patience_s + _slowest_s(wait, offer)

    def _offers(self, rank: int) -> list[Wait]:
        """Sends and receives that `rank` has begun and that may not be over.

        One that ended between the two looks counts: the other side may have been asked before it ended.
        """
        begun: list[Wait] = []
        for one in (self.before.get(rank), self.now[rank]):
            if one is not None and one.state is not None and one.condition != "gone":
                begun += one.state.under_way
                begun += leaves(one.wait) if one.wait else ()
        return begun

    def _complete(self, wait: Wait, can: set[int]) -> bool:
        absent = missing(wait, self.now)
        if not absent:
            return not (_raw(wait) and len(set(self._calls(wait).values())) > 1)
        ready = [other in can or other not in self.now for other in absent]
        return all(ready) if _synchronising(wait) else any(ready)

    def _calls(self, wait: Wait) -> dict[int, str]:
        """Which collective each member made at this place, as far as it is known."""
        calls = {}
        for rank in wait.members:
            one = self.now.get(rank)
            if one is not None and one.state is not None and wait.sequence:
                calls[rank] = _signature(one.state, wait.communicator, wait.sequence)
        return {rank: call for rank, call in calls.items() if call}

    def first_mismatch(self) -> Mismatch | None:
        """The first place on a communicator where a stuck rank and another one are in different collectives.

        labkit's own collectives find that out by themselves as soon as all ranks have come, so theirs counts only
        where some rank never comes.
        """
        stuck = self.stuck()
        found: dict[tuple[str, int], Mismatch] = {}
        for rank, wait in sorted(self.settled.items()):
            for leaf in leaves(wait):
                if leaf.kind != "collective" or not leaf.sequence or not (_raw(leaf) or rank in stuck):
                    continue
                calls = self._calls(leaf)
                if rank in calls and len(set(calls.values())) > 1:
                    place = (leaf.communicator, leaf.sequence)
                    blocked = found[place].blocked | {rank} if place in found else {rank}
                    found[place] = Mismatch(leaf.communicator, leaf.sequence, calls, blocked)
        return found[min(found, key=lambda place: (place[1], place[0]))] if found else None


def _slowest_s(*ends: Wait) -> float:
    """How long a message may take at worst."""
    sizes = [end.count * _itemsize(end.dtype) for end in ends if end.count is not None]
    return max(sizes) / SLOWEST if sizes else UNKNOWN_S


def _itemsize(dtype: str | None) -> int:
    bits = "".join(filter(str.isdigit, dtype or ""))
    return max(1, int(bits) // 8) if bits else 16


def _raw(wait: Wait) -> bool:
    return wait.communicator.startswith(RAW)


def _synchronising(wait: Wait) -> bool:
    name = wait.operation.lower().removesuffix("_init")
    return not _raw(wait) or name in SYNCHRONISING or name.removeprefix("i") in SYNCHRONISING


def _signature(state: RankState, communicator: str, sequence: int) -> str:
    history = state.history.get(communicator, ())
    back = state.entered.get(communicator, 0) - sequence
    return history[-1 - back] if 0 <= back < len(history) else ""


def _meet(one: Wait, one_rank: int, other: Wait, other_rank: int) -> bool:
    """Whether `one` and `other` are the two ends of one message."""
    if {one.kind, other.kind} != {"send", "receive"} or one.communicator != other.communicator:
        return False
    send, sender, receive, receiver = one, one_rank, other, other_rank
    if one.kind == "receive":
        send, sender, receive, receiver = other, other_rank, one, one_rank
    target, source = peer_of(send), peer_of(receive)
    return (
        (target is None or target == receiver)
        and (source is None or source == sender)
        and (send.tag is None or receive.tag is None or send.tag == receive.tag)
    )


def _edges(stuck: set[int], now: Mapping[int, Seen], mismatch: Mismatch | None) -> list[tuple[int, int, Wait]]:
    edges = []
    for rank in sorted(stuck):
        wait = now[rank].wait
        assert wait is not None
        found = awaited(rank, wait, now)
        if mismatch is not None and rank in mismatch.blocked:
            own = mismatch.calls[rank]
            there = next(leaf for leaf in leaves(wait) if mismatch.is_of(leaf))
            found += [(other, there) for other, call in sorted(mismatch.calls.items()) if call != own]
        edges += [(rank, other, leaf) for other, leaf in found]
    return edges


def _shortest_cycle(stuck: set[int], edges: list[tuple[int, int, Wait]]) -> tuple[int, ...]:
    following: dict[int, list[int]] = {}
    for rank, other, _ in edges:
        if other in stuck:
            following.setdefault(rank, []).append(other)
    best: tuple[int, ...] = ()
    for start in sorted(stuck):
        ways: list[tuple[int, ...]] = [(start,)]
        reached = {start}
        while ways and (not best or len(ways[0]) < len(best)):
            way = ways.pop(0)
            for other in following.get(way[-1], []):
                if other == start:
                    best, ways = way, []
                    break
                if other not in reached:
                    reached.add(other)
                    ways.append((*way, other))
    return best


def _kind(
    edges: list[tuple[int, int, Wait]], cycle: tuple[int, ...], mismatch: Mismatch | None, now: Mapping[int, Seen]
) -> Kind:
    if mismatch is not None:
        return "mismatch"
    if cycle:
        return "deadlock"
    left = [leaf for _, other, leaf in edges if other in now and now[other].condition in OVER]
    return "missing" if left and left[0].kind == "collective" else "unmatched"
