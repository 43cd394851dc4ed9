"""What a training method needs around its steps: data, times, telemetry, validation, history."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.data import Batch, DataError, DatasetLike, Feed, as_dataset
from labkit.telemetry import facts

from . import slow
from .batch_size import choose_batch_size
from .history import EpochRow, History, versions
from .models import check_log_probabilities
from .monitor import Monitor
from .optimizers import in_words
from .progress import Progress
from .recorder import Recorder
from .replicas import agree, shapes
from .resume import Checkpoints
from .settings import SettingError, Settings
from .stopping import Stopping
from .validator import Validator
from .wishes import Wishes

__all__ = ["Run", "Step"]

Step = Callable[[Batch], tuple[float, int]]
"""Makes one step with this rank's batch; returns its mean loss (NaN without samples) and right answers."""


class Run:
    """One training run of one method, as one rank sees it; all ranks make it alike.

    Used in a ``with`` statement: inside it the model is in training mode and this rank's random numbers are seeded
    anew; after it the model's mode and the caller's random numbers are as before, and the history is whole.

    Parameters
    ----------
    method
        Its name.
    model
        This rank's replica; moved to the device and changed in place.
    dataset
        The same on all ranks: a `Dataset`, `Files`, or what else `labkit.data.as_dataset` takes.
    settings
        What all methods take.
    own
        The settings that only this method takes, for the history; all ranks must give the same.
    computing
        This rank's number among those that compute, and how many they are: the samples are spread over them.
        Default: all ranks. A rank that computes nothing, such as a master, has number -1 and no feed; where a master
        hands the samples out, the method makes the feed.

    Attributes
    ----------
    over
        What carries tensors between the ranks.
    device, dtype
        Where the model computes, and in what.
    dataset
        As a `Dataset` or `Files`.
    batch_size
        Samples of one rank at a step, found out if the settings say so.
    feed
        This rank's batches.
    test
        The test set, on the device.
    optim
        The optimizer of the model's parameters.
    recorder
        Keeps what each step did.
    wishes
        What the notebook's Stop button and learning-rate slider ask for.
    history
        What the run did.
    slowed
        Makes this rank slow, if it is to be: a step's computing stands in its ``with`` block.
    together
        Whether all ranks step together; else rank 0 is a master, and calls `end_epoch` and `finish` alone.
    validator
        Tests the model; `end_epoch` fills in what its thread has found, if it has one.

    Raises
    ------
    TrainError
        On all ranks, when they were called with different things.
    """

    def __init__(
        self,
        method: str,
        model: nn.Module,
        dataset: DatasetLike,
        settings: Settings,
        own: dict[str, Any],
        computing: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset = as_dataset(dataset)
        if dataset.samples == 0:
            raise SettingError("the data set has no training samples")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SettingError(f"{type(model).__name__} has no parameters to train")
        self.model, self.settings = model, settings
        self.over = settings.transport
        self.device = settings.choose_device()
        self.criterion = settings.criterion
        model.to(self.device)
        self.dtype = next(model.parameters()).dtype
        self.test = dataset.test.to(self.device)
        self.optim = settings.make_optimizer(model.parameters())
        self.batch_size = choose_batch_size(settings, model, dataset, self.device, self.over)
        self.together = computing is None
        self.feed = self._own_feed(*(computing or (self.over.rank, self.over.size)))
        described = {
            "method": method,
            "model": shapes(model),
            "dataset": dataset.summary,
            "batch_size": self.batch_size,
            "optimizer": in_words(self.optim),
            "loss": getattr(self.criterion, "__name__", type(self.criterion).__name__),
            **own,
            "seed": settings.seed,
            **settings.around(),
        }
        agree(self.over, described)
        self.described = described
        facts.record("model", shapes(model).split(" (")[0])
        facts.record("seed", f"{settings.seed} (shuffle, dropout)")
        self.history = History(self.over.rank, self.over.size, dict(described), versions(self.over.name))
        self.history.settings |= {"source": dataset.source, "device": str(self.device)}
        self.told: Progress | None = None
        if settings.progress and self.over.rank == 0:
            self.told = settings.progress if isinstance(settings.progress, Progress) else Progress()
        self.wishes = Wishes(self.over, self.device, self.optim)
        self.recorder = Recorder(self.over, self.device, self.wishes.emitter)
        self.validator = Validator(
            settings.validate, model, self.test, self.criterion, self.over, together=self.together
        )
        self.slowed = self._slow(settings)
        self._stopping = Stopping(settings.target, settings.early_stopping)
        self._checkpoints: Checkpoints | None = None
        self._monitor: Monitor | None = None
        self._was_training = model.training
        self._around = contextlib.ExitStack()
        self._collected = False

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as around:
            around.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
            # Not the same dropout on all ranks: they would leave out the same units for all samples.
            seeds = np.random.SeedSequence([self.settings.seed, 1 + self.over.rank])
            torch.manual_seed(int(seeds.generate_state(1)[0]))
            if self.settings.checkpoint is not None or self.settings.restore:
                self._checkpoints = Checkpoints(self)
                around.callback(self._checkpoints.close)
            if self.settings.monitor:
                self._monitor = Monitor(self.device)
                around.callback(self._monitor.close)
            self.validator.begin()
            around.callback(self.validator.close)
            around.callback(self.slowed.close)
            self.model.train()
            self._around = around.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._around.close()
        self.model.train(self._was_training)
        self.wishes.close()
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"Training was interrupted after step {self.recorder.step}; the model keeps its weights.")
        if error is None and not self._collected:
            self.collect()

    def collect(self) -> None:
        """Make the history whole, with every rank's steps; done by itself at the end. All ranks call it together."""
        self.history.steps = self.recorder.steps()
        series = self.over.all_gather_object(self.history.steps)
        self.history.by_rank = series if self.over.rank == 0 else []
        if self._monitor is not None:
            resources = self.over.all_gather_object(self._monitor.resources())
            self.history.resources = resources if self.over.rank == 0 else []
        self._collected = True

    def forward_and_backward(
        self, batch: Batch, forward: Callable[[Tensor], Tensor] | None = None, weight: float = 1.0
    ) -> tuple[float, int]:
        """Leave the gradient of `weight` times the batch's mean loss in the model; return that loss and right answers.

        Parameters
        ----------
        batch
            This rank's; without samples nothing is done.
        forward
            What computes the output; default: the model.
        weight
            Factor of the loss before backward.
        """
        with self.slowed:
            if len(batch.labels) == 0:
                return math.nan, 0
            output = (forward or self.model)(batch.images.to(self.dtype))
            loss = self.criterion(output, batch.labels)
            (loss if weight == 1 else loss * weight).backward()
        if self.recorder.step == 0 and self.settings.loss is None:
            check_log_probabilities(output)
        return loss.item(), int((output.argmax(1) == batch.labels).sum())

    def _own_feed(self, number: int, count: int) -> Feed | None:
        """Return the batches of one of the ranks that compute; None for a master, or where one hands them out."""
        if self.dataset.by_queue and not self.together:
            return None
        # A master refuses what the others refuse, and takes no samples to its device.
        computes, settings = number >= 0, self.settings
        device = self.device if computes else "cpu"
        try:
            feed = self.dataset.feed(max(number, 0), count, self.batch_size, settings.seed, device)
        except DataError as error:
            raise SettingError(str(error)) from error
        return feed if computes else None

    def _slow(self, settings: Settings) -> slow.Slowed:
        """Return what makes this rank slow, if it is to be."""
        finish = functools.partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else None
        over = self.over
        try:
            return slow.of(over.rank, settings.slow, over.size, finish=finish, spent=lambda: sum(over.spent()))
        except ValueError as error:
            raise SettingError(str(error)) from error

    def in_step(
        self,
        step: Step,
        *,
        after_steps: Callable[[], None] | None = None,
        after_restore: Callable[[], None] | None = None,
        after_epoch: Callable[[EpochRow], None] | None = None,
        test: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        """Train with all ranks making each step together, for as many epochs as the settings say.

        Parameters
        ----------
        step
            Makes one step.
        after_steps
            Called after an epoch's last step, before the model is tested.
        after_restore
            Called where the run goes on from a checkpoint, with what it holds in place.
        after_epoch
            Called with the epoch's row before it is told; may change it.
        test
            Returns the test loss and accuracy, the same on all ranks; default: each rank tests its replica on its
            part of the test set.
        """
        assert self.feed is not None
        epochs, history = self.settings.epochs, self.history
        first, done = self.resume(after_restore)
        for epoch in range(first, epochs):
            if history.stopped:
                break
            self.model.train()
            if done == 0:
                self.recorder.begin_epoch(epoch)
            for number, batch in enumerate(self.feed.epoch(epoch, done), start=done + 1):
                with self.recorder.timed_step(batch, self.optim) as result:
                    result.loss, result.right = step(batch)
                    # Here and not before the step: the ranks are together now, and waiting for the notebook's
                    # answer is part of the step's time.
                    stop = self.wishes.stop()
                if self.told is not None:
                    self.told.step(epoch + 1, epochs, number, self.feed.steps, result.loss)
                if self._checkpoints is not None:
                    self._checkpoints.after_step(epoch, number, stop=stop)
                if stop:
                    history.stopped = f"stopped from the notebook after step {self.recorder.step}"
                    break
            done = 0
            if after_steps is not None:
                after_steps()
            row = self.recorder.end_epoch()
            self.validate(row, test)
            if after_epoch is not None:
                after_epoch(row)
            self.end_epoch(row)
        self.finish()

    def resume(self, after_restore: Callable[[], None] | None = None) -> tuple[int, int]:
        """Go on from the checkpoint in the settings, if there is one; all ranks call it, with the model ready to step.

        Parameters
        ----------
        after_restore
            As for `in_step`.

        Returns
        -------
        epoch, steps
            The epoch to begin with, from 0, and its steps that are made already.
        """
        if self._checkpoints is None:
            return 0, 0
        first, done = self._checkpoints.restore()
        if after_restore is not None:
            after_restore()
        rows = self.history.epochs
        if rows and done == 0 and math.isnan(rows[-1].test_loss) and (self.together or self.over.rank == 0):
            self.validate(rows[-1])  # its thread was still at it when the checkpoint was written
        self.history.stopped = self._stopping.reason(rows)
        return first, done

    def validate(self, row: EpochRow, test: Callable[[], tuple[float, float]] | None = None) -> None:
        """Test the model, and put loss and accuracy into `row`, or leave that to the validator's thread.

        All ranks call it, or the master alone. `test` is as in `in_step`.
        """
        if self.settings.validate:
            with self.recorder.timed_test(row):
                self.validator.test(row, test)

    def end_epoch(self, row: EpochRow) -> None:
        """Put an epoch into the history, tell it, write a checkpoint, decide whether to stop (`History.stopped`).

        All ranks call it, or the master alone.
        """
        history, cut_short = self.history, self.history.stopped is not None
        history.epochs.append(row)
        self.collect_tests()
        history.stopped = history.stopped or self._stopping.reason(history.epochs)
        if self.told is not None:
            self.told.epoch(row.line(self.settings.epochs) + (f"  {history.stopped}" if history.stopped else ""))
        if self._checkpoints is not None and not cut_short:
            last = row.epoch == self.settings.epochs or history.stopped is not None
            self._checkpoints.after_epoch(row, last=last)

    def after_update(self) -> None:
        """Write a checkpoint, where it is time by the clock; the master calls it alone."""
        if self._checkpoints is not None:
            self._checkpoints.after_update(len(self.history.epochs))

    def collect_tests(self, outstanding: int | None = None) -> None:
        """Fill in what the validator's thread has found; wait until no more than `outstanding` tests are under way."""
        for row in self.validator.collect(self.history.epochs, outstanding):
            if self.told is not None and row is not self.history.epochs[-1]:
                self.told.epoch(f"epoch {row.epoch}: test loss {row.test_loss:.4f}  accuracy {row.test_accuracy:.2%}")

    def finish(self) -> None:
        """At the end, when there are no more steps: wait for the last test. All ranks call it, or the master alone."""
        if self.settings.validate == "thread" and self.history.epochs:
            with self.recorder.timed_test(self.history.epochs[-1]):
                self.collect_tests(outstanding=0)
        if self._checkpoints is not None:
            self._checkpoints.finish()
