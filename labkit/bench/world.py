"""Run the part of a benchmark that measures on the ranks of a world of its own."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from labkit.cluster.worlds import running

__all__ = ["measure"]

LAST_LINES_S = 5.0
"""How long to wait for the ranks' last lines, should a process that they left behind keep their output open."""


def measure(module: str, ranks: int, *, quick: bool, limit_s: float, variables: Mapping[str, str] | None = None) -> Any:
    """What rank 0 of ``mpiexec -n RANKS python -m MODULE FILE [--quick]`` writes to FILE as JSON.

    `variables` are added to the ranks' environment. What the ranks print, such as their progress, goes to stderr as it
    comes. However this call ends, and when this process is killed, its ranks end with it.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    subprocess.TimeoutExpired
        When they take longer than `limit_s` seconds.
    """
    # The answer comes in memory that has a name only here: nothing is left on disk, however this ends.
    with open(os.memfd_create("labkit-answer"), encoding="utf-8") as answer:
        path = f"/proc/{os.getpid()}/fd/{answer.fileno()}"
        program = [sys.executable, "-m", module, path, *(["--quick"] if quick else [])]
        with running(ranks, program, variables) as world:
            showing = threading.Thread(target=_show, args=(world.stdout,), daemon=True)
            showing.start()
            world.wait(limit_s)
            showing.join(LAST_LINES_S)
        if world.returncode != 0:
            raise RuntimeError(f"the benchmark's {ranks} ranks ended with status {world.returncode}, as said above")
        return json.load(answer)


def _show(lines: IO[str]) -> None:
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
