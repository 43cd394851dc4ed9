"""The communicators that are watched: their names, their ranks in the world, and the collectives this rank entered.

They are known by MPI's handle, so that every Python object with the same handle is the same communicator, and one
that a program drops without freeing it is not forgotten.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, ClassVar

from labkit.comm.mpi import MPI
from labkit.telemetry.states import Wait

__all__ = ["Group", "forget", "groups", "begin_world", "watch", "watch_child"]

HISTORY = 8


class Group:
    """What is known of a watched communicator.

    Attributes
    ----------
    name
        The same on all its ranks; no two communicators of a rank share one.
    members, remote
        World rank of each of its ranks, and of those on the other side of an intercommunicator. -1: not of this world.
    entered, history
        How many collectives this rank has entered here, and the last of them: (number, call, what was kept of its
        arguments).
    void
        Made before the last recovery: nothing can be sent here any more.
    """

    __slots__ = ("entered", "foreign", "history", "members", "name", "rank", "remote", "void")

    def __init__(self, name: str, rank: int, members: tuple[int, ...], remote: tuple[int, ...] | None = None) -> None:
        self.name = name
        self.rank = rank
        self.members = members
        self.remote = remote
        self.foreign = -1 in members or -1 in (remote or ())
        self.entered = 0
        self.history: deque[tuple[int, Any, tuple[Any, ...]]] = deque(maxlen=HISTORY)
        self.void = False

    def wait(self, operation: str, kind: Any, **told: Any) -> Wait:
        """A `Wait` on this communicator. Where ranks of other worlds take part nobody knows who could end it."""
        peer = told.get("peer")
        if peer is not None:
            others = self.members if self.remote is None else self.remote
            told["peer_in_world"] = others[peer] if 0 <= peer < len(others) else None
        members = self.members if self.remote is None else self.members + self.remote
        kind = "other" if self.foreign else kind
        return Wait(operation, self.rank, kind, self.name, members, **told)


groups: dict[int, Group] = {}
"""By handle."""


class _World:
    """The group of the world's ranks, and how often each name was given."""

    group: MPI.Group | None = None
    given: ClassVar[Counter[str]] = Counter()


def begin_world(world: MPI.Comm, name: str) -> None:
    """Watch `world`; its ranks are the world's ranks from now on."""
    if _World.group is not None:
        _World.group.Free()
    _World.group = world.Get_group()
    _World.given.clear()
    groups[world.handle] = Group(name, world.rank, tuple(range(world.size)))


def watch(comm: MPI.Comm, name: str) -> Group:
    """Watch `comm` under a name that is the same on all its ranks."""
    return _add(comm, name, _world_ranks(comm.Get_group()), None)


def watch_child(comm: MPI.Comm, parent: Group, operation: str, sequence: int, told: dict[str, Any]) -> Group:
    """Watch what a constructor gave on this rank.

    Parameters
    ----------
    comm
        The new communicator.
    parent, operation, sequence
        It was made by that operation, the how many-th collective on `parent`.
    told
        The constructor's arguments by name.
    """
    name = f"{parent.name}/{operation} {sequence}"
    if operation in ("Dup", "Dup_with_info", "Clone", "Idup", "Idup_with_info"):
        return _add(comm, name, parent.members, parent.remote)
    remote = _world_ranks(comm.Get_remote_group()) if isinstance(comm, MPI.Intercomm) else None
    members = _world_ranks(comm.Get_group())
    everyone = sorted(members + (remote or ()))
    if operation == "Create_group":
        name = _numbered(f"{parent.name}/Create_group tag {told.get('tag', 0)} of ranks {_listed(members)}")
    elif operation == "Create_intercomm":
        sides = sorted((_listed(members), _listed(remote or ())))
        name = _numbered(f"MPI.Create_intercomm tag {told.get('tag', 0)} of ranks {sides[0]} and {sides[1]}")
    elif operation == "Split":
        name += f" color {told.get('color', 0)}"
    elif len(everyone) < len(parent.members) + len(parent.remote or ()):
        name += f" from rank {everyone[0]}"
    return _add(comm, name, members, remote)


def forget(handle: int) -> None:
    """A communicator was freed."""
    groups.pop(handle, None)


def _add(comm: MPI.Comm, name: str, members: tuple[int, ...], remote: tuple[int, ...] | None) -> Group:
    group = groups[comm.handle] = Group(name, comm.rank, members, remote)
    return group


def _numbered(name: str) -> str:
    """Its members made no other communicator meanwhile that carries these numbers, so they count alike."""
    _World.given[name] += 1
    return name if _World.given[name] == 1 else f"{name} (number {_World.given[name]})"


def _world_ranks(group: MPI.Group) -> tuple[int, ...]:
    inside = MPI.Group.Translate_ranks(group, list(range(group.size)), _World.group)
    group.Free()
    return tuple(-1 if rank == MPI.UNDEFINED else rank for rank in inside)


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, sorted(ranks)))
