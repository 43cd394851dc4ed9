"""The ranks of a communicator by host, for reductions that go through memory inside each host and by MPI between them.

Where the hosts have unequally many ranks, as many ranks of each take part between hosts as the smallest host has.
"""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

from labkit.comm.board import Board
from labkit.comm.communicator import Communicator
from labkit.comm.objects import all_gather_object

__all__ = ["Hosts", "arrange", "here"]


class Hosts(NamedTuple):
    """This rank's place in it.

    Attributes
    ----------
    inside
        The ranks of this host.
    across
        The ranks with this rank's number within their hosts, one a host; None where it is none of the owners.
    owners
        How many ranks of each host have a share of the work.
    """

    inside: Communicator
    across: Communicator | None
    owners: int


def here() -> str:
    """This host's name, and which start of it: containers may bear equal names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot} {os.environ.get('SLURMD_NODENAME', '')}"


def arrange(group: Communicator, key: str | None = None) -> Hosts | None:
    """Arrange the ranks of `group` by host; None where that is of no use. Collective.

    The first reduction of a large array, and `shared_zeros`, do so where a communicator has no board.

    Parameters
    ----------
    group
        Keeps the answer.
    key
        What ranks of one host have in common, default `here`.
    """
    group.arranged = True
    keys = all_gather_object(here() if key is None else key, group=group)
    names = list(dict.fromkeys(keys))
    owners = min(keys.count(name) for name in names)
    inside = group.split(names.index(keys[group.rank]))
    assert inside is not None
    across = group.split(inside.rank if inside.rank < owners else None)
    board = inside.ballot
    shared = all_gather_object(isinstance(board, Board) and board.carries_data, group=group)
    useful = 1 < len(names) < group.size and all(shared)
    group.hosts = Hosts(inside, across, owners) if useful else None
    return group.hosts
