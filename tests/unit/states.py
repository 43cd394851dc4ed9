"""Ranks made up for tests: what each would answer when asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.cluster.deadlock import Seen, Verdict, verdict
from labkit.telemetry.states import RankState, Wait

NOW = 1000.0
"""The moment at which everything is looked at, in seconds since the epoch."""
WORLD = tuple(range(4))


def receive(
    me: int, src: int | None, tag: int | None = 0, *, on: str = "world", members: Sequence[int] = WORLD, **more: Any
) -> Wait:
    """A receive on rank `me`; ranks are those of the communicator."""
    shown = "any" if src is None else src
    text = f"recv(src={shown}, tag={'any' if tag is None else tag})"
    return _message("recv", "receive", me, src, tag, on, members, text, more)


def send(me: int, dst: int, tag: int = 0, *, on: str = "world", members: Sequence[int] = WORLD, **more: Any) -> Wait:
    """A send on rank `me`."""
    return _message("send", "send", me, dst, tag, on, members, f"send(dst={dst}, tag={tag})", more)


def _message(
    operation: str,
    kind: Any,
    me: int,
    peer: int | None,
    tag: int | None,
    on: str,
    members: Sequence[int],
    text: str,
    more: dict[str, Any],
) -> Wait:
    in_world = None if peer is None else members[peer]
    wait = Wait(operation, me, kind, on, tuple(members), peer, in_world, tag, text=text, since=NOW - 1.2)
    return replace(wait, **more)


def collective(
    me: int,
    operation: str = "barrier",
    number: int = 1,
    *,
    on: str = "world",
    members: Sequence[int] = WORLD,
    signature: str = "",
    since: float = NOW - 1.2,
) -> Wait:
    """A collective on rank `me`, the `number`-th one on its communicator."""
    text = signature or f"{operation}()"
    return Wait(
        operation, me, "collective", on, tuple(members), sequence=number, signature=text, text=text, since=since
    )


def several(kind: Any, *parts: Wait) -> Wait:
    """A wait for all or any of `parts`."""
    return Wait("Waitall" if kind == "all" else "Waitany", 0, kind, parts=parts, text=f"Wait{kind}", since=NOW - 1.2)


def waiting(
    wait: Wait,
    line: int = 1,
    *,
    under_way: Iterable[Wait] = (),
    entered: Mapping[str, int] | None = None,
    history: Mapping[str, tuple[str, ...]] | None = None,
    **more: Any,
) -> Seen:
    """A rank in `wait`. Its own collective counts as entered."""
    counts, calls = dict(entered or {}), dict(history or {})
    if wait.kind == "collective" and wait.sequence:
        counts.setdefault(wait.communicator, wait.sequence)
        calls.setdefault(wait.communicator, (wait.signature,))
    state = RankState(
        rank=wait.rank,
        pid=100,
        doing="waiting",
        serial=7,
        cpu_s=2.0,
        since=wait.since,
        place=f"cell line {line}",
        wait=replace(wait, place=f"cell line {line}"),
        under_way=tuple(under_way),
        entered=counts,
        history=calls,
    )
    return Seen("running", replace(state, **more), at=NOW)


def computing(rank: int, **more: Any) -> Seen:
    """A rank that runs code outside any wait."""
    state = RankState(rank, 100, "computing", cpu_s=2.0, since=NOW - 12.0, place="cell line 5")
    return Seen("running", replace(state, **more), at=NOW)


def over(rank: int, condition: Any = "finished", **more: Any) -> Seen:
    """A rank that has left its cell."""
    state = None if condition == "gone" else replace(RankState(rank, 100, "idle", since=NOW - 1.0), **more)
    return Seen(condition, state, at=NOW)


def earlier(seen: Mapping[int, Seen], by: float = 0.15) -> dict[int, Seen]:
    """The same ranks a moment before, with a little less processor time."""
    return {
        rank: replace(one, at=one.at - by, state=one.state and replace(one.state, cpu_s=one.state.cpu_s - 0.001))
        for rank, one in seen.items()
    }


def judge(seen: Mapping[int, Seen]) -> Verdict | None:
    """The verdict on ranks that stay as they are."""
    return verdict(earlier(seen), seen, at=NOW)


def stuck(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    """The ranks that the verdict names."""
    found = judge(seen)
    return found.ranks if found else ()
