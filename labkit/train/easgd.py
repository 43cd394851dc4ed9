"""Elastic averaging: each worker trains weights of its own, tied to a centre by a spring."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from labkit.data import DatasetLike

from .flat import FlatGradients
from .flat_weights import FlatWeights
from .history import History
from .loop import Run
from .mastered import at_least_one, train_with_master
from .methods import method
from .roles import Role
from .rule import Rule
from .settings import SettingError, Settings

__all__ = ["Elastic", "easgd"]


class Elastic:
    """The rule of asynchronous elastic averaging SGD.

    Between exchanges a worker steps by itself. At an exchange, with its weights x and the centre x̃ as they are:
    x ← x − α·(x − x̃) and x̃ ← x̃ + α·(x − x̃).
    S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with elastic averaging SGD", 2015, algorithm 1.

    Parameters
    ----------
    run
        Its optimizer makes the worker's steps.
    weights
        Of the model: a worker's x, the master's x̃.
    at_master
        Which side this is.
    alpha
        α, the spring's strength.
    """

    answers_first = True  # both sides move by the same difference

    def __init__(self, run: Run, weights: FlatWeights, at_master: bool, alpha: float) -> None:
        other = [buffer.new_zeros(buffer.shape) for buffer in weights.buffers]
        self.sent, self.answered = (other, weights.buffers) if at_master else (weights.buffers, other)
        self._optim, self._alpha = run.optim, alpha

    def local_step(self) -> None:
        """Make a step of the worker's own."""
        self._optim.step()

    def pushed(self) -> None:
        """Let the centre pull the worker."""
        for x, centre in zip(self.sent, self.answered, strict=True):
            x.lerp_(centre, self._alpha)

    def apply(self) -> None:
        """Let the worker pull the centre."""
        for centre, x in zip(self.answered, self.sent, strict=True):
            centre.lerp_(x, self._alpha)


@method("easgd")
def easgd(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    elastic_force: float = 0.9,
    sync_every: int = 10,
    ranks_per_worker: int = 1,
    lr: float = 0.1,
    momentum: float = 0.0,
    **settings: Any,
) -> History:
    """Train `model` by asynchronous elastic averaging SGD: rank 0 keeps the centre; all ranks call it alike.

    Parameters
    ----------
    model
        This rank's; at the end all have the centre's weights, which are also what is tested.
    dataset
        The same on all ranks; each worker takes its part, or of ``dataset.queued()`` what the master hands it, at its
        own pace.
    elastic_force
        β = workers·α, 0…workers: how strongly all workers together pull the centre. With 0 each worker trains
        alone and the centre stays where it began.
    sync_every
        τ, the steps of a worker from one exchange to the next; 10 in the paper's figures.
    ranks_per_worker
        Ranks that share each worker's batch.
    lr, momentum
        Of the workers' SGD. (MPI Learn's learning rate of 1.0 leaves LeNet on MNIST at guessing.)
    **settings
        ``epochs``, ``batch_size``, ``optimizer`` (each worker's) and the others of `labkit.train.Settings`.

    Returns
    -------
    History
        Of the same epochs on all ranks, the training figures those of the workers' own weights; each worker's own
        steps, and none of the master.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when there are too few, or they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    own = {"elastic_force": elastic_force, "sync_every": sync_every, "ranks_per_worker": ranks_per_worker}
    common = Settings.of("easgd", settings | {"lr": lr, "momentum": momentum}, own)
    at_least_one(sync_every=sync_every, ranks_per_worker=ranks_per_worker)
    if not (math.isfinite(elastic_force) and elastic_force >= 0):
        raise SettingError(f"elastic_force must be a finite number of at least 0, not {elastic_force!r}")

    def rule(run: Run, weights: FlatWeights, gradients: FlatGradients, role: Role) -> Rule:
        # More than 1 would overshoot the centre.
        return Elastic(run, weights, role.top, min(1.0, elastic_force / role.workers))

    return train_with_master(
        "easgd", model, dataset, common, own, rule, sync_every=sync_every, ranks_per_worker=ranks_per_worker
    )
