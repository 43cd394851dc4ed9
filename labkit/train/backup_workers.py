"""Synchronous SGD with backup workers: a step waits for most of the workers, and what comes later is dropped."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import nn

from labkit.data import DatasetLike

from .downpour import Downpour
from .exchange import Push
from .flat import FlatGradients
from .flat_weights import FlatWeights
from .history import History
from .loop import Run
from .master import Master
from .mastered import train_with_master
from .methods import method
from .roles import Role
from .rule import Rule
from .settings import SettingError, Settings

__all__ = ["PatientMaster", "backup_workers"]


class PatientMaster(Master):
    """Waits for a share of its workers, applies their samples' mean gradient once, and answers them together.

    J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016, algorithms
    3 and 4: a gradient of older weights is dropped, and its worker goes on with the new ones.

    Parameters
    ----------
    *args
        As for `Master`.
    wait_for
        The share.
    """

    def __init__(self, *args: Any, wait_for: float) -> None:
        super().__init__(*args)
        self.rejected = self.lost = 0
        """Gradients that came too late, and their samples."""
        self._wait_for = wait_for
        self._accepted: list[tuple[int, Push]] = []
        self._sums = [buffer.new_zeros(buffer.shape) for buffer in self.rule.sent]

    @property
    def needed(self) -> int:
        """How many gradients make a step, of the workers that are not done."""
        # 0.95 · 20 must not be rounded up to 20 for the sake of its last binary digit.
        return max(1, math.ceil(self._wait_for * len(self.active) - 1e-9))

    def take(self, source: int, push: Push) -> None:
        """Keep a gradient of the present weights until there are enough; drop one of older weights."""
        self.ask()
        if push.version != self.version:
            self.rejected += 1
            self.lost += int(push.samples)
            self.answer(source, self.version - push.version)
            self.count(push, lost=True)
            return
        for total, gradient in zip(self._sums, self.rule.sent, strict=True):
            total.add_(gradient, alpha=push.samples)
        self._accepted.append((source, push))
        self._step_if_enough()

    def left(self) -> None:
        """A worker is done: those that wait may now be enough."""
        self._step_if_enough()

    def finish(self) -> None:
        """Put the dropped gradients into the history."""
        super().finish()
        self.run.history.settings |= {"rejected_gradients": self.rejected, "rejected_samples": self.lost}

    def _step_if_enough(self) -> None:
        if not self._accepted or len(self._accepted) < self.needed:
            return
        accepted, self._accepted = self._accepted, []
        samples = sum(push.samples for _, push in accepted)
        if samples:
            for gradient, total in zip(self.rule.sent, self._sums, strict=True):
                gradient.copy_(total / samples)
                total.zero_()
            self.rule.apply()
        self.version += 1
        for source, _ in accepted:
            self.answer(source, 0)
        for _, push in accepted:
            self.count(push)


@method("backup_workers")
def backup_workers(model: nn.Module, dataset: DatasetLike, *, wait_for: float = 0.95, **settings: Any) -> History:
    """Train `model` by synchronous SGD that leaves stragglers behind; rank 0 is the master; all ranks call it alike.

    Parameters
    ----------
    model
        This rank's; at the end all have the master's weights.
    dataset
        The same on all ranks; each worker takes its part.
    wait_for
        Share of the workers whose gradients make a step, rounded up to whole workers: 0.95 waits for all of up to
        19 and for 19 of 20. The samples of a gradient that comes too late are lost for that epoch; the history's
        settings count both (``rejected_gradients``, ``rejected_samples``). With 1.0 the steps are those of
        `synchronous` on as many ranks as there are workers.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` (the master's) and the others of
        `labkit.train.Settings`.

    Returns
    -------
    History
        Of the same epochs on all ranks, over the samples that were used; each worker's own steps, those whose
        gradients were dropped included (their staleness is above 0), and none of the master.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when there are too few, or they were called with different things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    own = {"wait_for": wait_for}
    common = Settings.of("backup_workers", settings, own)
    if not 0 < wait_for <= 1:
        raise SettingError(f"wait_for must be above 0 and at most 1, not {wait_for!r}")

    def rule(run: Run, weights: FlatWeights, gradients: FlatGradients, role: Role) -> Rule:
        return Downpour(run, weights, gradients, summing=False)

    patient = functools.partial(PatientMaster, wait_for=wait_for)
    # A worker without a sample in the last step counts, too: the others' step waits for it.
    return train_with_master("backup_workers", model, dataset, common, own, rule, every_batch=True, master=patient)
