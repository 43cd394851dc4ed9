"""The training methods by name: each is one file, and a new one becomes known by its decorator."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from labkit.data import DatasetLike

from .history import History

__all__ = ["METHODS", "method", "run"]

Method = TypeVar("Method", bound=Callable[..., History])

METHODS: dict[str, Callable[..., History]] = {}
"""Every method: takes a model, data and settings, trains the model in place, returns its history."""


def method(name: str) -> Callable[[Method], Method]:
    """Make the decorated function known as `name`, to `run` and to ``labkit train --method``.

    Examples
    --------
    >>> @train.method("mine")
    ... def mine(model, dataset, *, beta=1, **settings):
    ...     common = train.Settings.of("mine", settings, ["beta"])
    ...     with train.Run("mine", model, dataset, common, {"beta": beta}) as run:
    ...         run.in_step(step)
    ...     return run.history
    """

    def register(function: Method) -> Method:
        METHODS[name] = function
        return function

    return register


def run(name: str, model: nn.Module, dataset: DatasetLike, **settings: Any) -> History:
    """Train `model` by the method of that name; all ranks call it alike.

    Raises
    ------
    ValueError
        If there is no such method.
    """
    if name not in METHODS:
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"there is no method {name!r}, but {', '.join(METHODS)}{hint}")
    return METHODS[name](model, dataset, **settings)
