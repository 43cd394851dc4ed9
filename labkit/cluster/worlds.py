"""An MPI world that is started for one program, such as a benchmark, and that ends with the process that started it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence

import psutil

from labkit.cluster.implementations import mpiexec_command
from labkit.cluster.probe import mapped_segments
from labkit.cluster.processes import await_end, marked, send, tied_to_parent
from labkit.cluster.sessions import remove_unmapped

__all__ = ["running"]

MARK = "LABKIT_WORLD"
"""Environment variable by which a world's processes are found, whoever their parent is by now."""
GRACE_S = 5.0
"""How long mpiexec has to end its ranks and to remove their shared memory."""


@contextlib.contextmanager
def running(
    ranks: int, program: Sequence[str], variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start `program` on `ranks` ranks; when the ``with`` block is left, nothing of them is left either.

    They also end when this process is killed, where util-linux' ``setpriv`` is there. Signals to this process's group,
    such as Ctrl-C, reach this process alone: mpiexec gets one request to end, and does so in order.

    Parameters
    ----------
    ranks
        World size.
    program
        Command line of a rank.
    variables
        Added to the ranks' environment.

    Yields
    ------
    subprocess.Popen
        mpiexec; its ``stdout`` is a pipe with all that the ranks print.

    Raises
    ------
    MPINotFoundError
        When there is no MPI launcher.
    """
    command, environment = mpiexec_command(ranks)
    mark = uuid.uuid4().hex
    world = subprocess.Popen(
        [*tied_to_parent(), *command, *program],
        env=environment | dict(variables or {}) | {MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield world
    finally:
        _end(world, mark)
        if world.stdout is not None:
            world.stdout.close()


def _end(world: subprocess.Popen[str], mark: str) -> None:
    """End what still runs, and remove the shared memory that it had."""
    segments = _segments(marked(MARK, mark))
    if world.poll() is None:
        world.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            world.wait(GRACE_S)
    # What mpiexec did not end: it was killed itself, or does not answer.
    while left := marked(MARK, mark):
        segments |= _segments(left)
        for process in left:
            send(process, signal.SIGKILL)
        if not await_end(left, GRACE_S):
            break  # not even SIGKILL ends a process that waits for a dead disk
    world.poll()
    remove_unmapped(segments)


def _segments(processes: Sequence[psutil.Process]) -> set[str]:
    """Shared-memory files that they have mapped."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it ended by now
            found.update(mapped_segments(process.pid))
    return found
