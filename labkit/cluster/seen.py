"""What the notebook has seen of each rank at one moment, and how to say it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from labkit.telemetry.states import RankState, Wait

__all__ = [
    "Condition",
    "Seen",
    "awaited",
    "describe",
    "duration",
    "in_words",
    "leaves",
    "missing",
    "peer_of",
    "rank_list",
    "stragglers",
]

Condition = Literal["running", "finished", "failed", "absent", "gone", "stopped", "silent"]

MOST_LINES = 8
"""With more ranks than this, ranks of which the same can be said share a line."""

_PLAIN = {
    "finished": ("has finished the cell", "have finished the cell"),
    "failed": ("has failed and left the cell", "have failed and left the cell"),
    "absent": ("has no part in the cell", "have no part in the cell"),
    "gone": ("is gone: its process has ended", "are gone: their processes have ended"),
    "stopped": ("is stopped (SIGSTOP)", "are stopped (SIGSTOP)"),
    "silent": (
        "does not answer: it is in C code that lets nothing else run",
        "do not answer: they are in C code that lets nothing else run",
    ),
    "unheard": ("has not answered yet", "have not answered yet"),
    "idle": ("has not begun with the cell", "have not begun with the cell"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank at one moment.

    Attributes
    ----------
    condition
        "running": it has not come back from its cell. "finished" and "failed": it is back at its prompt. "absent": it
        has no part in the cell. "gone": its process has ended. "stopped": by SIGSTOP. "silent": it does not answer.
    state
        Its own answer; None where there is none.
    at
        When it was asked, seconds since the epoch.
    """

    condition: Condition
    state: RankState | None = None
    at: float = field(default_factory=time.time)

    @property
    def wait(self) -> Wait | None:
        """What it waits for, if it runs and waits."""
        if self.condition != "running" or self.state is None or self.state.doing != "waiting":
            return None
        return self.state.wait


class Row(NamedTuple):
    """A line about a rank: what it does, where, and for how many seconds. `plain` stands for all of them."""

    what: str
    place: str = ""
    doing: str = ""
    seconds: float = 0.0
    plain: str = ""


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1 and 3", "ranks 0 to 3"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def duration(seconds: float) -> str:
    """Seconds in words: "1.2 s", "34 s", "3 min 20 s"."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def leaves(wait: Wait) -> Iterator[Wait]:
    """The single operations of a wait: itself, or its parts."""
    if wait.kind in ("all", "any") and wait.parts:
        for part in wait.parts:
            yield from leaves(part)
    else:
        yield wait


def peer_of(wait: Wait) -> int | None:
    """World rank of a message's other side; None where any would do or it is not known."""
    if wait.peer_in_world is not None:
        return wait.peer_in_world
    if wait.peer is not None and 0 <= wait.peer < len(wait.members):
        return wait.members[wait.peer]
    return None


def missing(wait: Wait, seen: Mapping[int, Seen]) -> list[int]:
    """Other ranks, by world rank, that have not entered the collective of `wait`; one that is gone counts as such."""
    own = wait.members[wait.rank] if 0 <= wait.rank < len(wait.members) else None

    def entered(rank: int) -> int:
        one = seen.get(rank)
        if one is None or one.state is None or one.condition == "gone":
            return 0
        return one.state.entered.get(wait.communicator, 0)

    return [rank for rank in wait.members if rank != own and entered(rank) < (wait.sequence or 0)]


def awaited(rank: int, wait: Wait, seen: Mapping[int, Seen]) -> list[tuple[int, Wait]]:
    """Whom `rank` waits for, by world rank, each with the operation in which it does."""
    found = []
    for leaf in leaves(wait):
        if leaf.kind == "collective":
            found += [(other, leaf) for other in missing(leaf, seen)]
        elif leaf.kind in ("receive", "send"):
            peer = peer_of(leaf)
            others = [member for member in leaf.members if member != rank] if peer is None else [peer]
            found += [(other, leaf) for other in others]
    return list({(other, leaf.text or leaf.operation): (other, leaf) for other, leaf in found}.values())


def describe(seen: Mapping[int, Seen], now: float | None = None) -> list[str]:
    """What each rank does, in aligned lines such as ``rank 0  recv(src=1, tag=0)   cell line 4   waiting 1.2 s``.

    Parameters
    ----------
    seen
        The ranks, by world rank.
    now
        Seconds since the epoch, default the clock.
    """
    at = time.time() if now is None else now
    rows = [([rank], _row(one, at)) for rank, one in sorted(seen.items())]
    if len(rows) > MOST_LINES:
        rows = _together(rows)
    names = [rank_list(ranks) for ranks, _ in rows]
    columns = [row for _, row in rows if not row.plain]
    name_width = max(map(len, names), default=0)
    what_width = max((len(row.what) for row in columns), default=0)
    place_width = max((len(row.place) for row in columns), default=0)
    lines = []
    for name, (ranks, row) in zip(names, rows, strict=True):
        if row.plain:
            text = _PLAIN[row.plain][len(ranks) > 1]
        else:
            since = f"{row.doing} {duration(row.seconds)}"
            text = f"{row.what:<{what_width}}   {row.place:<{place_width}}   {since}"
        lines.append(f"{name:<{name_width}}  {text}".rstrip())
    return lines


def in_words(rank: int, seen: Mapping[int, Seen], now: float) -> tuple[str, str]:
    """A rank's state in one word, and what more there is to say: where it computes, whom it waits for."""
    one = seen[rank]
    state = one.state
    if one.condition != "running":
        return ("ready" if one.condition in ("finished", "absent") else one.condition), ""
    if state is None:
        return "starting", _PLAIN["unheard"][0]
    if state.doing == "idle":
        return "ready", ""
    row = _row(one, now)
    if state.wait is None:
        return "computing", f"{row.place}, {duration(row.seconds)}"
    others = sorted({other for other, _ in awaited(rank, state.wait, seen)})
    whom = f" for {rank_list(others)}" if others else ""
    return "waiting", f"{row.what}, {row.place}, {duration(row.seconds)}{whom}"


def stragglers(seen: Mapping[int, Seen], now: float | None = None) -> list[str]:
    """Say which ranks are still at work while others wait for them; nobody is stuck then.

    Parameters
    ----------
    seen
        The ranks, by world rank.
    now
        Seconds since the epoch, default the clock.

    Returns
    -------
    list of str
        A sentence for each such rank, such as ``rank 3 is still computing (cell line 5, 12 s); ranks 0 to 2 wait
        for it in barrier()``.
    """
    at = time.time() if now is None else now
    waiting: dict[int, dict[str, list[int]]] = {}
    for rank, one in sorted(seen.items()):
        for other, leaf in awaited(rank, one.wait, seen) if one.wait else ():
            waiting.setdefault(other, {}).setdefault(leaf.text or leaf.operation, []).append(rank)
    sentences = []
    for rank, calls in sorted(waiting.items()):
        manner = _busy(seen.get(rank), at)
        if manner:
            who = [f"{rank_list(ranks)} {'waits' if len(ranks) == 1 else 'wait'}" for ranks in calls.values()]
            waits = [f"{subject} for it in {text}" for subject, text in zip(who, calls, strict=True)]
            sentences.append(f"rank {rank} {manner}; {', '.join(waits)}")
    return sentences


def _busy(one: Seen | None, at: float) -> str:
    if one is None:
        return ""
    if one.condition in ("stopped", "silent"):
        return _PLAIN[one.condition][0]
    state = one.state
    if one.condition != "running" or state is None or state.doing != "computing":
        return ""
    place = f"{state.place}, " if state.place else ""
    return f"is still computing ({place}{duration(at - state.since)})"


def _row(one: Seen, at: float) -> Row:
    if one.condition != "running":
        return Row("", plain=one.condition)
    state = one.state
    if state is None:
        return Row("", plain="unheard")
    if state.doing == "idle":
        return Row("", plain="idle")
    if state.doing == "computing" or state.wait is None:
        return Row("computing", state.place, "for", at - state.since)
    wait = state.wait
    return Row(wait.text or wait.operation, wait.place or state.place, "waiting", at - (wait.since or state.since))


def _together(rows: list[tuple[list[int], Row]]) -> list[tuple[list[int], Row]]:
    """Ranks of which the same is said in one row, with the longest of their times."""
    groups: dict[Row, tuple[list[int], float]] = {}
    for ranks, row in rows:
        same = row._replace(seconds=0.0)
        members, longest = groups.get(same, ([], 0.0))
        groups[same] = (members + ranks, max(longest, row.seconds))
    return [(ranks, row._replace(seconds=seconds)) for row, (ranks, seconds) in groups.items()]
