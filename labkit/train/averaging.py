"""Averaging of weights: each rank steps by itself, and every few steps all take the mean of their weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from labkit.data import Batch, DatasetLike

from .flat_weights import FlatWeights
from .history import History
from .loop import Run
from .mastered import at_least_one
from .methods import method
from .settings import Settings
from .synchronous import sync_initial_weights

__all__ = ["averaging"]


@method("averaging")
def averaging(model: nn.Module, dataset: DatasetLike, *, average_every: int = 10, **settings: Any) -> History:
    """Train `model` on all ranks, each by its own optimizer, with the mean of the weights now and then.

    Instead of gradients the weights and biases are all-reduced (A. Vishnu et al., "Distributed TensorFlow with MPI",
    2016; as local SGD: S. U. Stich, 2019): θ ← (1/R)·Σ θᵣ. With `average_every` = 1 and SGD without momentum the
    steps are those of `synchronous`. No master, and all ranks call it alike.

    Parameters
    ----------
    model
        This rank's replica; all begin with rank 0's weights and end with the same.
    dataset
        The same on all ranks; each takes its part.
    average_every
        Steps from one mean to the next; the weights are averaged at the end of each epoch in any case.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` (each rank's) and the others of
        `labkit.train.Settings`.

    Returns
    -------
    History
        Times and losses by step, results by epoch.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    own = {"average_every": average_every}
    common = Settings.of("averaging", settings, own)
    at_least_one(**own)
    with Run("averaging", model, dataset, common, own) as run:
        sync_initial_weights(model, run.over)
        weights = FlatWeights(model, run.over)
        apart = 0  # steps since the last mean

        def average() -> None:
            nonlocal apart
            if apart:
                for buffer in weights.buffers:
                    run.over.all_reduce(buffer, "mean")
            apart = 0

        def step(batch: Batch) -> tuple[float, int]:
            nonlocal apart
            for parameter in model.parameters():
                parameter.grad = None
            # The mean over R ranks of these is the mean over samples; the weight is 1 in every full batch.
            weight = len(batch.labels) * run.over.size / batch.total
            done = run.forward_and_backward(batch, weight=weight)
            run.optim.step()
            apart += 1
            if apart == average_every:
                average()
            return done

        try:
            run.in_step(step, after_steps=average)
        finally:
            weights.release()
    return run.history
