"""Elastic synchronous SGD: goes on when a rank dies, and takes it back.

The steps of an epoch are fixed beforehand: global batches, the same whoever is there. The ranks that are left share
out what a dead one would have taken, so the training is, but for rounding, the one that nothing had disturbed.

What happens when a rank dies in the middle of a step:

- the others' calls end with an error, or with a result: some may have the step's gradient, and others not;
- they come together (`labkit.comm.survivors`), tell each other how many updates each has made, and take the weights
  and the optimizer's state of the one that has made most (`labkit.train.elastic_state.meeting_point`, which says why
  no step is lost or counted twice). Nothing has to be undone, and a step without a death
  costs no more than one small all-reduce, of the ranks' losses;
- if none has made the step, they make it again, with the batch shared out anew.

A rank that is new, or was started again by ``lab.heal()``, comes in the same way: it has made no update at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from labkit import comm
from labkit.data import Batch, Dataset, DatasetLike, ShardFeed, as_dataset

from .elastic_state import ElasticState, Reached, meeting_point
from .flat import FlatGradients
from .history import EpochRow, History
from .loop import Run
from .methods import method
from .progress import Progress
from .recorder import Result
from .replicas import TrainError, replica_differences
from .settings import SettingError, Settings
from .transport import MPITransport
from .validation import validate_shared

__all__ = ["elastic"]


@method("elastic")
def elastic(model: nn.Module, dataset: DatasetLike, *, resume: ElasticState | None = None, **settings: Any) -> History:
    """Train `model` on all ranks together, and go on with the others when one dies; all ranks call it alike.

    As long as nobody dies this is `labkit.train.synchronous`. The global batch, ``batch_size`` times the number of
    ranks at the beginning, stays the same: with fewer ranks each takes more of it.

    Parameters
    ----------
    model
        This rank's replica; changed in place and moved to the device.
    dataset
        The same on all ranks, in memory: the ranks that are left share it out anew.
    resume
        Where the training stands. With an `ElasticState` that was used before, it goes on from there: after
        ``lab.heal()``, where a rank that was started again has an empty one and gets weights, optimizer and step from
        the others, or with more ``epochs`` than before. Make it in a setup cell, which such a rank runs by itself.
    **settings
        Those of `labkit.train.Settings`; ``over`` may be what `labkit.comm.survivors` returned.

    Returns
    -------
    History
        Its `changes` say which ranks trained from which step on.

    Raises
    ------
    TrainError
        On all ranks: where the MPI ends all ranks when one dies, when they were called with different things, or when
        `resume` belongs to another training.
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    """
    common = Settings.of("elastic", settings, ("resume",))
    over = common.transport
    if not isinstance(over, MPITransport):
        raise SettingError(f"elastic training needs labkit's own MPI communication, not {over.name}")
    if common.checkpoint is not None or common.restore or common.validate in ("inline", "thread"):
        raise SettingError(
            "elastic training has no checkpoint and no restore (go on with resume=), and every rank tests its part: "
            'validate=True, "distributed" or False'
        )
    group = over.group or comm.world()
    from labkit.comm import surviving  # not before: it starts MPI

    if group.size > 1 and not surviving.can_survive():
        raise TrainError(
            "elastic training needs an MPI whose ranks survive another one's death. Cure: Open MPI from version 5 on, "
            "started by mpiexec --with-ft ulfm (labkit.start() and labkit train do so), or train.synchronous."
        )
    dataset = as_dataset(dataset)
    if not isinstance(dataset, Dataset) or dataset.weights:
        raise SettingError(
            "elastic training shares the samples out equally among those that are left, so they must be in memory and "
            f"without weights; {dataset.name} is not: use data.load or data.from_tensors"
        )
    run = Run("elastic", model, dataset, common, {"resume": resume is not None})
    with run:
        training = _Elastic(run, group, resume or ElasticState())
        with surviving.bearing():
            training.train()
    return run.history


class _AgainError(Exception):
    """A step has not been made; it is to be made again."""


class _Elastic:
    """One training as one rank sees it."""

    def __init__(self, run: Run, group: comm.Communicator, state: ElasticState) -> None:
        self.run, self.group, self.state = run, group, state
        assert isinstance(run.over, MPITransport) and isinstance(run.feed, ShardFeed)
        self.over = run.over
        self.samples, self.shard = run.feed.samples, run.feed.shard
        self.fresh = True
        """Whether the ranks of the group have yet to agree where they are."""
        self.closed = False
        self.epoch = -1
        self.row: EpochRow | None = None
        named = ("model", "dataset", "optimizer", "loss", "seed")
        training = {name: run.history.settings[name] for name in named}
        wrong = [name for name, value in state.training.items() if training[name] != value]
        self.refused = "".join(
            f"{name} was {state.training[name]}, is {training[name]}. Give a new train.ElasticState(). "
            for name in wrong
        )
        self.training = training
        if state.optimizer is not None and not wrong:
            run.optim.load_state_dict(state.optimizer)

    def train(self) -> None:
        """Train to the end, whoever dies."""
        from labkit.comm.surviving import part

        try:
            while True:
                try:
                    if self.fresh:
                        self.meet()
                    self.epochs()
                    self.run.collect()
                except comm.CommError as error:
                    self.lose(error)
                    continue
                left = part(self.group)
                if left is None:
                    break
                self.go_on_as(left)
        finally:
            self.state.optimizer = self.run.optim.state_dict()
            for parameter in self.run.model.parameters():
                parameter.grad = None

    # ---- losing ranks, and coming together ------------------------------------------------------------------------

    def lose(self, error: comm.CommError) -> None:
        """Go on without the ranks that have died; raise `error` if it comes of something else."""
        from labkit.comm.surviving import death_in

        if not death_in(self.group):
            raise error
        self.go_on_as(comm.survivors(self.group))

    def go_on_as(self, left: comm.Communicator) -> None:
        """Communicate as `left` from now on."""
        run = self.run
        self.group = self.over.group = left
        self.fresh = True
        if left.rank == 0 and run.settings.progress and run.told is None:  # the one that told it has died
            run.told = run.settings.progress if isinstance(run.settings.progress, Progress) else Progress()

    def meet(self) -> None:
        """Come to the same step with the same weights on all ranks of the group, and share out the data anew."""
        run, state, group = self.run, self.state, self.group
        mine = Reached(
            state.done,
            state.tested,
            state.whole,
            state.global_batch,
            run.history.stopped or "",
            self.closed,
            self.refused,
        )
        reports = self.over.all_gather_object(mine)
        point = meeting_point(reports)
        if any((report.done, report.whole, report.global_batch > 0) != (point.done, True, True) for report in reports):
            given = None
            if group.rank == point.source:
                given = run.model.state_dict(), run.optim.state_dict()
            weights, optimizer = comm.broadcast_object(given, point.source, group=group)
            state.whole = False
            run.model.load_state_dict(weights)
            run.optim.load_state_dict(optimizer)
        state.training = self.training
        state.global_batch = point.global_batch or self.shard.batch_size * group.size
        state.done, state.tested, state.whole, self.closed = point.done, point.tested, True, point.closed
        run.history.stopped = run.history.stopped or point.stopped or None
        shard = dataclasses.replace(self.shard, rank=group.rank, size=group.size, global_batch=state.global_batch)
        run.feed = self.feed = ShardFeed(self.samples, shard)
        self.gradients = FlatGradients(run.model, self.over)
        run.history.changed(run.recorder.step, list(group.members), run.recorder.elapsed)
        self.fresh = False

    # ---- steps and epochs --------------------------------------------------------------------------------------------

    def epochs(self) -> None:
        """Make all steps that are left, and test after each epoch."""
        state, run = self.state, self.run
        while state.tested < run.settings.epochs and not self.closed:
            epoch, step = divmod(state.done, self.feed.steps)
            if epoch > state.tested or run.history.stopped is not None:
                self.close(state.tested, whole=epoch > state.tested)
                continue
            if self.epoch != epoch:
                run.recorder.begin_epoch(epoch)
                self.epoch = epoch
            run.model.train()
            self.steps(epoch, step)

    def steps(self, epoch: int, first: int) -> None:
        """Make the steps of an epoch from `first` on, until its end, a death or the Stop button."""
        run, state, group = self.run, self.state, self.group
        for batch in self.feed.epoch(epoch, first):
            number = state.done
            try:
                with run.recorder.timed_step(batch, run.optim) as result:
                    stop = self.step_whoever_dies(batch, result)
                    if state.done == number:
                        raise _AgainError
            except _AgainError:
                return
            if run.told is not None:
                done = state.done - epoch * self.feed.steps
                run.told.step(epoch + 1, run.settings.epochs, done, self.feed.steps, result.loss)
            if stop:
                run.history.stopped = f"stopped from the notebook after step {run.recorder.step}"
            if self.group is not group or stop:
                return

    def step_whoever_dies(self, batch: Batch, result: Result) -> bool:
        """Make a step, or see it made by others, or find that nobody has made it; returns whether to stop."""
        before = [buffer.clone() for buffer in self.run.model.buffers()]
        number = self.state.done
        try:
            self.step(batch, result)
            # A death in here is seen after the update, and the step is counted.
            return self.run.wishes.stop()
        except comm.CommError as error:
            problem = error
        if self.state.done == number:  # such as a batch norm's running mean, which forward has moved
            for buffer, old in zip(self.run.model.buffers(), before, strict=True):
                buffer.copy_(old)
        while True:
            self.lose(problem)
            try:
                self.meet()
                return False
            except comm.CommError as error:  # another death
                problem = error

    def step(self, batch: Batch, result: Result) -> None:
        """One step of synchronous SGD, in which all ranks' losses are added up as well."""
        run, state, over = self.run, self.state, self.over
        self.gradients.zero()
        samples = len(batch.labels)
        weight = samples * over.size / batch.total
        result.loss, result.right = run.forward_and_backward(batch, weight=weight)
        sums = torch.tensor([result.loss * samples if samples else 0.0, result.right, samples], dtype=torch.float64)
        over.all_reduce(sums)
        loss, right, seen = sums.tolist()
        if seen != batch.total:
            raise TrainError(f"the ranks took {seen:g} samples of a batch of {batch.total}: their data sets differ")
        result.together = loss, right
        self.gradients.all_reduce(over)
        state.whole = False
        run.optim.step()
        state.done += 1
        state.whole = True

    def close(self, epoch: int, *, whole: bool) -> None:
        """End an epoch, or what there is of it. After a death in the middle of this, all do it again."""
        run = self.run
        if self.row is None or self.row.epoch != epoch + 1:
            if self.epoch != epoch:  # this rank has just come, and was there for none of its steps
                run.recorder.begin_epoch(epoch)
            self.row = run.recorder.end_epoch()
        row = self.row
        if run.settings.validate:
            with run.recorder.timed_test(row):
                row.test_loss, row.test_accuracy = validate_shared(run.model, run.test, run.criterion, self.over)
        row.replica_difference = max(replica_differences(run.model, self.over))
        rows = run.history.epochs
        if rows and rows[-1].epoch == row.epoch:
            rows.pop()
        run.end_epoch(row)
        if whole:
            self.state.tested = epoch + 1
        self.closed = run.history.stopped is not None
