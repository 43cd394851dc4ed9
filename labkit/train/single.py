"""One process alone: the base of every speed-up."""

from __future__ import annotations

from typing import Any

from torch import nn

from labkit.data import Batch, DatasetLike

from .history import History
from .loop import Run
from .methods import method
from .settings import Settings
from .transport import Alone

__all__ = ["single"]


@method("single")
def single(model: nn.Module, dataset: DatasetLike, **settings: Any) -> History:
    """Train `model` in this process, with the same steps as the other methods make and without communication.

    R ranks of synchronous SGD with batch size B take the same steps as this with R·B. Called on several ranks,
    each trains by itself.

    Parameters
    ----------
    model
        Changed in place and moved to the device.
    dataset
        All of it is this process's.
    **settings
        Those of `labkit.train.Settings`, without ``over``.

    Returns
    -------
    History
        Times and losses by step, results by epoch.
    """
    common = Settings.of("single", settings | {"over": Alone()})
    with Run("single", model, dataset, common, {}) as run:

        def step(batch: Batch) -> tuple[float, int]:
            for parameter in model.parameters():
                parameter.grad = None
            done = run.forward_and_backward(batch)
            run.optim.step()
            return done

        run.in_step(step)
    return run.history
