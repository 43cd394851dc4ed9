"""The communicator every call runs on by default, and how it is replaced after an interrupt.

A communicator with an abandoned collective must never be used again: the next sum on it can be silently wrong. So
labkit keeps a control communicator on which nothing but duplication happens, and `renew` makes fresh ones from it.
"""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from labkit.comm.agreement import Ballot, Call, collective
from labkit.comm.board import Board
from labkit.comm.errors import ArgumentError, CommError
from labkit.comm.inbox import Inbox
from labkit.comm.making import Copies, Making
from labkit.comm.mpi import MPI
from labkit.comm.plain import Plain, real
from labkit.comm.retired import give_back, retire
from labkit.comm.waiting import Wait, until

if TYPE_CHECKING:
    from labkit.comm.hosts import Hosts
    from labkit.comm.windows import Window

__all__ = ["Communicator", "adopt", "base", "communicators", "followers", "renew", "world"]


class Communicator:
    """A group of ranks that talk to each other.

    Attributes
    ----------
    mpi
        The mpi4py communicator that carries labkit's data. Raw calls on it work among themselves; labkit's
        messages carry tags of their own, so a raw ``recv`` does not match a labkit `send`.
    rank, size
        This rank's number within the group, and how many there are.
    name, generation
        For messages; the generation counts `renew` calls.
    members
        The world rank of each rank of the group.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        private: MPI.Intracomm,
        ballot: Ballot,
        name: str,
        generation: int,
        members: tuple[int, ...],
    ) -> None:
        self.mpi = mpi
        self.private = private
        """Carries what the algorithms send, apart from every message of a user."""
        self.ballot = ballot
        self.log: deque[tuple[int, str]] = deque([(0, "")], maxlen=9)
        """Number and description of the last collectives this rank has entered."""
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.name = name
        self.generation = generation
        self.members = members
        self.calls: dict[Any, Call] = {}
        self.abandoned: str | None = None
        """Why no collective can run here any more."""
        self.root: Plain | None = None
        """What it was made from, where ranks had died before (see `labkit.comm.surviving`); nothing is sent there."""
        self.inbox = Inbox(mpi)
        self.in_flight: set[Any] = set()
        self.sweep_at = 64
        """Unfinished requests: MPI may still touch their memory, so they are kept alive here."""
        self.moving: list[Any] = []
        """Likewise memory and request of the message that `send` or `recv` moves at this moment."""
        self.kept: list[Any] = []
        """What MPI may write into while a call is under way, and after it was given up."""
        self.windows: list[Window] = []
        """Memory that its ranks share (see `labkit.comm.windows`)."""
        self.hosts: Hosts | None = None
        """Its ranks by host, where they are on several (see `labkit.comm.hosts`)."""
        self.arranged = isinstance(ballot, Board)
        """Whether that is known: ranks that have a board are on one host."""
        self.status = MPI.Status()
        self._who: dict[str, str] = {}
        self._numbers = itertools.count(1)
        _living.add(self)

    def __repr__(self) -> str:
        return f"<Communicator '{self.name}': rank {self.rank} of {self.size}, generation {self.generation}>"

    @property
    def sequence(self) -> int:
        """How many collectives this rank has entered here; one that is under way counts."""
        return self.log[-1][0]

    @property
    def history(self) -> tuple[str, ...]:
        """The last (at most 8) of them, as a reader would write them."""
        return tuple(text for number, text in tuple(self.log) if number)[-8:]

    def who(self, operation: str) -> str:
        """The start of an error message."""
        who = self._who.get(operation)
        if who is None:
            where = "" if self.name == "world" else f" of '{self.name}'"
            who = self._who[operation] = f"rank {self.rank}{where}, {operation}"
        return who

    def check(self) -> None:
        """Raise `CommError` if the communicator was made before the last `renew`."""
        if self.generation != _state.generation:
            raise CommError(
                f"rank {self.rank}: communicator '{self.name}' was made before the last interrupt and renewal "
                f"(generation {self.generation}, now {_state.generation}). Make it again, with split() or dup()."
            )

    def check_rank(self, rank: Any, operation: str, argument: str) -> None:
        """Raise `ArgumentError` unless `rank` is one of this group."""
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ArgumentError(
                f"{self.who(operation)}: {argument}={rank!r} is no rank of '{self.name}', "
                f"which has ranks 0 to {self.size - 1}."
            )

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Communicator | None:
        """Divide the group: ranks of equal `color` come together, ordered by `key` (default: as they are).

        Collective. Returns None on ranks that give ``color=None``.
        """
        key = self.rank if key is None else key
        for argument, value in (("color", color), ("key", key)):
            if value is not None and not (isinstance(value, int) and abs(value) < 2**31):
                raise ArgumentError(f"{self.who('split')}: {argument}={value!r} must be a whole number below 2³¹.")
        if color is not None and color < 0:
            raise ArgumentError(f"{self.who('split')}: color={color} must be ≥ 0, or None to stay out.")
        number = next(self._numbers)
        parts: list[MPI.Intracomm] = []
        division = starmap(self.mpi.Split, [(MPI.UNDEFINED if color is None else color, key)])
        collective(self, self.call("split"), timeout, parts.extend, (division,))
        part = parts[0] if parts[0] != MPI.COMM_NULL else None
        making = None if part is None else Making(part, part)
        return self._child(self.call("split", "set up"), making, f"{self.name}/split {number} color {color}", timeout)

    def dup(self, *, timeout: float | None = None) -> Communicator:
        """A second communicator of the same ranks, whose messages never meet this one's. Collective."""
        number = next(self._numbers)
        child = self._child(self.call("dup"), Making(self.mpi), f"{self.name}/dup {number}", timeout)
        assert child is not None
        return child

    def _child(self, call: Call, making: Making | None, name: str, timeout: float | None) -> Communicator | None:
        """Finish a communicator of this group's ranks. Collective; without a making this rank is none of them."""

        def finish() -> None:
            if making is not None:
                self.kept.append(making)
                until(making.over, call.about, timeout, lambda: self.ballot.look(call, self.sequence))
                self.kept.remove(making)

        collective(self, call, timeout, finish, atomic=False)
        if making is None:
            return None
        mpi, private = making.made()
        group, outer = mpi.Get_group(), self.mpi.Get_group()
        inside = MPI.Group.Translate_ranks(group, list(range(mpi.size)), outer)
        members = tuple(self.members[rank] for rank in inside)
        return Communicator(mpi, private, making.ballot(), name, self.generation, members)

    def free(self) -> None:
        """Give the communicator's resources back. Collective; the world itself cannot be freed."""
        if self is _state.world:
            raise ArgumentError(f"{self.who('free')}: the world stays; free() is for what split() and dup() made.")

        def release() -> None:
            self.calls.clear()  # some refer to the board
            self.windows = []
            self.ballot.free()
            self.private.Free()
            self.mpi.Free()

        collective(self, self.call("free"), None, release, atomic=False)
        self.abandoned = f"'{self.name}' was freed"
        self.generation = -1

    def call(self, operation: str, *details: Any) -> Call:
        """The description of a collective call without a buffer, from the cache where it was made before."""
        key = (operation, *details)
        call = self.calls.get(key)
        if call is None:
            call = self.remember(key, Call(self, operation, ", ".join(map(str, details))))
        return call

    def remember(self, key: Any, call: Call) -> Call:
        """Keep `call` for the next time the same arguments come."""
        if len(self.calls) >= 4096:
            self.calls.clear()
        self.calls[key] = call
        return call


_living: WeakSet[Communicator] = WeakSet()


def communicators() -> list[Communicator]:
    """Those of this generation that can be used."""
    return [group for group in list(_living) if group.generation == _state.generation]


followers: list[Callable[[MPI.Intracomm], None]] = []
"""Each gets a communicator of its own of the new world's ranks when `renew` or `adopt` makes one. After an interrupt a
follower may be called once more with the same communicator. On all ranks the same."""


class _State:
    """The world and what it is renewed from."""

    def __init__(self) -> None:
        self.base: Plain = real
        self.control: Copies | None = None
        self.making: Making | None = None
        """The world that is being made, or was made last; an interrupted renewal goes on from here."""
        self.world: Communicator | None = None
        self.retired: list[Communicator] = []
        """Replaced communicators that are not freed yet."""

    @property
    def generation(self) -> int:
        """The world's."""
        return 0 if self.world is None else self.world.generation


_state = _State()


def world() -> Communicator:
    """The communicator of all ranks. The first call is collective: every rank must make it (or any other call)."""
    if _state.world is None:
        _advance(0, None)
    assert _state.world is not None
    return _state.world


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks, without a word to the others."""
    group = _state.world or _state.base
    return group.rank, group.size


def known_generation() -> int:
    """Generation of this rank's world, without a word to the others."""
    return _state.generation


def current(group: Communicator | None) -> Communicator:
    """`group` if it can be used, or the world."""
    if group is None:
        return _state.world or world()
    if group.generation != _state.generation:
        group.check()
    return group


def renew(generation: int | None = None, *, timeout: float | None = None) -> Communicator:
    """Move this rank to a fresh world communicator, after an interrupt or a deadline. Collective.

    Everything that was under way is dropped: receives are cancelled, old messages never arrive. Communicators made
    by `Communicator.split` and `Communicator.dup` before refuse to work and must be made again.

    Parameters
    ----------
    generation
        The generation to reach, default the next. Give the same number on every rank if ranks may have been
        renewed unequally often (an interrupted `renew` can be repeated; it goes on where it was).
    timeout
        Seconds to wait for the other ranks.
    """
    target = world().generation + 1 if generation is None else generation
    while world().generation < target:
        _advance(world().generation + 1, timeout)
    return world()


def base() -> Plain:
    """The communicator that the world is made from: of all ranks that are there, used for nothing else."""
    return _state.base


def adopt(mpi: MPI.Intracomm, generation: int | None = None) -> Communicator:
    """Make labkit's world out of another communicator, such as one that lost or gained ranks. Collective on `mpi`.

    Its ranks become the world's ranks, and a new generation begins.

    Parameters
    ----------
    mpi
        The communicator; labkit keeps it and sends nothing on it.
    generation
        Number of the new generation (default: the next). To be given, the same on all ranks, where they may differ.
    """
    _state.base, _state.control, _state.making = Plain(mpi), None, None
    following = 0 if _state.world is None else _state.world.generation + 1
    _advance(following if generation is None else generation, None)
    return world()


def _advance(generation: int, timeout: float | None) -> None:
    """Make the world of that generation, by waits that can be interrupted and taken up again."""
    control = _state.control = _state.control or Copies(_state.base, 1)
    until(control.over, _about_duplication, timeout)
    making = _state.making
    if making is None or making.generation != generation:
        making = _state.making = Making(control.made()[0], None, generation, len(followers))
    until(making.over, _about_duplication, timeout)
    data, private, *others = making.made()
    made = Communicator(data, private, making.ballot(), "world", generation, tuple(range(data.size)))
    if _state.world is not None:
        made.windows = [window for window in _state.world.windows if window.suits(made.rank, made.size)]
    for group in communicators():
        if group is not made:
            retire(group)
            _state.retired.append(group)
    for follow, copy in zip(followers, others, strict=True):
        follow(copy)
    _state.world = made
    _state.retired = [old for old in _state.retired if not give_back(old, generation)]


def _about_duplication() -> Wait:
    text = "the first call of labkit.comm" if _state.world is None else "comm.renew()"
    return Wait("renew", _state.base.rank, text=f"{text}, which every rank must make,")


def _cancel(communicator: Communicator) -> None:
    for request in list(communicator.in_flight):
        request.give_up()


@atexit.register
def _leave() -> None:
    """Before MPI ends: cancel what nobody will send any more. Nothing collective, since other ranks may be gone."""
    if _state.world is not None and not MPI.Is_finalized():
        _cancel(_state.world)
