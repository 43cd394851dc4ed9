"""Run pytest modules on every rank of an MPI world: ``python -m tests.mpi.launch RANKS PATH… [pytest options]``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cluster.implementations import mpiexec_command

ROOT = Path(__file__).resolve().parents[2]


def run(ranks: int, arguments: Sequence[str], limit_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pytest *arguments`` on `ranks` ranks and return what they printed, in rank order.

    The whole world is ended after `limit_s` seconds.
    """
    command, environment = mpiexec_command(ranks)
    options = ["-p", "no:cacheprovider", "-o", "python_files=check_*.py", "--color=no", "-q"]
    program = [sys.executable, "-m", "pytest", *options, *arguments]
    world = subprocess.Popen(
        [*command, *program],
        cwd=ROOT,
        env=environment | {"LABKIT_TEST_WORLD": str(ranks)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = world.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        world.terminate()
        output, _ = world.communicate(timeout=20)
        output += f"\nended after {limit_s:g} s"
    return subprocess.CompletedProcess(world.args, world.returncode, output)


if __name__ == "__main__":
    done = run(int(sys.argv[1]), sys.argv[2:])
    print(done.stdout)
    sys.exit(done.returncode)
