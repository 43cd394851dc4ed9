"""The options of the command-line program; see `labkit.train.program`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .launched import launched_rank
from .option_types import batch_size, every, natural, positive, rate, setting, share, slowness

__all__ = ["DATASETS", "DEFAULT_INIT_METHOD", "METHOD_NAMES", "MODEL_NAMES", "UsageError", "parse"]

DEFAULT_INIT_METHOD = "tcp://127.0.0.1:23456"
MODEL_NAMES = ("lenet", "cnn", "dnn", "gru")
METHOD_NAMES = (
    *("averaging", "backup_workers", "downpour", "easgd", "elastic", "gem"),
    *("matrices", "pipeline", "single", "synchronous", "tensor"),
)
DEFAULTS: dict[str, Any] = {
    "batch_size": 128,
    "epochs": 1,
    "learning_rate": 0.001,
    "model": "cnn",
    "momentum": 0.85,
    "optimizer": "adam",
}
_OWN = {"learning_rate": None, "momentum": None, "optimizer": None}
OF_METHOD: dict[str, dict[str, Any]] = {
    "easgd": _OWN | {"epochs": 3},
    "gem": _OWN | {"epochs": 3},
    "matrices": _OWN | {"epochs": 8, "model": "dnn"},
}
"""Defaults of a method that are not those of all; None: what the method's function has."""
DATASETS = ("mnist", "fashion-mnist", "cifar10", "digits", "auto")


class UsageError(Exception):
    """The options do not go together, or not with how the program was started."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and on one rank."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and leave with status 2."""
        if launched_rank() == 0:
            print(f"{self.prog}: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; leaves with status 2 and one line when it is wrong."""
    parser = Parser(
        prog="labkit train",
        description="Train a network on several ranks. Started alone with --world-size N, "
        "it starts N ranks under mpiexec; under mpiexec, it trains on the ranks it finds.",
        epilog="With --backend gloo or nccl it can also be started by hand, once a rank, with --rank R, "
        "--world-size N and --init-method tcp://HOST:PORT.",
    )
    add = parser.add_argument
    add("--backend", choices=("mpi", "gloo", "nccl"), default="mpi", help="what carries the gradients (mpi)")
    add("--batch-size", type=batch_size, metavar="B", help="images of one rank at a step, or auto: as suits (128)")
    add("--epochs", type=positive, metavar="E", help="rounds through the training set (1; easgd, gem: 3; matrices: 8)")
    add("--init-method", default=DEFAULT_INIT_METHOD, metavar="URL", help="where gloo and nccl ranks meet")
    add("--learning-rate", type=rate, metavar="LR", help="step length (0.001; easgd, gem, matrices: their own)")
    add("--method", choices=METHOD_NAMES, default="synchronous", help="how the ranks train together (synchronous)")
    add("--model", choices=MODEL_NAMES, help="the network (cnn; matrices: dnn)")
    add("--momentum", type=share, metavar="M", help="of --optimizer sgd (0.85)")
    add("--no-cuda", action="store_true", help="compute on the CPU even where there is a GPU")
    add("--optimizer", choices=("adam", "sgd"), help="how gradients become steps (adam; easgd, gem, matrices: sgd)")
    add("--rank", type=natural, default=None, metavar="R", help="this rank, when started by hand")
    add("--seed", type=natural, default=0, metavar="S", help="of weights, shuffle and dropout (0)")
    add(
        "--set",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the method, such as sync_every=4; may be given several times",
    )
    add(
        "--slow",
        action="append",
        type=slowness,
        default=[],
        metavar="RANK:HOW",
        help="slow a rank down: 2:3.0 three times as long, 2:pause@50=0.5 stands still for 0.5 s at step 50, "
        "2:pause/50=0.5 every 50 steps, 2:load=1 a process computes on its core; one for each rank",
    )
    add(
        "--sync",
        choices=("per_parameter", "fused", "overlap", "ddp"),
        default="fused",
        help="gradients one by one, all at once, in pieces during backward, or by torch's DistributedDataParallel",
    )
    add("--world-size", type=positive, default=None, metavar="N", help="ranks (1, or what mpiexec started)")
    _add_data(parser)
    _add_around(parser)
    args = parser.parse_args(argv)
    for name, value in (DEFAULTS | OF_METHOD.get(args.method, {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    twice = [rank for rank, count in Counter(rank for rank, _ in args.slow).items() if count > 1]
    if twice:
        parser.error(f"--slow: rank {twice[0]} is given more than once")
    args.slow = dict(args.slow)
    if args.save_history and not args.save_history.absolute().parent.is_dir():
        parser.error(f"--save-history: the folder {args.save_history.absolute().parent} is not there")
    if args.test_files and not args.train_files:
        parser.error("--test-files goes with --train-files")
    return args


def _add_data(parser: argparse.ArgumentParser) -> None:
    """What to train on, and who gets which part of it."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=DATASETS, default="mnist", help="what to train on (mnist)")
    add("--root", type=Path, default=None, metavar="DIR", help="data in torchvision's layout (LABKIT_DATA)")
    add("--size", type=positive, default=None, metavar="N", help="training images to take (all)")
    add(
        "--train-files",
        nargs="+",
        default=None,
        metavar="PATTERN",
        help="train on these files in place of --dataset: IDX, .npz, .h5 or .pt; each rank reads whole files",
    )
    add("--test-files", nargs="+", default=None, metavar="PATTERN", help="test on these")
    add(
        "--queue",
        action="store_true",
        help="the master hands the data out, file by file or 1,000 images at a time: a quicker rank takes more",
    )


def _add_around(parser: argparse.ArgumentParser) -> None:
    """What happens around the steps."""
    add = parser.add_argument_group("tests, checkpoints, records").add_argument
    add(
        "--validate",
        choices=("distributed", "inline", "thread", "never"),
        default=None,
        help="who tests after each epoch: all ranks, rank 0, a thread of rank 0 (as suits the method)",
    )
    add("--target", default=None, metavar="RULE", help="stop when it is reached: 'val_acc,>,0.97'")
    add(
        "--early-stopping",
        default=None,
        metavar="RULE",
        help="stop when it gets no better for 4 epochs: 'val_loss,~<,4'",
    )
    add("--checkpoint", default=None, metavar="DIR", help="keep the latest checkpoint and the best one there")
    add(
        "--checkpoint-every", type=every, default=1, metavar="N", help="epochs between checkpoints, or seconds: 30s (1)"
    )
    add(
        "--restore",
        nargs="?",
        const=True,
        default=False,
        metavar="PATH",
        help="go on from a checkpoint, or without PATH from the one in --checkpoint, if there is one",
    )
    add("--monitor", action="store_true", help="keep each rank's processor time, memory and GPU in the history")
    add("--save-history", type=Path, default=None, metavar="FILE", help="write rank 0's history there as JSON")
