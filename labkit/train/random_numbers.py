"""The state of a rank's random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["RandomNumbers"]


class RandomNumbers:
    """This rank's random numbers: torch's, and those of numpy and Python where the training draws from them.

    Parameters
    ----------
    device
        A GPU has random numbers of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._python, self._numpy = random.getstate(), _numpy_state()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numpy's and Python's only if they are not as when this was made."""
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        if self._cuda is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._cuda)
        if random.getstate() != self._python:
            state["python"] = random.getstate()
        if _numpy_state() != self._numpy:
            name, keys, *rest = _numpy_state()
            state["numpy"] = (name, list(keys), *rest)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        torch.set_rng_state(state["torch"])
        if self._cuda is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.array(keys, np.uint32), *rest))


def _numpy_state() -> tuple[Any, ...]:
    """The state of numpy's global generator, comparable."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return str(name), tuple(int(key) for key in keys), int(position), int(has_gauss), float(gauss)
