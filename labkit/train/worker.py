"""What one rank of the command-line program does."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import distributed

from labkit import comm, data
from labkit.data import DataError, Dataset, Files
from labkit.telemetry import facts

from . import methods
from .device import choose_device
from .history import History
from .launched import launched_local_size, launched_size
from .models import MODELS
from .optimizers import Adam
from .options import DEFAULT_INIT_METHOD, UsageError
from .progress import Progress
from .replicas import TrainError
from .settings import SettingError
from .transport import Alone, MPITransport, TorchTransport, Transport

__all__ = ["method_settings", "rank_line", "run", "times"]

MEET_S = 60
"""How long gloo and nccl ranks wait for each other, s."""


def run(args: argparse.Namespace) -> History:
    """Train as `args` say and print the results; called on every rank.

    Raises
    ------
    UsageError
        On all ranks, when the data or the options cannot be used.
    """
    with _transport(args) as over:
        if "OMP_NUM_THREADS" not in os.environ:
            # More threads than cores would make every rank several times slower.
            here = launched_local_size() or (over.size if args.rank is None else 1)
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
        if over.rank == 0:
            print(_settings(args, over), flush=True)
        dataset = _load(args, over)
        torch.manual_seed(args.seed)
        facts.record("seed", f"{args.seed} (weights)")
        model = MODELS[args.model](dataset.channels, dataset.image_size, len(dataset.classes))
        try:
            history = methods.run(args.method, model, dataset, **method_settings(args, over))
        except (TrainError, SettingError) as error:
            raise UsageError(str(error)) from error
        lines = over.all_gather_object(rank_line(history))
        clocks = over.all_gather_object(os.times()[:4])
        if over.rank == 0:
            real = time.time() - psutil.Process().create_time()
            user = sum(clock[0] + clock[2] for clock in clocks)
            system = sum(clock[1] + clock[3] for clock in clocks)
            print("\n".join([*lines, "", times(real, user, system)]), flush=True)
            if args.save_history:
                history.save(args.save_history)
        return history


def method_settings(args: argparse.Namespace, over: Transport) -> dict[str, Any]:
    """Return what the method is called with.

    Raises
    ------
    UsageError
        For a setting that the method does not have.
    """
    known = list(inspect.signature(methods.METHODS[args.method]).parameters)
    given = {"lr": args.learning_rate, "momentum": args.momentum}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.optimizer == "adam":
        settings["optimizer"] = functools.partial(Adam, **({} if args.learning_rate is None else {"lr": given["lr"]}))
    settings |= {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "seed": args.seed,
        "slow": args.slow,
        "validate": {None: True, "never": False}.get(args.validate, args.validate),
        "target": args.target,
        "early_stopping": args.early_stopping,
        "checkpoint": args.checkpoint,
        "checkpoint_every": args.checkpoint_every,
        "restore": args.restore,
        "monitor": args.monitor,
        "progress": Progress(sys.stderr),
        "device": choose_device(args.no_cuda),
        "over": over,
    }
    settings |= {name: getattr(args, name) for name in ("sync", "backend") if name in known}
    if args.sync != "fused" and "sync" not in known:
        raise UsageError(f"--sync {args.sync} is for --method synchronous, not for {args.method}")
    for name, value in args.set:
        if name not in known[2:]:
            own = ", ".join(name for name in known[2:] if name != "settings") or "none of its own"
            raise UsageError(f"--set {name}: {args.method} has no such setting; there are: {own}")
        settings[name] = value
    return settings


def rank_line(history: History) -> str:
    """Return a rank's result: its own training figures and those of the whole test set."""
    row = history.epochs[-1]
    return (
        f"Rank: {history.rank + 1}/{history.world_size}, "
        f"train loss: {row.rank_loss:.6f}, train acc: {row.rank_accuracy:.2%}, "
        f"test loss: {row.test_loss:.6f}, test acc: {row.test_accuracy:.2%}."
    )


def times(real: float, user: float, system: float) -> str:
    """Return seconds as the shell's ``time`` prints them.

    Examples
    --------
    >>> print(times(66.621, 49.171, 0.515))
    real 1m6.621s
    user 0m49.171s
    sys 0m0.515s
    """
    rows = []
    for name, seconds in (("real", real), ("user", user), ("sys", system)):
        minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
        rows.append(f"{name} {minutes}m{milliseconds / 1000:.3f}s")
    return "\n".join(rows)


def _settings(args: argparse.Namespace, over: Transport) -> str:
    root = args.root or os.environ.get("LABKIT_DATA") or data.cache_folder()
    shown = vars(args) | {"rank": over.rank, "world_size": over.size, "root": str(root)}
    if args.save_history:
        shown["save_history"] = str(args.save_history)
    return repr(argparse.Namespace(**dict(sorted(shown.items()))))


def _data(args: argparse.Namespace) -> Dataset | Files:
    if args.train_files:
        return data.files(args.train_files, args.test_files, queue=args.queue)
    dataset = data.load(args.dataset, root=args.root, size=args.size, seed=args.seed)
    return dataset.queued() if args.queue else dataset


def _load(args: argparse.Namespace, over: Transport) -> Dataset | Files:
    """Load the data on every rank, or fail on every rank."""
    dataset: Dataset | Files | None = None
    problem = None
    try:
        dataset = _data(args)
    except DataError as error:
        problem = str(error)
    problems = over.all_gather_object(problem)
    if dataset is not None and not any(problems):
        return dataset
    ranks = [rank for rank, said in enumerate(problems) if said]
    where = "" if len(ranks) == over.size else f" (on rank {', '.join(map(str, ranks))})"
    raise UsageError("; ".join(dict.fromkeys(said for said in problems if said)) + where)


@contextlib.contextmanager
def _transport(args: argparse.Namespace) -> Iterator[Transport]:
    if args.backend == "mpi":
        # Alone without MPI: Open MPI outside mpiexec leaves a segment in /dev/shm behind.
        yield Alone() if launched_size() is None else MPITransport()
        return
    if launched_size() is None:  # started by hand, once a rank
        rank, size, meeting = args.rank or 0, args.world_size or 1, args.init_method
    else:
        rank, size, meeting = comm.rank, comm.size, _meeting_place(args.init_method)
    if args.backend == "nccl":
        torch.cuda.set_device(choose_device())
    elif "//127.0.0.1" in meeting or "//localhost" in meeting:
        # gloo would look its own host's name up, which not every machine can without a network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        distributed.init_process_group(
            args.backend, init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=MEET_S)
        )
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"rank {rank} of {size} did not meet the others at {meeting}: {reason}") from error
    try:
        yield TorchTransport()
    finally:
        distributed.destroy_process_group()


def _meeting_place(init_method: str) -> str:
    """Return where ranks started by mpiexec meet: what was asked for, else a free port of rank 0's host."""
    if init_method != DEFAULT_INIT_METHOD:
        return init_method
    hosts = comm.all_gather_object(socket.gethostname())
    host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"tcp://{host}:{comm.broadcast_object(port, 0)}"
