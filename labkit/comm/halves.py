"""float16 and bfloat16 as they lie in memory, to float32 and back.

numpy knows no bfloat16. It is the upper half of a float32, and is rounded to the nearest, ties to even, as in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["narrow", "widen"]

_Vector = np.ndarray[Any, Any]


def widen(x: _Vector, out: _Vector, name: str) -> None:
    """Write `x`, 16-bit words that hold elements of type `name`, into the float32 array `out`."""
    if name == "float16":
        np.copyto(out, x.view(np.float16))
        return
    words = out.view(np.uint32)
    np.copyto(words, x)
    np.left_shift(words, 16, out=words)


def narrow(x: _Vector, out: _Vector, name: str) -> None:
    """Round the float32 array `x` into `out`, 16-bit words that hold elements of type `name`."""
    if name == "float16":
        with np.errstate(over="ignore"):
            np.copyto(out.view(np.float16), x, casting="same_kind")
        return
    words = x.view(np.uint32)
    rounded = words + (0x7FFF + (words >> 16 & 1))  # carries into the exponent where it must, up to infinity
    rounded >>= 16
    np.copyto(out, rounded, casting="same_kind")
    out[np.isnan(x)] = 0x7FC0  # the addition may turn a NaN into a number
