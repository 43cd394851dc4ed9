"""Run the part of a benchmark that measures on the ranks of a world of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from labkit.cluster.worlds import running

__all__ = ["measure"]


def measure(module: str, ranks: int, *, quick: bool, limit_s: float, variables: Mapping[str, str] | None = None) -> Any:
    """What rank 0 of ``mpiexec -n RANKS python -m MODULE FILE [--quick]`` writes to FILE as JSON.

    `variables` are added to the ranks' environment. However this call ends, and when this process is killed, its ranks
    end with it.

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
            said, _ = world.communicate(timeout=limit_s)
        if world.returncode != 0:
            raise RuntimeError(f"the benchmark's {ranks} ranks ended with status {world.returncode}:\n{said}")
        return json.load(answer)
