"""What stands in the place of mpi4py's methods: the same call, noted while it runs.

Each has two ways. The quick one is for the main thread on a living communicator that is watched. It is written out
once for every method, with the method's own parameters, because it must stay below a microsecond. The slow one
(`_slowly`) is for everything else: other threads, communicators that nobody watches or that are void.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.comm.mpi import MPI
from labkit.comm.waiting import clock
from labkit.comm.watched_calls import (
    Call,
    about_any,
    about_call,
    about_request,
    begin,
    begun,
    known,
)
from labkit.comm.watched_errors import StaleError, name_it, say_more, stale, took_part
from labkit.comm.watched_groups import groups, watch_child

__all__ = ["calling", "elsewhere", "making", "starting", "waiting_for_all", "waiting_for_any", "waiting_for_one"]

Method = Callable[..., Any]

_now = time.perf_counter_ns
_thread = threading.get_ident
_MAIN = threading.main_thread().ident

_STILL_GOOD = frozenset({"Shrink", "Agree"})
"""What may be called on a communicator that was revoked."""

_QUICK = """
def method(selfHEADS):
    _group = _groups.get(self.handle)
    if _group is None or _thread() != _MAIN or _group.void:
        return _slow(selfPASSED)
COUNT
    _outer = _clock.raw
    _clock.began_ns = _began = _now()
    _clock.raw = _record = (_about_call, _began, _group, _call, ARGUMENTS, _sequence)
    try:
        try:
            return _original(selfPASSED)
        except Exception as _error:
            _failed(_error, _record)
            raise
    except KeyboardInterrupt as _stop:
        _name_it(_stop, _record)
        raise
    finally:
        _clock.raw = _outer
"""
_COUNT = """
    _kept = KEPT
    _group.entered = _sequence = _group.entered + 1
    _group.history.append((_sequence, _call, _kept))
"""
_NO_COUNT = """
    _kept, _sequence = KEPT, None
"""
_NOTHING_KEPT = """
    _sequence = None
"""
_START = """
def method(selfHEADS):
    _group = _groups.get(self.handle)
    if _group is None:
        return _original(selfPASSED)
    if _group.void:
        raise _stale(_group, _call.name)
    _request = _original(selfPASSED)
COUNT
    _begin(_request, _call, _group, _kept, _sequence)
    return _request
"""
"""Names that begin with an underscore cannot be those of a parameter."""


def guarded(record: tuple[Any, ...], original: Method, *args: Any, **kwargs: Any) -> Any:
    """Make the call, and let `record` say what the main thread is in meanwhile.

    Raises
    ------
    KeyboardInterrupt
        With the call as its text, when Ctrl-C came meanwhile. It goes before the error of the broken call.
    """
    outer = clock.raw
    clock.began_ns, clock.raw = record[1], record
    try:
        try:
            return original(*args, **kwargs)
        except MPI.Exception as error:
            say_more(error, record)
            raise
    except KeyboardInterrupt as stop:
        name_it(stop, record)
        raise
    finally:
        clock.raw = outer


def calling(call: Call) -> Method:
    """A method that waits."""
    source = _QUICK.replace("COUNT", _COUNT if call.counted else _NOTHING_KEPT)
    slow = functools.partial(_slowly, call)
    return _written(call, source, _slow=slow, _failed=_failed, _about_call=about_call, _name_it=name_it)


def starting(call: Call) -> Method:
    """A method that begins something and gives a request."""
    source = _START.replace("COUNT", _COUNT if call.counted else _NO_COUNT)
    return _written(call, source, _begin=begin, _stale=stale)


def making(call: Call) -> Method:
    """A method that gives a communicator, or a communicator and a request: the new one is watched, too."""
    made_by = calling(call)

    @functools.wraps(call.original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        parent = groups.get(self.handle)
        made = made_by(self, *args, **kwargs)
        comm = made[0] if isinstance(made, tuple) else made
        if parent is not None and isinstance(comm, MPI.Comm) and comm:
            watch_child(comm, parent, call.name, parent.entered, call.named(call.keep(self, *args, **kwargs)))
        return made

    return method


def elsewhere(call: Call) -> Method:
    """A method of a window, a file or a message: seen, without saying who could end it."""
    original = call.original

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        world = groups.get(MPI.COMM_WORLD.handle)
        if _thread() != _MAIN or world is None:
            return original(self, *args, **kwargs)
        return guarded((about_call, _now(), world, call, args, None), original, self, *args, **kwargs)

    return method


def waiting_for_one(original: Method, name: str) -> Method:
    """`Request.Wait` and `Request.wait`."""

    @functools.wraps(original)
    def method(self: Any, status: Any = None) -> Any:
        one = begun.get(self.handle)
        if one is None or one.request() is not self or _thread() != _MAIN:
            return original(self, status)
        return guarded((about_request, _now(), one.group, one, name), original, self, status)

    return method


def waiting_for_all(original: Method, wait: Method, name: str) -> Method:
    """`Request.Waitall` and `Request.waitall`, by the original `wait` for one request after the other.

    Open MPI calls a request complete on which a thread waits, so it cannot be asked which ones a rank still needs.
    The one whose turn it is surely is missing.
    """

    @functools.wraps(original)
    def method(cls: type, requests: Any, statuses: Any = None) -> Any:
        ours = isinstance(requests, (list, tuple)) and any(
            isinstance(each, MPI.Request) and begun.get(each.handle) is not None for each in requests
        )
        if not ours or _thread() != _MAIN or not all(isinstance(each, MPI.Request) for each in requests):
            return original(cls, requests, statuses)
        if isinstance(statuses, list):
            statuses += [MPI.Status() for _ in range(len(requests) - len(statuses))]
        came: list[Any] = []
        failed: MPI.Exception | None = None
        for number, request in enumerate(requests):
            status = statuses[number] if statuses is not None and number < len(statuses) else None
            one = known(request)
            try:
                if one is None:
                    came.append(wait(request, status))
                else:
                    came.append(guarded((about_request, _now(), one.group, one, name), wait, request, status))
            except MPI.Exception as error:  # MPI, too, goes on with the others
                failed = failed or error
                if status is not None:
                    status.Set_error(error.Get_error_code())
        if failed is not None:
            if isinstance(failed, StaleError):
                raise failed
            raise MPI.Exception(MPI.ERR_IN_STATUS) from failed
        return came if name == "waitall" else True

    return method


def waiting_for_any(original: Method, name: str) -> Method:
    """`Request.Waitany`, `Waitsome` and their like; `original` is the function behind the class method."""

    @functools.wraps(original)
    def method(cls: type, requests: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(requests, (list, tuple)) and all(isinstance(each, MPI.Request) for each in requests)
        group = next((one.group for one in map(known, requests) if one is not None), None) if ours else None
        if group is None or _thread() != _MAIN:
            return original(cls, requests, *args, **kwargs)
        return guarded((about_any, _now(), group, requests, name), original, cls, requests, *args, **kwargs)

    return method


def _written(call: Call, source: str, **space: Any) -> Method:
    passed = call.parameters.passed
    source = source.replace("ARGUMENTS", f"({passed[2:]},)" if passed else "()")
    common = {"_groups": groups, "_clock": clock, "_now": _now, "_thread": _thread, "_MAIN": _MAIN}
    method = call.parameters.written(source, _call=call, _original=call.original, **common, **space)
    return functools.wraps(call.original)(method)


def _slowly(call: Call, self: Any, *args: Any, **kwargs: Any) -> Any:
    group = groups.get(self.handle)
    if group is None:
        return call.original(self, *args, **kwargs)
    if group.void and call.name not in _STILL_GOOD:
        raise stale(group, call.name)
    sequence = None
    if call.counted:
        group.entered = sequence = group.entered + 1
        group.history.append((sequence, call, call.keep(self, *args, **kwargs)))
    try:
        return call.original(self, *args, **kwargs)
    except Exception as error:
        _failed(error, (about_call, _now(), group, call, args, sequence))
        raise


def _failed(error: Exception, record: tuple[Any, ...]) -> None:
    """A call failed: if it was in its arguments, it is none of the communicator's collectives."""
    _, _, group, _, _, sequence = record
    if sequence is not None and group.entered == sequence and not took_part(error):
        group.entered -= 1
        group.history.pop()
    if isinstance(error, MPI.Exception):
        say_more(error, record)
