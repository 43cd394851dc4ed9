"""How large a message of pickled objects can be at most, told without pickling it.

Only when somebody asks what a rank waits for, in a thread beside the waiting one: pickling would run the program's own
code, and take long where the object is large.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["MOST", "pickled"]

MOST = 10_000
"""Objects within objects that are looked at; a structure that has more of them is of unknown size."""

_EACH, _ARRAY, _TENSOR = 64, 1024, 8192
"""Bytes that pickle adds to any object, to an array's data and to a tensor's."""


def pickled(value: Any) -> tuple[str, str, int] | None:
    """A buffer, as `watched_arguments.essential` tells it, into which `value` fits once it is pickled.

    Parameters
    ----------
    value
        What is sent. It is known for numbers, text, bytes, arrays, tensors, and lists, tuples, sets and dicts of them.

    Returns
    -------
    tuple or None
        ``("array", "uint8", bytes)``; None where anything may come out, as from a class of the program's own.
    """
    total = 0
    with suppress(Exception):  # another thread may be changing it
        for each in _inside(value):
            size = _size(each)
            if size is None:
                return None
            total += size + _EACH
        return "array", "uint8", total
    return None


def _inside(value: Any) -> Iterator[Any]:
    """`value` and what it is made of; more than that of an object of many."""
    left, seen = [value], 0
    while left:
        each = left.pop()
        seen += 1
        if type(each) is dict:
            left += each.keys()
            left += each.values()
        elif type(each) in (list, tuple, set, frozenset):
            left += each
        if seen + len(left) > MOST:
            yield Ellipsis
            return
        yield each


def _size(value: Any) -> int | None:
    """Bytes of its own; None where they are not known."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict, bool, type(None), float, complex):
        return 0
    if kind is int:
        return int(value.bit_length()) // 8
    if kind is str:
        return 4 * len(value)
    if kind in (bytes, bytearray):
        return len(value)
    if kind is np.ndarray or (issubclass(kind, np.generic) and kind.__module__ == "numpy"):
        return None if value.dtype.hasobject or value.dtype.names else int(value.nbytes) + _ARRAY
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor and not vars(value):
        return int(value.untyped_storage().nbytes()) + _TENSOR  # a slice is sent with all that it is a slice of
    return None
