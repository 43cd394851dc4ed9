"""What a broken raw call says: more than MPI's "revoked", where more is known."""

from __future__ import annotations

import time
from typing import Any

from labkit.comm.errors import CommError, DeadlineError
from labkit.comm.mpi import MPI
from labkit.comm.waiting import clock, main_frame, place
from labkit.comm.watched_groups import Group
from labkit.telemetry.states import Wait

__all__ = ["RevokedError", "StaleError", "name_it", "overdue", "say_more", "stale", "took_part"]

_REVOKED = getattr(MPI, "ERR_REVOKED", None)
_CLASS = MPI.ERR_COMM if _REVOKED is None else _REVOKED
_BEFORE_ANY_WORD = frozenset(
    {MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_TYPE, MPI.ERR_COMM, MPI.ERR_ROOT, MPI.ERR_OP, MPI.ERR_ARG, MPI.ERR_GROUP}
)
"""Errors in arguments."""


class RevokedError(CommError, MPI.Exception):
    """A raw call was ended, or could not begin, because its communicator was revoked on some rank."""

    def __new__(cls, *_: Any) -> RevokedError:
        """MPI's own exception takes a number only."""
        made: RevokedError = MPI.Exception.__new__(cls, _CLASS)
        return made

    def __init__(self, text: str) -> None:
        MPI.Exception.__init__(self, _CLASS)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[RevokedError], tuple[str]]:
        return type(self), (self.text,)


class StaleError(RevokedError):
    """A communicator, or a request on it, was made before the last recovery and must be made again."""


def say_more(error: MPI.Exception, record: tuple[Any, ...]) -> None:
    """Raise what a program should see instead of `error`; return if that is `error` itself.

    Raises
    ------
    DeadlineError
        When the call was ended because the `deadline` around it has passed.
    StaleError
        When the communicator is from before the last recovery.
    RevokedError
        When it was revoked since.
    """
    group: Group = record[2]
    if isinstance(error, RevokedError):
        return
    revoked = error.Get_error_class() == _REVOKED
    broken, clock.broken = clock.broken, None
    if broken is None and revoked and time.perf_counter() >= clock.deadline:
        broken = overdue(record)  # another rank with the same deadline was a moment quicker
    if broken is not None:
        raise broken from error
    wait: Wait = record[0](record)
    if group.void:
        raise stale(group, wait.text) from error
    if revoked:
        raise RevokedError(
            f"rank {wait.rank}, {wait.text}: communicator '{wait.communicator}' was revoked, because another rank "
            "ended its own call or was freed. It is good again after comm.renew() on every rank."
        ) from error


def overdue(record: tuple[Any, ...]) -> DeadlineError:
    """What the call that the main thread is in should end with, once the deadline around it has passed."""
    wait: Wait = record[0](record)
    waited = (time.perf_counter_ns() - record[1]) * 1e-9
    who = "every rank that it needs" if wait.peer_in_world is None else f"rank {wait.peer_in_world}"
    return DeadlineError(
        f"rank {wait.rank} waited {waited:.2g} s in {wait.text} on communicator '{wait.communicator}' "
        f"({place(main_frame())}) and gave up. Let {who} make the matching call, or allow more time. The call was "
        "ended by revoking the raw communicators of all ranks; MPI.COMM_WORLD is good again after comm.renew() on "
        "every rank."
    )


def name_it(stop: KeyboardInterrupt, record: tuple[Any, ...]) -> None:
    """Let an interrupt say which call it ended."""
    if not stop.args:
        stop.args = (record[0](record).text,)


def stale(group: Group, operation: str) -> StaleError:
    """The error for a call on a communicator that was made before the last recovery."""
    return StaleError(
        f"rank {group.rank}, {operation}: communicator '{group.name}' was made before the last recovery and cannot be "
        "used any more. Make it again from MPI.COMM_WORLD."
    )


def took_part(error: BaseException) -> bool:
    """Whether a collective that failed so had begun: errors in arguments come before."""
    if isinstance(error, MPI.Exception):
        return error.Get_error_class() not in _BEFORE_ANY_WORD
    return not isinstance(error, Exception)
