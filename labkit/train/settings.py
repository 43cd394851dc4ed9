"""What all training methods are told alike."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import comm

from .checkpoint import LATEST, PREVIOUS, Every
from .device import choose_device
from .optimizers import SGD, Optimizer
from .progress import Progress
from .slow import Slowness, in_words, plan
from .stopping import Stopping
from .transport import MPITransport, Transport
from .validation import WAYS

__all__ = ["Loss", "OptimizerFactory", "SettingError", "Settings"]

Loss = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class SettingError(ValueError):
    """A setting makes no sense; raised before any rank talks to another, so on all ranks that were given it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every method takes by name; each method has a few of its own besides.

    Attributes
    ----------
    epochs
        How often to go through the training set.
    batch_size
        Samples of one rank at a step; ``"auto"``: as `labkit.train.find_batch_size` finds, anew in each run.
    lr, momentum
        Of the SGD optimizer; the defaults are those of the textbook example, small for MNIST.
    optimizer
        Makes another optimizer of the parameters: ``train.Adam``, or any of torch's such as
        ``lambda p: torch.optim.AdamW(p, lr=1e-3)``; `lr` and `momentum` are then not used.
    loss
        Takes a batch's output and labels, returns their mean loss; default: `torch.nn.functional.nll_loss`,
        for models that return log-probabilities.
    seed
        Of the shuffle and of each rank's dropout. The weights are the caller's: seed before making the model.
    validate
        Test after each epoch: ``"distributed"``, each rank on its part of the test set; ``"inline"``, rank 0 while the
        others wait; ``"thread"``, a thread of rank 0 while all train on, so that results come later; True: as suits
        the method; False: never.
    target
        Stop once it is reached: ``"val_acc,>,0.97"``; see `labkit.train.stopping`.
    early_stopping
        Stop when it gets no better: ``"val_loss,~<,4"``, when the test loss has not become smaller for 4 epochs.
    checkpoint
        A folder of this run's own, where rank 0 keeps the latest checkpoint, the one before it and the best one.
    checkpoint_every
        Epochs from one checkpoint to the next, or seconds: ``"30s"``. There is one at the end in any case.
    restore
        Go on from a checkpoint: a file, or a folder whose latest is taken; True: from the folder `checkpoint` if there
        is one in it, else begin. Training with the same settings then goes on as if it had never ended.
    slow
        Ranks to slow down on purpose, as in ``{2: 3.0}``; see `labkit.train.slow`.
    monitor
        Sample each rank's processor time, memory and GPU once a second, into the history.
    progress
        Whether rank 0 prints one line an epoch (and in a notebook or on a terminal, how far it is), or what does.
    device
        Default: this rank's GPU where there is one, else the CPU.
    over
        What carries tensors between the ranks, or the communicator of those that train; default: MPI, all ranks.
    """

    epochs: int = 1
    batch_size: int | str = 64
    lr: float = 1e-3
    momentum: float = 0.85
    optimizer: OptimizerFactory | None = None
    loss: Loss | None = None
    seed: int = 0
    validate: bool | str = True
    target: str | None = None
    early_stopping: str | None = None
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | str = 1
    restore: str | os.PathLike[str] | bool = False
    slow: Mapping[int, float | Slowness] | None = None
    monitor: bool = False
    progress: bool | Progress = True
    device: torch.device | str | None = None
    over: Transport | comm.Communicator | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            number = getattr(self, name)
            if name == "batch_size" and number == "auto":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SettingError(f"{name} must be a whole number of at least 1, not {number!r}")
        for name in ("lr", "momentum"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingError(f"{name} must be a finite number of at least 0, not {value!r}")
        if self.validate not in (True, False, *WAYS):
            raise SettingError(f"validate must be True, False or one of {', '.join(WAYS)}, not {self.validate!r}")
        try:
            Stopping(self.target, self.early_stopping, tested=bool(self.validate))
            Every.parse(self.checkpoint_every)
            plan(self.slow)
        except ValueError as error:
            raise SettingError(str(error)) from error
        if self.restore is True and self.checkpoint is None:
            raise SettingError("restore=True goes on from the folder in checkpoint, and there is none: name a file")

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any], own: Collection[str] = ()) -> Settings:
        """Return `given` as settings of `method`, whose `own` settings are known, too.

        Raises
        ------
        TypeError
            For a name that is no setting, with the nearest one that is.
        SettingError
            For a value that makes no sense.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                nearest = difflib.get_close_matches(name, [*known, *own], n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join([*own, *known])}"
                raise TypeError(f"{method} has no setting {name!r}: {hint}")
        return cls(**given)

    @property
    def transport(self) -> Transport:
        """What carries tensors between the ranks."""
        if self.over is None or isinstance(self.over, comm.Communicator):
            return MPITransport(self.over)
        return self.over

    @property
    def criterion(self) -> Loss:
        """The loss."""
        return self.loss or functional.nll_loss

    def restore_path(self) -> Path | None:
        """Return what to go on from; None: begin. Looks into the folder: for the rank that writes there."""
        if self.restore is True and self.checkpoint is not None:
            folder = Path(self.checkpoint)
            return folder if (folder / LATEST).exists() or (folder / PREVIOUS).exists() else None
        return Path(self.restore) if isinstance(self.restore, str | os.PathLike) else None

    def around(self) -> dict[str, Any]:
        """Return the settings that change no step, but what happens around the steps."""
        return {
            "epochs": self.epochs,
            "validate": self.validate,
            "target": self.target,
            "early_stopping": self.early_stopping,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "checkpoint_every": self.checkpoint_every,
            "monitor": self.monitor,
            "restore": self.restore if isinstance(self.restore, bool) else str(self.restore),
            "slow": in_words(self.slow),
        }

    def choose_device(self) -> torch.device:
        """Return where this rank computes."""
        return choose_device() if self.device is None else torch.device(self.device)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimizer of `parameters`."""
        return self.optimizer(parameters) if self.optimizer else SGD(parameters, self.lr, self.momentum)
