"""Testing a model on data that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from labkit.data import Tensors, share

from .transport import Transport

__all__ = ["WAYS", "validate_shared"]

WAYS = ("distributed", "inline", "thread")
"""``"distributed"``: each rank tests its part; ``"inline"``: rank 0 tests all while the others wait; ``"thread"``: a
thread of rank 0 does, while all train on."""
BATCH = 500
"""Images at a time: large enough to be quick, small enough to stay in a core's cache."""


def validate_shared(
    model: nn.Module, samples: Tensors, loss: Callable[[Tensor, Tensor], Tensor], over: Transport
) -> tuple[float, float]:
    """Test `model` on `samples`, of which each rank takes an equal part.

    Parameters
    ----------
    model
        The replica; the result makes sense when all are equal.
    samples
        The whole test set, the same on all ranks and on the model's device.
    loss
        Returns the mean loss of a batch.
    over
        What adds up the ranks' sums.

    Returns
    -------
    loss, accuracy
        Over all samples, the same on all ranks; NaN when there are none.
    """
    first, last = share(len(samples), over.rank, over.size)
    parameter = next(model.parameters())
    sums = torch.zeros(3, dtype=torch.float64, device=parameter.device)  # loss, right answers, samples
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for begin in range(first, last, BATCH):
                images, labels = samples.batch(slice(begin, min(begin + BATCH, last)))
                output = model(images.to(parameter.dtype))
                sums[0] += loss(output, labels).double() * len(labels)
                sums[1] += (output.argmax(1) == labels).sum()
                sums[2] += len(labels)
    finally:
        model.train(was_training)
    over.all_reduce(sums)
    total_loss, right, seen = sums.tolist()
    return (total_loss / seen, right / seen) if seen else (math.nan, math.nan)
