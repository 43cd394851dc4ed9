"""Gradient energy matching: workers scale their updates so that together they move no faster than one would."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from labkit.data import DatasetLike

from .flat import FlatGradients
from .flat_weights import FlatWeights
from .history import History
from .loop import Run
from .mastered import train_with_master
from .methods import method
from .replicas import TrainError
from .roles import Role
from .rule import Adding, Rule
from .settings import SettingError, Settings

__all__ = ["EnergyMatching", "gem"]

CLIP = 5.0
"""Largest factor of an update."""
EPS = 1e-13
"""Keeps the division finite where a gradient is 0."""


class EnergyMatching:
    """A worker's rule of gradient energy matching; the master adds what it is sent, θ ← θ + π·u.

    All by element, with the worker's gradient g, its velocity m as if it were alone, and Δ, by how much the
    master's θ has changed from one answer to the next, by whatever worker:

        u = −λ·g;  m ← μ·m + u;  π = clip((κ·|m| − |Δ|) / (|u| + ε), 0, 5);  send π·u

    J. R. Hermans, G. Louppe, "Gradient energy matching for distributed asynchronous gradient descent", 2018
    (arXiv:1805.08469), and its published code for the clipping and ε. There a worker asks for θ just before it sends;
    here an answer follows each push, so that Δ is one exchange older and a step costs one exchange, not two.

    Parameters
    ----------
    run
        Its optimizer has the learning rate λ, which the notebook may move.
    weights, gradients
        Of the model.
    momentum, kappa
        μ and κ.
    """

    answers_first = False

    def __init__(self, run: Run, weights: FlatWeights, gradients: FlatGradients, momentum: float, kappa: float) -> None:
        self.answered, self._gradients = weights.buffers, gradients.buffers
        self.sent, self._velocity, self._change = ([b.new_zeros(b.shape) for b in weights.buffers] for _ in range(3))
        self._before = [buffer.clone() for buffer in weights.buffers]
        self._momentum, self._kappa, self._optim = momentum, kappa, run.optim

    def local_step(self) -> None:
        """Turn the gradient into the update to send."""
        rate = self._optim.param_groups[0]["lr"]
        for sent, gradient, m, change in zip(self.sent, self._gradients, self._velocity, self._change, strict=True):
            u = -rate * gradient
            m.mul_(self._momentum).add_(u)
            pi = ((self._kappa * m.abs() - change.abs()) / (u.abs() + EPS)).clamp(0, CLIP)
            sent.copy_(pi * u)

    def pushed(self) -> None:
        """See by how much the master's weights have changed."""
        for change, weight, before in zip(self._change, self.answered, self._before, strict=True):
            change.copy_(weight - before)
            before.copy_(weight)

    def apply(self) -> None:
        """Do nothing: the master only adds."""


@method("gem")
def gem(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    kappa: float = 2.0,
    ranks_per_worker: int = 1,
    lr: float = 0.01,
    momentum: float = 0.9,
    **settings: Any,
) -> History:
    """Train `model` by gradient energy matching: rank 0 is the master; all ranks call it alike.

    As Downpour, but more workers do not mean larger strides: they share what momentum SGD alone would move.

    Parameters
    ----------
    model
        This rank's; at the end all have the master's weights.
    dataset
        The same on all ranks; each worker takes its part, or of ``dataset.queued()`` what the master hands it, at its
        own pace.
    kappa
        κ: how much of the energy of one worker alone all may use together. With 2 a single worker moves, in the
        long run, as fast as it would by itself.
    ranks_per_worker
        Ranks that share each worker's batch.
    lr, momentum
        λ and μ.
    **settings
        ``epochs``, ``batch_size`` and the others of `labkit.train.Settings`, but no ``optimizer``: the method is one.

    Returns
    -------
    History
        Of the same epochs on all ranks; each worker's own steps, and none of the master.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when there are too few, when they were called with different things, or an optimizer was given.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    own = {"kappa": kappa, "ranks_per_worker": ranks_per_worker}
    common = Settings.of("gem", settings | {"lr": lr, "momentum": momentum}, own)
    if common.optimizer is not None:
        raise TrainError("gem is an optimizer by itself: leave out optimizer=, and give lr= and momentum= if needed")
    if not (math.isfinite(kappa) and kappa > 0):
        raise SettingError(f"kappa must be a finite number above 0, not {kappa!r}")

    def rule(run: Run, weights: FlatWeights, gradients: FlatGradients, role: Role) -> Rule:
        return Adding(weights) if role.top else EnergyMatching(run, weights, gradients, momentum, kappa)

    return train_with_master("gem", model, dataset, common, own, rule, ranks_per_worker=ranks_per_worker)
