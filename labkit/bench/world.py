"""Run the part of a benchmark that measures on the ranks of a world of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.cluster.implementations import mpiexec_command

__all__ = ["measure"]


def measure(module: str, ranks: int, *, quick: bool, limit_s: float, variables: Mapping[str, str] | None = None) -> Any:
    """What rank 0 of ``mpiexec -n RANKS python -m MODULE FILE [--quick]`` writes to FILE as JSON.

    `variables` are added to the ranks' environment.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    subprocess.TimeoutExpired
        When they take longer than `limit_s` seconds.
    """
    command, environment = mpiexec_command(ranks)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [*command, sys.executable, "-m", module, str(answer), *(["--quick"] if quick else [])],
            env=environment | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the benchmark's {ranks} ranks ended with status {done.returncode}:\n{done.stdout}")
        return json.loads(answer.read_text())
