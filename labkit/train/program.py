"""The command-line program: ``labkit train``, or ``mpiexec -n 4 python -m labkit.train``.

It prints its settings, trains, and prints one line a rank and the times as the shell's ``time`` does, summed
over the ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence

from .launched import launched_rank, launched_size
from .options import UsageError, parse

__all__ = ["Relaunch", "main"]

Relaunch = Callable[[int, list[str]], int]
"""Starts ``python -m labkit.train`` on so many ranks, with these options, and returns its exit status."""

RELAUNCHED = "LABKIT_TRAIN_RELAUNCHED"


def main(argv: Sequence[str] | None = None, relaunch: Relaunch | None = None) -> int:
    """Run the program.

    Parameters
    ----------
    argv
        Options; default: the command line's.
    relaunch
        Starts the program under mpiexec; default: the ``labkit`` command does it.

    Returns
    -------
    int
        Exit status: 0; 1 when training failed; 2 for options or data that cannot be used.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    try:
        _check_start(args)
        if args.rank is not None or launched_size() is not None or args.world_size in (None, 1):
            return _on_rank(args)
        return _start_ranks(args.world_size, argv, relaunch)
    except UsageError as error:
        if launched_rank() == 0:
            print(f"labkit train: {error}", file=sys.stderr, flush=True)
        return 2


def _check_start(args: argparse.Namespace) -> None:
    """Refuse options that don't go with each other or with how the program was started, before any work."""
    started = launched_size()
    if args.rank is not None:
        if args.backend == "mpi":
            raise UsageError("--rank is for --backend gloo or nccl started by hand; under MPI, mpiexec gives the ranks")
        if started is not None:
            raise UsageError("--rank cannot be given under mpiexec, which gives the ranks")
        if args.rank >= (args.world_size or 1):
            raise UsageError(f"--rank {args.rank} is not below --world-size {args.world_size or 1}")
    if started is not None and args.world_size not in (None, started):
        raise UsageError(
            f"--world-size {args.world_size}, but mpiexec started {started} "
            f"rank{'s' if started != 1 else ''}: leave it out, or give the same to both"
        )
    if started is None and os.environ.get(RELAUNCHED):
        raise UsageError("mpiexec started this rank, but it does not say so: use Open MPI, MPICH or Intel MPI")
    if args.backend == "nccl":
        import torch

        if args.no_cuda or not torch.cuda.is_available():
            why = "--no-cuda was given" if args.no_cuda else "there is none here"
            raise UsageError(f"--backend nccl needs an NVIDIA GPU, and {why}: use --backend mpi or gloo")


def _start_ranks(ranks: int, argv: list[str], relaunch: Relaunch | None) -> int:
    if relaunch is None:  # the labkit command knows how to start this machine's MPI
        return subprocess.call([sys.executable, "-m", "labkit.cli", "train", *argv])
    # Should a launcher not tell its ranks that they are ranks, each would start others, without end.
    os.environ[RELAUNCHED] = "1"
    try:
        return relaunch(ranks, argv)
    finally:
        del os.environ[RELAUNCHED]


def _on_rank(args: argparse.Namespace) -> int:
    """Train on this rank; whatever goes wrong here must not leave the others waiting."""
    from .worker import run

    try:
        run(args)
        return 0
    except UsageError:  # the same on all ranks
        raise
    except KeyboardInterrupt:
        print("labkit train: interrupted", file=sys.stderr, flush=True)
        status = 130
    except Exception:  # not swallowed: shown here, and it ends the whole world with status 1
        traceback.print_exc()
        status = 1
    if (launched_size() or 1) > 1:
        from labkit.comm.mpi import MPI

        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(status)
    return status
