"""Communicators that were replaced: what was under way on them comes to its end, and then they are freed.

A message that nobody will receive any more would keep its memory for ever. Where MPI can revoke a communicator, such
a send ends; without that, it and its communicator are kept as they are.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from labkit.comm.mpi import MPI, REVOKES

if TYPE_CHECKING:
    from labkit.comm.communicator import Communicator

__all__ = ["ended", "give_back", "leave", "retire"]

KEPT = 8
"""A replaced communicator is kept for so many generations: whatever was on its way to this rank has then come."""


def retire(old: Communicator) -> None:
    """End what is under way. To be done by all ranks, none of which may use it any more."""
    for request in list(old.in_flight):
        request.give_up()
    old.abandoned = "it was replaced by renew()"
    old.calls.clear()  # some refer to the board
    old.windows, old.hosts = [], None
    if not old.ballot.drop():
        old.kept.append(old.ballot)
    if REVOKES and (old.in_flight or old.moving):
        for mpi in (old.mpi, old.private):
            with suppress(MPI.Exception):
                if not mpi.Is_revoked():
                    mpi.Revoke()


def give_back(old: Communicator, generation: int) -> bool:
    """Let go of the memory with which MPI has done; free the communicator itself once it is old. Says whether it is.

    Parameters
    ----------
    old
        A communicator that was retired.
    generation
        The world's.
    """
    for request in list(old.in_flight):
        if request.ended():
            old.in_flight.discard(request)
    if all([ended(each) for each in old.moving if isinstance(each, MPI.Request)]):
        old.moving.clear()
    if old.generation > generation - KEPT or old.in_flight or old.moving or old.kept:
        return False
    for mpi in (old.private, old.mpi):
        if mpi != MPI.COMM_NULL:
            with suppress(MPI.Exception):  # a rank of it may be lost; it is then left as it is
                mpi.Free()
    return True


_leaving: list[tuple[Communicator, MPI.Request]] = []


def leave(group: Communicator) -> None:
    """Let go of a communicator that this rank does not use any more, while others perhaps still do.

    It is freed by a later call, when every one of its ranks has left it too.
    """
    if not group.abandoned:
        group.abandoned = f"'{group.name}' was destroyed"
        with suppress(MPI.Exception):
            _leaving.append((group, group.private.Ibarrier()))
    for one in list(_leaving):
        if ended(one[1]):
            _leaving.remove(one)
            retire(one[0])
            give_back(one[0], one[0].generation + KEPT)


def ended(request: MPI.Request) -> bool:
    """Whether MPI has done with a request's memory. One on a revoked communicator fails once it has been ended."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
