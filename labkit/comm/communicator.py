"""The communicator every call runs on by default, and how it is replaced after an interrupt.

A communicator with an abandoned collective must never be used again: the next sum on it can be silently wrong. So
labkit keeps a control communicator on which nothing but duplication happens, and `renew` makes fresh ones from it.
"""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from labkit.comm.agreement import Call, Vote, collective
from labkit.comm.errors import ArgumentError, CommError
from labkit.comm.inbox import Inbox
from labkit.comm.mpi import MPI
from labkit.comm.plain import Plain, real
from labkit.comm.waiting import Wait, until

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
        self, mpi: MPI.Intracomm, private: MPI.Intracomm, name: str, generation: int, members: tuple[int, ...]
    ) -> None:
        self.mpi = mpi
        self.private = private
        """Carries the agreements and what the algorithms send, apart from every message of a user."""
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.name = name
        self.generation = generation
        self.members = members
        self.entry = Vote(private)
        self.confirmation = Vote(private)
        self.calls: dict[Any, Call] = {}
        self.abandoned: str | None = None
        """Why no collective can run here any more."""
        self.log: deque[tuple[int, str]] = deque([(0, "")], maxlen=9)
        """Number and description of the last collectives this rank has entered."""
        self.inbox = Inbox(mpi)
        self.in_flight: set[Any] = set()
        self.sweep_at = 64
        """Unfinished requests: MPI may still touch their memory, so they are kept alive here."""
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
        where = "" if self.name == "world" else f" of '{self.name}'"
        return f"rank {self.rank}{where}, {operation}"

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
        if color is not None and color < 0:
            raise ArgumentError(f"{self.who('split')}: color={color} must be ≥ 0, or None to stay out.")
        made: list[MPI.Intracomm] = []
        call = self.call("split")

        def divide() -> None:
            part = self.mpi.Split(MPI.UNDEFINED if color is None else color, self.rank if key is None else key)
            if part != MPI.COMM_NULL:
                made.extend([Plain(part), Plain(part.Dup())])

        number = next(self._numbers)
        collective(self, call, timeout, divide, atomic=False)
        if not made:
            return None
        return self._child(made[0], made[1], f"{self.name}/split {number} color {color}")

    def dup(self, *, timeout: float | None = None) -> Communicator:
        """A second communicator of the same ranks, whose messages never meet this one's. Collective."""
        made: list[MPI.Intracomm] = []
        number = next(self._numbers)
        collective(self, self.call("dup"), timeout, lambda: made.extend([self.mpi.Dup(), self.mpi.Dup()]), atomic=False)
        return self._child(made[0], made[1], f"{self.name}/dup {number}")

    def _child(self, mpi: MPI.Intracomm, private: MPI.Intracomm, name: str) -> Communicator:
        group, outer = mpi.Get_group(), self.mpi.Get_group()
        inside = MPI.Group.Translate_ranks(group, list(range(mpi.size)), outer)
        return Communicator(mpi, private, name, self.generation, tuple(self.members[rank] for rank in inside))

    def free(self) -> None:
        """Give the communicator's resources back. Collective; the world itself cannot be freed."""
        if self is _state.world:
            raise ArgumentError(f"{self.who('free')}: the world stays; free() is for what split() and dup() made.")

        def release() -> None:
            self.entry.free()
            self.confirmation.free()
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
"""Each gets a communicator of its own of the new world's ranks when `renew` or `adopt` has made one."""


class _State:
    """The world and what it is renewed from."""

    def __init__(self) -> None:
        self.base: Plain | None = None
        self.control: MPI.Intracomm | None = None
        self.world: Communicator | None = None
        self.generation = 0
        self.copying: tuple[MPI.Intracomm, MPI.Request] | None = None
        """A duplication that was started and not finished; an interrupted renewal goes on from here."""
        self.copies: list[MPI.Intracomm] = []
        self.retired: list[Communicator] = []
        """Replaced communicators: never freed, since an abandoned operation may still hold their memory."""


_state = _State()


def world() -> Communicator:
    """The communicator of all ranks. The first call is collective: every rank must make it (or any other call)."""
    if _state.world is None:
        _state.world = _make_world(None)
    return _state.world


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks, without a word to the others."""
    group = _state.world or base()
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
    old = world()
    target = _state.generation + 1 if generation is None else generation
    if target <= _state.generation:
        return old
    while _state.generation < target:
        new = _make_world(timeout, generation=_state.generation + 1)
        _retire(old)
        _state.world, _state.generation = new, new.generation
        old = new
    return old


def base() -> Plain:
    """The communicator that the world is made from: of all ranks that are there, used for nothing else."""
    return _state.base or real


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
    if _state.world is not None:
        _retire(_state.world)
        _state.generation += 1
    if generation is not None:
        _state.generation = generation
    _state.base, _state.control, _state.copying, _state.copies = Plain(mpi), None, None, []
    _state.world = _make_world(None, generation=_state.generation)
    return _state.world


def _make_world(timeout: float | None, generation: int = 0) -> Communicator:
    if _state.control is None:
        _duplicate(base(), 1, timeout)
        _state.control = _state.copies.pop()
    _duplicate(_state.control, 2 + len(followers), timeout)
    data, private, *others = _state.copies
    made = Communicator(data, private, "world", generation, tuple(range(data.size)))
    _state.copies = []
    for follow, copy in zip(followers, others, strict=True):
        follow(copy)
    return made


def _duplicate(source: MPI.Intracomm, copies: int, timeout: float | None) -> None:
    """Duplicate `source` until there are so many copies, by a wait that can be interrupted and taken up again."""
    while len(_state.copies) < copies:
        if _state.copying is None:
            _state.copying = source.Idup()
        new, request = _state.copying
        until(request.Test, _about_duplication, timeout)
        _state.copies.append(new)
        _state.copying = None


def _about_duplication() -> Wait:
    rank = base().rank
    text = "the first call of labkit.comm" if _state.world is None else "comm.renew()"
    return Wait("renew", rank, text=f"{text}, which every rank must make,")


def _retire(old: Communicator) -> None:
    _cancel(old)
    old.abandoned = "it was replaced by renew()"
    _state.retired.append(old)


def _cancel(communicator: Communicator) -> None:
    for request in list(communicator.in_flight):
        request.give_up()


@atexit.register
def _leave() -> None:
    """Before MPI ends: cancel what nobody will send any more. Nothing collective, since other ranks may be gone."""
    if _state.world is not None and not MPI.Is_finalized():
        _cancel(_state.world)
