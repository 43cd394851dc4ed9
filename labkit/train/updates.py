"""Ways to apply an update: one optimizer's arithmetic, as a loop over the parameters and in fewer, larger pieces.

Where a master applies the updates of all workers, what one costs bounds how many workers it can serve. A loop over the
parameters calls several kernels for each of them, and each pass goes through memory once more. ``foreach`` gives each
kernel the list of all parameters, ``fused`` makes one kernel of the whole formula, and on flat parameters (all are
views into one tensor) even the loop has only one turn.  ``labkit bench update`` measures them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .flat import FlatGradients
from .flat_weights import FlatWeights
from .optimizers import SGD, Adam, Optimizer
from .replicas import TrainError

__all__ = ["WAYS", "FlatParameters", "Updater"]

WAYS = ("loop", "foreach", "fused", "flat", "flat fused")
"""``"loop"``: `labkit.train.optimizers`, parameter by parameter; ``"foreach"`` and ``"fused"``: torch's; ``"flat"``:
the loop on flat parameters; ``"flat fused"``: one kernel on one tensor."""
OPTIMIZERS: dict[str, tuple[Any, str]] = {"sgd": (SGD, "SGD"), "adam": (Adam, "Adam")}
"""Name → ours, and the name in `torch.optim`."""


class FlatParameters:
    """A model's trainable parameters, and their gradients, as views into one flat tensor for each dtype and device.

    What is received into a flat gradient is in the model without a copy, and the flat parameters can be sent as they
    lie. Parameters without a gradient count as having the gradient 0.

    Parameters
    ----------
    model
        Moved to its device already; its parameters keep their values and their shapes.
    gradients
        Its gradients, flat; default: made here.

    Attributes
    ----------
    gradients
        The flat gradients.
    flat
        The flat parameters, one-dimensional; the ``.grad`` of each is its flat gradient.
    """

    def __init__(self, model: nn.Module, gradients: FlatGradients | None = None) -> None:
        self.gradients = gradients or FlatGradients(model)
        self._weights = FlatWeights(model)
        self.flat = [nn.Parameter(buffer) for buffer in self._weights.buffers]
        for flat, gradient in zip(self.flat, self.gradients.buffers, strict=True):
            flat.grad = gradient
        self._places = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]

    def check(self) -> None:
        """Make sure that the model still computes with the flat parameters, and its gradients lie in the flat ones.

        Raises
        ------
        TrainError
            When something gave a parameter other memory, as ``model.to()`` does.
        """
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            raise TrainError(
                "the model's parameters are no longer views into the flat ones, so an update would not reach them: "
                "something such as model.to() moved them. Move the model first, and make FlatParameters after that."
            )
        self.gradients.gather()

    def release(self) -> None:
        """Give each parameter memory of its own again, with its value, and give the gradients up."""
        self._weights.release()
        self.gradients.release()


class Updater:
    """Applies a model's gradients to its parameters, in one of several `WAYS` that come to the same.

    Parameters
    ----------
    model
        Moved to its device already.
    way
        One of `WAYS`. ``"foreach"``, ``"fused"`` and ``"flat fused"`` load torch's optimizers, and with the first step
        its compiler: seconds, and some 170 MB.
    optimizer
        ``"sgd"`` or ``"adam"``.
    **settings
        Of the optimizer: ``lr`` and ``momentum``, or ``lr``, ``betas`` and ``eps``; the defaults are those of
        `labkit.train.SGD` and `labkit.train.Adam`.

    Attributes
    ----------
    optimizer
        Does it; the learning rate of the next step is ``optimizer.param_groups[0]["lr"]``.
    flat
        The flat parameters and gradients; None where the way has none.

    Raises
    ------
    ValueError
        For a way or an optimizer that there is not.
    TypeError
        For a setting that the optimizer does not have.
    """

    def __init__(self, model: nn.Module, way: str = "flat", optimizer: str = "adam", **settings: Any) -> None:
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, not {way!r}")
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(map(repr, OPTIMIZERS))}, not {optimizer!r}")
        self._model = model
        self.flat = FlatParameters(model) if way.startswith("flat") else None
        parameters = self.flat.flat if self.flat else [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(way.removeprefix("flat").strip() or "loop", optimizer, parameters, settings)

    def zero(self) -> None:
        """Set the gradients to 0."""
        if self.flat:
            self.flat.gradients.zero()
        else:
            self._model.zero_grad()

    def step(self) -> None:
        """Apply the gradients.

        Raises
        ------
        TrainError
            When the model's parameters are no longer the flat ones.
        """
        if self.flat:
            self.flat.check()
        self.optimizer.step()

    def release(self) -> None:
        """Leave the model as it was, with its new weights."""
        if self.flat:
            self.flat.release()


def _optimizer(kernels: str, name: str, parameters: Iterable[nn.Parameter], settings: dict[str, Any]) -> Optimizer:
    ours, theirs = OPTIMIZERS[name]
    if kernels == "loop":
        made: Optimizer = ours(parameters, **settings)
        return made
    # The signature of ours gives the defaults; theirs has others.
    defaults = ours((), **settings).defaults
    made = getattr(torch.optim, theirs)(parameters, **defaults, **{kernels: True})
    return made
