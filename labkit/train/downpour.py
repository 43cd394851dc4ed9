"""Downpour: the workers push gradients when they have them, and the master applies each as it comes."""

from __future__ import annotations

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
from .rule import Adding, Rule
from .settings import Settings

__all__ = ["Downpour", "downpour"]


class Downpour:
    """The rule of Downpour SGD.

    At a worker g ← g + ∇L(θ) at each step, and a step of its own optimizer meanwhile; after `sync_every` steps it
    pushes g, takes the master's θ and begins with g = 0 again. At the master θ ← optimizer(θ, g).
    J. Dean et al., "Large scale distributed deep networks", 2012, algorithm 7.1, with n_push = n_fetch.

    Parameters
    ----------
    run
        Its optimizer applies the gradient.
    weights, gradients
        Of the model.
    summing
        Whether gradients of several steps are added up; at the master False.
    """

    answers_first = False

    def __init__(self, run: Run, weights: FlatWeights, gradients: FlatGradients, summing: bool) -> None:
        self.answered = weights.buffers
        # One step's gradient leaves from where autograd put it, and arrives where the optimizer looks for it.
        self.sent = [b.new_zeros(b.shape) for b in gradients.buffers] if summing else gradients.buffers
        self._gradients, self._summing, self._optim = gradients, summing, run.optim

    def local_step(self) -> None:
        """Add the gradient up and go on by it; when it is pushed at once, the answer replaces the weights anyway."""
        if self._summing:
            for total, gradient in zip(self.sent, self._gradients.buffers, strict=True):
                total += gradient
            self._optim.step()

    def pushed(self) -> None:
        """Begin a new sum."""
        if self._summing:
            for total in self.sent:
                total.zero_()

    def apply(self) -> None:
        """Let the optimizer apply the gradient, which has arrived in the model's."""
        self._optim.step()


@method("downpour")
def downpour(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    sync_every: int = 1,
    ranks_per_worker: int = 1,
    masters: int = 1,
    sync_every_masters: int = 4,
    **settings: Any,
) -> History:
    """Train `model` by Downpour SGD: rank 0 is the master, the other ranks compute; all ranks call it alike.

    Nobody waits for a slow worker. The price: a gradient is applied to weights that others have changed since it
    was computed (its staleness, in ``history.steps.staleness``). With one worker the steps are those of `single`.

    Parameters
    ----------
    model
        This rank's; at the end all have the master's weights.
    dataset
        The same on all ranks; each worker takes its part, or of ``dataset.queued()`` what the master hands it, at its
        own pace.
    sync_every
        Steps of a worker from one push to the next.
    ranks_per_worker
        Ranks that share each worker's batch, `batch_size` samples a rank, and all-reduce its gradient.
    masters
        More than 1: so many masters under rank 0, each with its own part of the workers. Needs at least
        1 + 2·masters ranks.
    sync_every_masters
        Updates that such a master applies from one exchange with rank 0 to the next.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` (the master's) and the others of
        `labkit.train.Settings`.

    Returns
    -------
    History
        Of the same epochs on all ranks; each worker's own steps, and none of a master.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when there are too few, or they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    own = {
        "sync_every": sync_every,
        "ranks_per_worker": ranks_per_worker,
        "masters": masters,
        **({"sync_every_masters": sync_every_masters} if masters != 1 else {}),
    }
    common = Settings.of("downpour", settings, [*own, "sync_every_masters"])
    at_least_one(**own)

    def rule(run: Run, weights: FlatWeights, gradients: FlatGradients, role: Role) -> Rule:
        if role.top and masters > 1:
            return Adding(weights)
        return Downpour(run, weights, gradients, summing=role.worker >= 0 and sync_every > 1)

    return train_with_master(
        "downpour",
        model,
        dataset,
        common,
        own,
        rule,
        sync_every=sync_every,
        ranks_per_worker=ranks_per_worker,
        masters=masters,
        sync_every_masters=sync_every_masters,
    )
