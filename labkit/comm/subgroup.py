"""Communicators of some ranks, made by those ranks alone: `Communicator.split` needs all of them.

MPI's own call for that blocks. So the members first wait for each other, by messages whose wait can be interrupted and
named, and only then make it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import starmap

import numpy as np

from labkit.comm.communicator import Communicator, current
from labkit.comm.making import Making
from labkit.comm.mpi import MPI
from labkit.comm.p2p import LARGEST_TAG, recv, send
from labkit.comm.waiting import Wait, until

__all__ = ["communicator_of"]

_TAGS = 1 << 14
"""So many tags, the largest, stand for the names of groups."""


def communicator_of(ranks: Sequence[int], name: str, timeout: float | None = None) -> Communicator:
    """A communicator of the world's `ranks`, in this order. To be called by them and by nobody else.

    Parameters
    ----------
    ranks
        World ranks, this one among them.
    name
        The same on all of them, and another one than for other groups that they make at the same time.
    timeout
        Seconds to wait for each of the other members.

    Raises
    ------
    DeadlineError
        When not all of them come in time.
    """
    world = current(None)
    number = zlib.crc32(name.encode()) % _TAGS
    _meet(world, ranks, LARGEST_TAG - number, timeout)
    group = world.mpi.Get_group().Incl(list(ranks))
    parts: list[MPI.Intracomm] = []
    parts.extend(starmap(world.mpi.Create_group, ((group, number),)))
    group.Free()
    making = Making(parts[0], parts[0])
    world.kept.append(making)  # stays there after an interrupt
    wait = Wait("new_group", world.rank, communicator=name, text=f"new_group(ranks={list(ranks)})")
    until(making.over, lambda: wait, timeout)
    world.kept.remove(making)
    data, private = making.made()
    return Communicator(data, private, making.ballot(), name, world.generation, tuple(ranks))


def _meet(world: Communicator, ranks: Sequence[int], tag: int, timeout: float | None) -> None:
    """Return once all `ranks` are here: the first one hears from each, and then tells them."""
    first, token = ranks[0], np.zeros(1, np.uint8)
    if world.rank != first:
        send(token, first, tag, timeout=timeout)
        recv(token, first, tag, timeout=timeout)
        return
    for rank in ranks[1:]:
        recv(token, rank, tag, timeout=timeout)
    for rank in ranks[1:]:
        send(token, rank, tag, timeout=timeout)
