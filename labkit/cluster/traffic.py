"""Whether long messages are under way between ranks that talk by TCP: their communicators must not be revoked then.

By TCP a long message is written into the receiver's memory piece by piece. Open MPI 5.0 frees the memory of a
collective that a revocation ends, also while a message comes in: its next piece overwrites other data, or ends the
process. In shared memory a message is copied at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

from labkit.cluster.processes import stopped

__all__ = ["Traffic"]

QUIET_S, QUIET_BYTES = 0.2, 1 << 16
"""No message is under way when the ranks have read and written no more than so many bytes in this time."""
QUIET_LIMIT_S = 3.0
"""So long is waited for that at most: somebody may send without end."""


class Traffic:
    """What moves between the ranks of a lab.

    Parameters
    ----------
    processes
        The ranks'; None for one that is gone.
    by_tcp
        Whether some of them talk by TCP, as those do that were started again.
    """

    def __init__(self, processes: Iterable[psutil.Process | None], by_tcp: bool) -> None:
        self._processes = [process for process in processes if process is not None]
        self._by_tcp = by_tcp
        self._moved: int | None = None
        self._quiet_since = 0.0

    def allows_revoking(self, waited_s: float) -> bool:
        """Whether communicators can be revoked now, `waited_s` seconds after that was first wanted.

        To be asked again and again. Never beside a stopped rank: messages from and to it cannot come to their end.
        """
        if not self._by_tcp:
            return True
        if any(map(stopped, self._processes)):
            return False
        now, moved = time.monotonic(), sum(map(bytes_moved, self._processes))
        if self._moved is None or abs(moved - self._moved) > QUIET_BYTES:
            self._moved, self._quiet_since = moved, now
        return now > self._quiet_since + QUIET_S or waited_s > QUIET_LIMIT_S


def bytes_moved(process: psutil.Process) -> int:
    """Bytes that a process has read and written since it began, by TCP too; 0 for one that is gone."""
    try:
        counters = process.io_counters()
    except psutil.Error:
        return 0
    return int(counters.read_chars + counters.write_chars)
