"""Run the part of a benchmark that measures on the ranks of a world of its own."""

from __future__ import annotations

import codecs
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from labkit.cluster.worlds import running

__all__ = ["measure"]


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
            _show(world, limit_s)
        if world.returncode != 0:
            raise RuntimeError(f"the benchmark's {ranks} ranks ended with status {world.returncode}, as said above")
        return json.load(answer)


def _show(world: subprocess.Popen[str], limit_s: float) -> None:
    """Pass on what the ranks print until they end.

    No thread does it: a process with several threads that is killed sends its SIGTERM to `tied_to_parent` children for
    each of them, and mpiexec takes the second one for an order to drop everything, its shared memory included.
    """
    assert world.stdout is not None
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a read may end within a character
    deadline = time.monotonic() + limit_s
    while select.select([world.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (said := os.read(world.stdout.fileno(), 65536)):
            world.wait(max(0.0, deadline - time.monotonic()))
            return
        print(decode(said), end="", file=sys.stderr, flush=True)
    raise subprocess.TimeoutExpired(world.args, limit_s)
