"""What a rank is doing: the answer it gives while its main thread computes, waits, or does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["RankState", "Wait"]

Kind = Literal["receive", "send", "collective", "all", "any", "other"]
Doing = Literal["idle", "computing", "waiting"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank is waiting for. `peer` and `tag` are None for collectives and where any would do.

    Attributes
    ----------
    operation
        The call's name: ``recv``, ``all_reduce``; raw mpi4py keeps its own: ``Recv``, ``Allreduce``.
    kind
        "receive" (from `peer`, or from any), "send" (to `peer`), "collective"; "all" or "any" of `parts`; "other" is
        seen but says nothing about who could end it.
    rank, peer
        Ranks within the communicator.
    communicator
        Its name: the same on all its ranks, and no two communicators of a rank share one.
    members
        World rank of each rank of the communicator.
    sequence
        For collectives: the how many-th one on that communicator it is, from 1.
    signature
        For collectives: what must be the same on all ranks, as a reader would write it, such as
        ``Bcast(root=0, float32 × 100)``.
    parts
        For "all" and "any" (a send and a receive at once, several requests): those parts that are not over yet.
    count, dtype
        Number of elements and their type, where known.
    since
        Seconds since the epoch.
    place
        The user's line: ``file.py:12`` or ``cell line 4``.
    text
        The call as a reader would write it, such as ``recv(src=1, tag=0)``.
    """

    operation: str
    rank: int
    kind: Kind = "other"
    communicator: str = "world"
    members: tuple[int, ...] = ()
    peer: int | None = None
    peer_in_world: int | None = None
    tag: int | None = None
    sequence: int | None = None
    signature: str = ""
    parts: tuple[Wait, ...] = ()
    count: int | None = None
    dtype: str | None = None
    since: float = 0.0
    place: str = ""
    text: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Wait:
        """The inverse of `dataclasses.asdict`, from JSON's lists."""
        parts = tuple(cls.from_json(part) for part in values["parts"])
        return cls(**{**values, "members": tuple(values["members"]), "parts": parts})


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's own answer to "what are you doing?".

    Attributes
    ----------
    rank
        Rank in the world.
    doing
        "idle" (at its prompt), "computing" (running code outside any wait) or "waiting".
    cell
        How many cells it has begun.
    serial
        Another number for every wait: two answers with the same one are of the same wait. 0 outside waits.
    cpu_s
        CPU time of the main thread, in seconds: it grows while a wait polls.
    since
        When it began to do so, seconds since the epoch.
    place
        The user's line at which the main thread is.
    wait
        What it waits for, if it does.
    under_way
        Sends and receives that it has begun without waiting and that are not over.
    entered
        How many collectives it has entered on each communicator, by the communicator's name.
    history
        The signatures of its last collectives on each communicator; the last entry is number ``entered[name]``.
    bears
        Whether it goes on when another rank dies now.
    without
        World ranks that have died and that it has gone on without.
    """

    rank: int
    pid: int
    doing: Doing = "idle"
    cell: int = 0
    serial: int = 0
    cpu_s: float = 0.0
    since: float = 0.0
    place: str = ""
    wait: Wait | None = None
    under_way: tuple[Wait, ...] = ()
    entered: dict[str, int] = field(default_factory=dict)
    history: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bears: bool = False
    without: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankState:
        """The inverse of `as_json`."""
        return cls(
            **{
                **values,
                "wait": None if values["wait"] is None else Wait.from_json(values["wait"]),
                "under_way": tuple(Wait.from_json(part) for part in values["under_way"]),
                "history": {name: tuple(signatures) for name, signatures in values["history"].items()},
                "without": tuple(values["without"]),
            }
        )
