"""Processes that take a rank's cores from it, as somebody else's program on the same machine would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from .launched import local_rank

__all__ = ["Busy", "own_cores"]

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
"""Ends by itself within milliseconds when its rank is gone, also after ``kill -9``: it then has another parent."""


def own_cores(cores: Sequence[int], number: int, threads: int) -> list[int]:
    """Return the cores that process number `number` of a host takes for its threads, if all take theirs in turn.

    >>> own_cores([0, 1, 4, 5], 1, 2)
    [4, 5]
    >>> own_cores([0, 1], 2, 1)
    [0]
    """
    return sorted({cores[(number * threads + i) % len(cores)] for i in range(threads)})


class Busy:
    """Processes that compute all the time on this rank's cores, until `close` or until this process ends.

    The rank itself is kept on these cores meanwhile, as many as torch has threads: otherwise the system would move it
    away from the load, or the load to another rank's core.

    Parameters
    ----------
    processes
        On each of these cores.

    Raises
    ------
    RuntimeError
        When they cannot be started.
    """

    def __init__(self, processes: int) -> None:
        self._before = os.sched_getaffinity(0)
        cores = own_cores(sorted(self._before), local_rank(), torch.get_num_threads())
        self._children: list[subprocess.Popen[str]] = []
        try:
            for core in cores * processes:
                self._children.append(_start(core))
            for child in self._children:
                _await_first_word(child)
            _keep_on(set(cores))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes' numbers."""
        return [child.pid for child in self._children]

    def close(self) -> None:
        """End them, and let the rank go where it could before."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.communicate()
        self._children = []
        _keep_on(self._before)


def _start(core: int) -> subprocess.Popen[str]:
    # -I and -S: nothing of the user's is loaded, so it is there within some 20 ms.
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()), str(core)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _await_first_word(child: subprocess.Popen[str]) -> None:
    """Wait until it computes; one that ends instead closes its output, so this cannot hang."""
    assert child.stdout is not None
    said = child.stdout.readline()
    if said != "busy\n":
        raise RuntimeError(f"a process to load this rank's core could not be started: {said}{child.stdout.read()}")


def _keep_on(cores: set[int]) -> None:
    """Keep all threads of this process on `cores`; those that it starts later, too."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)
