"""How the options of the command-line program are read; see `labkit.train.options`."""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Callable
from typing import Any

from . import slow
from .slow import Slowness

__all__ = ["batch_size", "every", "natural", "positive", "rate", "setting", "share", "slowness"]


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


def batch_size(text: str) -> int | str:
    """Read a number of samples, or ``auto``."""
    return text if text == "auto" else int(positive(text))


def every(text: str) -> int | str:
    """Read a number of epochs, or seconds such as ``30s``, which the settings check."""
    return int(text) if text.isdigit() else text
