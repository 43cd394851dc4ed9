"""The options of the command-line program; see `labkit.train.program`."""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import slow
from .launched import launched_rank
from .slow import Slowness

__all__ = ["DATASETS", "DEFAULT_INIT_METHOD", "METHOD_NAMES", "MODEL_NAMES", "UsageError", "parse"]

DEFAULT_INIT_METHOD = "tcp://127.0.0.1:23456"
MODEL_NAMES = ("lenet", "cnn", "dnn", "gru")
METHOD_NAMES = (
    *("averaging", "backup_workers", "downpour", "easgd", "elastic", "gem"),
    *("matrices", "pipeline", "single", "synchronous", "tensor"),
)
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
    add("--batch-size", type=positive, default=128, metavar="B", help="images of one rank at a step (128)")
    add("--dataset", choices=DATASETS, default="mnist", help="what to train on (mnist)")
    add("--epochs", type=positive, default=1, metavar="E", help="rounds through the training set (1)")
    add("--init-method", default=DEFAULT_INIT_METHOD, metavar="URL", help="where gloo and nccl ranks meet")
    add("--learning-rate", type=rate, default=0.001, metavar="LR", help="step length (0.001)")
    add("--method", choices=METHOD_NAMES, default="synchronous", help="how the ranks train together (synchronous)")
    add("--model", choices=MODEL_NAMES, default="cnn", help="the network (cnn)")
    add("--momentum", type=share, default=0.85, metavar="M", help="of --optimizer sgd (0.85)")
    add("--no-cuda", action="store_true", help="compute on the CPU even where there is a GPU")
    add("--optimizer", choices=("adam", "sgd"), default="adam", help="how gradients become steps (adam)")
    add("--rank", type=natural, default=None, metavar="R", help="this rank, when started by hand")
    add("--root", type=Path, default=None, metavar="DIR", help="data in torchvision's layout (LABKIT_DATA)")
    add("--save-history", type=Path, default=None, metavar="FILE", help="write rank 0's history there as JSON")
    add("--seed", type=natural, default=0, metavar="S", help="of weights, shuffle and dropout (0)")
    add(
        "--set",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the method, such as sync_every=4; may be given several times",
    )
    add("--size", type=positive, default=None, metavar="N", help="training images to take (all)")
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
    args = parser.parse_args(argv)
    twice = [rank for rank, count in Counter(rank for rank, _ in args.slow).items() if count > 1]
    if twice:
        parser.error(f"--slow: rank {twice[0]} is given more than once")
    args.slow = dict(args.slow)
    if args.save_history and not args.save_history.absolute().parent.is_dir():
        parser.error(f"--save-history: the folder {args.save_history.absolute().parent} is not there")
    return args


def setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, the value as Python writes it; what is no such value is taken for text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as sync_every=4")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def slowness(text: str) -> tuple[int, Slowness]:
    """Read RANK:HOW."""
    try:
        return slow.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _number(kind: type[int] | type[float], holds: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


positive = _number(int, lambda n: n >= 1, "a whole number of at least 1")
natural = _number(int, lambda n: n >= 0, "a whole number of at least 0")
rate = _number(float, lambda x: math.isfinite(x) and x > 0, "a number above 0")
share = _number(float, lambda x: 0 <= x < 1, "a number from 0 up to, but not including, 1")
