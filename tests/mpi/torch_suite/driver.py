"""Runs PyTorch's suite on a world of MPI ranks: ``python -m tests.mpi.torch_suite.driver mpi [NAME…]``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from labkit.cluster.implementations import mpiexec_command
from tests.mpi.launch import ROOT

__all__ = ["names", "run"]

RANKS = 3
ORDER = ("hang", "fail", "pass", "skip")
"""Of what the ranks say of a test, the first of these counts."""


def names() -> list[str]:
    """The suite's tests that need no GPU."""
    code = (
        "import os; os.environ.update(BACKEND='mpi', WORLD_SIZE='3')\n"
        "from torch.testing._internal.distributed.distributed_test import DistributedTest as D\n"
        "print(*[n for n in dir(D._DistTestBase) if n.startswith('test_')])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if not any(part in name for part in ("cuda", "gpu", "nccl"))]


def run(
    backend: str, tests: Sequence[str], limit_s: float = 20, total_s: float = 400, ranks: int = RANKS
) -> dict[str, tuple[str, str]]:
    """How each test ended on a world of `ranks`: "pass", "skip", "fail", "hang" or "not run", and why.

    Parameters
    ----------
    backend
        "mpi" or "gloo".
    tests
        Names of the suite's tests.
    limit_s
        Seconds that a call of torch.distributed may wait, and about what a test may last.
    total_s
        Seconds for all of them.
    """
    command, environment = mpiexec_command(ranks)
    deadline = time.monotonic() + total_s
    found: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, todo = Path(folder, "results"), Path(folder, "tests")
        while left := [name for name in tests if name not in found]:
            todo.write_text("\n".join(left))
            program = [sys.executable, "-m", "tests.mpi.torch_suite.on_ranks"]
            try:
                subprocess.run(
                    [*command, *program, backend, str(path), str(limit_s), str(todo)],
                    cwd=ROOT,
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=max(1.0, deadline - time.monotonic()),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                break
            before = len(found)
            found = results(path, ranks)
            if len(found) == before:  # it took the world with it
                found[left[0]] = "hang", "the ranks ended without a word"
                with open(f"{path}.0", "a") as out:
                    print(json.dumps([left[0], *found[left[0]]]), file=out)
        found = results(path, ranks)
    return {name: found.get(name, ("not run", "no time was left")) for name in tests}


def results(path: Path, ranks: int) -> dict[str, tuple[str, str]]:
    """What the ranks have written down."""
    said: dict[str, list[tuple[str, str]]] = {}
    for rank in range(ranks):
        file = Path(f"{path}.{rank}")
        for line in file.read_text().splitlines() if file.exists() else []:
            name, how, why = json.loads(line)
            said.setdefault(name, []).append((how, f"rank {rank}: {why}" if why else ""))
    return {name: min(each, key=lambda one: ORDER.index(one[0])) for name, each in said.items()}


if __name__ == "__main__":
    chosen = sys.argv[2:] or names()
    began = time.monotonic()
    ended = run(sys.argv[1], chosen, total_s=1500)
    for name, (how, why) in sorted(ended.items(), key=lambda item: item[1]):
        print(f"{how:8}{name}   {why.strip().splitlines()[-1][:200] if why.strip() else ''}")
    counts = {how: sum(one == how for one, _ in ended.values()) for how in (*ORDER, "not run")}
    print(counts, f"{time.monotonic() - began:.0f} s")
