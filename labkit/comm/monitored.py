"""A barrier that names the ranks that do not come: all others report to rank 0, and wait for its word."""

from __future__ import annotations

import time

import numpy as np

from labkit.comm.communicator import Communicator
from labkit.comm.errors import DeadlineError
from labkit.comm.p2p import LARGEST_TAG, Request, irecv, recv, send

__all__ = ["monitored_barrier"]

_TAGS = 1 << 14, 1 << 12
"""Tags of these barriers begin so far below the largest, and are so many: one left half done does not meet the next."""


def monitored_barrier(group: Communicator, timeout: float | None, wait_all_ranks: bool, number: int) -> None:
    """Return once every rank of the group has called it.

    Parameters
    ----------
    group, timeout
        Where, and for how many seconds at most.
    wait_all_ranks
        Name all ranks that are missing, not only the first.
    number
        Tells this barrier from others of the group; the same on all ranks.

    Raises
    ------
    DeadlineError
        On rank 0 when ranks are missing, and on each other when rank 0 does not answer.
    """
    tag = LARGEST_TAG - _TAGS[0] - number % _TAGS[1]
    token, limit = np.zeros(1, np.uint8), 0.0 if timeout is None else time.monotonic() + timeout
    milliseconds = "" if timeout is None else f" in {timeout * 1e3:.0f} ms"
    if group.rank != 0:
        try:
            send(token, 0, tag, group=group, timeout=timeout)
            recv(token, 0, tag, group=group, timeout=timeout)
        except DeadlineError as error:
            raise DeadlineError(
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: no answer{milliseconds}. Its own error names the ranks that did not come."
            ) from error
        return
    waiting: dict[int, Request] = {
        rank: irecv(np.zeros(1, np.uint8), rank, tag, group=group) for rank in range(1, group.size)
    }
    missing = []
    for rank, request in waiting.items():
        try:
            request.wait(None if timeout is None else max(limit - time.monotonic(), 0.0))
        except DeadlineError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        for request in waiting.values():
            request.give_up()
        who = ", ".join(map(str, missing))
        raise DeadlineError(
            f"[Rank 0]: Rank{'s' if len(missing) > 1 else ''} {who} failed to pass monitoredBarrier{milliseconds}. "
            "Rank 0 timed out in monitoredBarrier. Let every rank of the group call it, or allow more time."
        )
    for rank in waiting:
        send(token, rank, tag, group=group, timeout=timeout)
