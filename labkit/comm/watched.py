"""Raw mpi4py, watched: what a plain MPI program waits for is seen, and can be ended.

`install` puts a duplicate of the world behind `MPI.COMM_WORLD` and replaces the methods of mpi4py's classes that can
wait by ones that note the call while it runs. The Python object stays the same one, and so do all classes. A program
that is right runs as before, for less than a microsecond a call. Because the real world lies untouched below, the one
that programs see can be revoked, which ends every call on it, and be replaced by a fresh duplicate.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from labkit.comm.communicator import followers
from labkit.comm.mpi import MPI
from labkit.comm.plain import Plain, real
from labkit.comm.replaced import put, take_back
from labkit.comm.waiting import clock
from labkit.comm.watched_calls import Call, begun, under_way
from labkit.comm.watched_errors import RevokedError, StaleError, overdue
from labkit.comm.watched_groups import Group, begin_world, forget, groups
from labkit.comm.watched_methods import (
    calling,
    elsewhere,
    making,
    starting,
    waiting_for_all,
    waiting_for_any,
    waiting_for_one,
)
from labkit.comm.watched_table import Entry, entries

__all__ = [
    "RevokedError",
    "StaleError",
    "base",
    "break_overdue",
    "entered",
    "install",
    "remove",
    "replace",
    "revoke",
    "under_way",
    "world",
]

NAME = "MPI.COMM_WORLD"
KEPT = 8
"""Replaced worlds that are kept: another Python object, such as ``MPI.Intracomm(comm)``, may have the handle."""
_OF_THE_WORLD = ("TAG_UB", "IO", "HOST", "WTIME_IS_GLOBAL", "UNIVERSE_SIZE", "APPNUM", "LASTUSEDCODE")


class _State:
    installed = False
    copy: Any = None
    """The communicator that stands in for the world."""
    retired: ClassVar[deque[Any]] = deque()


_state = _State()


def base() -> MPI.Intracomm:
    """MPI's own world, below the one that programs see."""
    return real


def world() -> MPI.Intracomm:
    """`MPI.COMM_WORLD`, as programs see it."""
    return MPI.COMM_WORLD


def install() -> None:
    """Watch raw calls from now on. Collective over the world the first time; a second call does nothing.

    After `labkit.comm.renew` or `adopt`, `MPI.COMM_WORLD` is a fresh communicator, too (see `replace`).

    Raises
    ------
    RuntimeError
        Where this Python does not let methods be replaced.
    """
    if _state.installed:
        return
    if _state.copy is None:
        _state.copy = _named(base().Dup())
    _replace_methods()
    _become(_state.copy)
    followers.append(replace)
    _state.installed = True


def remove() -> None:
    """Take the watching away: `MPI.COMM_WORLD` is MPI's own world again. Communicators made meanwhile stay good."""
    if _state.installed:
        followers.remove(replace)
        take_back()
        _write(MPI.COMM_WORLD, base())
        groups.clear()
        begun.clear()
        _state.installed = False


def replace(mpi: MPI.Intracomm) -> None:
    """Let `MPI.COMM_WORLD` be `mpi`, after a recovery, or after ranks were lost or added.

    `mpi` belongs to the world from now on. Communicators made before, and requests on them, can no longer be used: a
    call raises `StaleError`.
    """
    if _state.copy is not None and _state.copy.handle == mpi.handle:
        return  # a recovery that was interrupted goes on
    for handle, group in groups.items():
        group.void = group.void or handle != MPI.COMM_SELF.handle
    old, _state.copy = _state.copy, _named(Plain(mpi))
    if _state.installed:
        _become(_state.copy)
    if old is not None:
        _state.retired.append(old)
    while len(_state.retired) > KEPT:
        oldest = _state.retired.popleft()
        forget(oldest.handle)
        with suppress(MPI.Exception):  # a rank of it may be lost; it is then left as it is
            oldest.Free()


def revoke() -> None:
    """Let every raw call on this rank's communicators fail, here and on their other ranks. For MPIs that can do it."""
    for handle, group in tuple(groups.items()):
        if not group.void and handle != MPI.COMM_SELF.handle:
            with suppress(MPI.Exception):
                communicator = MPI.Comm.fromhandle(handle)
                if not communicator.Is_revoked():
                    communicator.Revoke()


def break_overdue() -> bool:
    """End the raw call that the main thread is in, since its deadline has passed; says whether there is one."""
    record = clock.raw
    if record is None or clock.broken is not None:
        return False
    clock.broken = overdue(record)
    revoke()
    return True


def entered() -> dict[str, tuple[int, tuple[str, ...]]]:
    """How many collectives this rank has entered on each communicator, and the signatures of the last eight."""
    told = {}
    for group in tuple(groups.values()):
        last = () if group.void else tuple(group.history)
        if last:
            told[group.name] = (last[-1][0], tuple(call.signature(kept, group) for _, call, kept in last))
    return told


def _named(comm: Any) -> Any:
    comm.Set_name("MPI_COMM_WORLD")
    return comm


def _become(comm: MPI.Intracomm) -> None:
    _write(MPI.COMM_WORLD, comm)
    begin_world(MPI.COMM_WORLD, NAME)
    mine = MPI.COMM_WORLD.rank
    groups[MPI.COMM_SELF.handle] = Group(f"MPI.COMM_SELF of rank {mine}", 0, (mine,))


def _write(comm: MPI.Comm, other: MPI.Comm) -> None:
    """Let the Python object `comm` hold the handle of `other`."""
    ctypes.memmove(MPI._addressof(comm), MPI._addressof(other), MPI._sizeof(comm))


def _replace_methods() -> None:
    for entry in entries():
        found = vars(entry.owner)[entry.name]
        bound = isinstance(found, classmethod)
        call = Call(entry, found.__func__ if bound else found)
        method = _made(entry)(call)
        put(entry.owner, entry.name, classmethod(method) if bound else method)
    for wait in ("Wait", "wait"):
        one, all_of = vars(MPI.Request)[wait], vars(MPI.Request)[f"{wait}all"].__func__
        put(MPI.Request, wait, waiting_for_one(one, wait))
        put(MPI.Request, f"{wait}all", classmethod(waiting_for_all(all_of, one, f"{wait}all")))
        for name in (f"{wait}any", f"{wait}some"):
            put(MPI.Request, name, classmethod(waiting_for_any(vars(MPI.Request)[name].__func__, name)))
    free = vars(MPI.Comm)["Free"]
    put(MPI.Comm, "Free", _freeing(free, free))
    put(MPI.Comm, "free", _letting_go(vars(MPI.Comm)["free"]))
    put(MPI.Comm, "Disconnect", _freeing(vars(MPI.Comm)["Disconnect"], free))
    put(MPI.Comm, "Abort", _of_the_real_world(vars(MPI.Comm)["Abort"]))
    put(MPI.Comm, "Get_attr", _attribute(vars(MPI.Comm)["Get_attr"]))
    put(MPI.Comm, "__reduce__", _reduced(vars(MPI.Comm)["__reduce__"]))


def _made(entry: Entry) -> Callable[[Call], Callable[..., Any]]:
    if not issubclass(entry.owner, MPI.Comm):
        return elsewhere
    return {"call": calling, "start": starting, "make": making}[entry.way]


def _is_world(comm: MPI.Comm) -> bool:
    return bool(comm.handle == MPI.COMM_WORLD.handle)


def _of_the_real_world(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: MPI.Comm, *args: Any, **kwargs: Any) -> Any:
        return original(base() if _is_world(self) else self, *args, **kwargs)

    return method


def _freeing(original: Callable[..., Any], free: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: MPI.Comm) -> None:
        if _is_world(self):
            free(Plain(base()))  # MPI refuses, as ever; MPICH would let Disconnect end the world
            return
        handle = self.handle
        original(self)
        forget(handle)

    return method


def _letting_go(original: Callable[..., Any]) -> Callable[..., Any]:
    """``free()`` of another Python object for the world makes that object null, and frees nothing."""

    @functools.wraps(original)
    def method(self: MPI.Comm) -> None:
        if _is_world(self) and self is not MPI.COMM_WORLD:
            _write(self, MPI.COMM_NULL)
        else:
            original(self)

    return method


def _attribute(original: Callable[..., Any]) -> Callable[..., Any]:
    """A duplicate lacks some of the attributes that MPI itself gives to the world."""
    predefined = {getattr(MPI, name) for name in _OF_THE_WORLD if hasattr(MPI, name)}

    @functools.wraps(original)
    def method(self: MPI.Comm, keyval: int) -> Any:
        return original(base() if keyval in predefined and _is_world(self) else self, keyval)

    return method


def _reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pickled by name, as ever: the world of whoever reads it."""

    @functools.wraps(original)
    def method(self: MPI.Comm) -> Any:
        if self is MPI.COMM_WORLD:
            return "COMM_WORLD"
        if _is_world(self):
            return copyreg.__newobj__, (type(self), MPI.COMM_WORLD)  # type: ignore[attr-defined]
        return original(self)

    return method
