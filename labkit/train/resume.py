"""What a run's checkpoint holds, when it is written, and how a run goes on from it.

A run that goes on from a checkpoint makes, bit for bit, the steps that it would have made: the checkpoint holds the
weights, the optimizer, and of each rank the random numbers, the history so far, and whatever tensors of its replica
are not those of rank 0 (statistics of batch normalisation, replicas that were let drift).

Where a master serves workers that step on their own, it holds the master's weights and optimizer and the epoch. The
workers begin that epoch with those weights, which is near to what they would have done, but not the same bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import CheckpointError, Every, find
from .checkpoint_folder import CheckpointFolder
from .history import EpochRow
from .random_numbers import RandomNumbers
from .replicas import TrainError

if TYPE_CHECKING:
    from .loop import Run

__all__ = ["Checkpoints"]

OPTIMIZER_SHARE = 2
"""Tensors that an optimizer keeps for each parameter, at most, in the estimate of a checkpoint's size."""


class Checkpoints:
    """A run's checkpoints; made inside of the run, by all ranks together.

    Parameters
    ----------
    run
        The run. Where it has a master, its rank 0 alone calls `after_update` and `after_epoch`; all else is called by
        all ranks.

    Raises
    ------
    CheckpointError
        On all ranks, when rank 0 could not write, or there is nothing to go on from.
    """

    def __init__(self, run: Run) -> None:
        settings = run.settings
        self._run = run
        self._random = RandomNumbers(run.device)
        self._every = Every.parse(settings.checkpoint_every)
        self._found: tuple[dict[str, Any], Path] | None = None
        self._folder: CheckpointFolder | None = None
        problem = None
        if not hasattr(run.optim, "state_dict") or not hasattr(run.optim, "load_state_dict"):
            raise CheckpointError(
                f"{type(run.optim).__name__} has no state_dict and load_state_dict, which a checkpoint needs: write "
                "them as train.SGD does, or train without checkpoint and restore"
            )
        if run.over.rank == 0:
            try:
                self._open()
            except TrainError as error:
                problem = error
        try:
            _raise_everywhere(run, problem)
        except BaseException:
            self.close()
            raise
        self._written = time.monotonic()
        self._due = torch.zeros(1, dtype=torch.float64, device=run.device)

    def restore(self) -> tuple[int, int]:
        """Bring everything to where the checkpoint was written; return the epoch (from 0), and its steps made."""
        run = self._run
        found = run.over.all_gather_object(self._found)[0]
        if found is None:
            return 0, 0
        content, path = found
        own = content["ranks"][run.over.rank if run.together else 0]
        run.model.load_state_dict(content["model"] | own["model"])
        if run.together or run.over.rank == 0:  # workers' optimizers begin anew
            run.optim.load_state_dict(content["optimizer"] if own["optimizer"] is None else own["optimizer"])
        run.history.epochs = [EpochRow(**row) for row in own["epochs"]]
        run.history.settings["restored"] = f"{path}, after epoch {content['epoch']}, step {content['step']}"
        if run.together:
            run.recorder.load_state(own["recorder"])
            self._random.load(own["random"])
        self._found = None
        return int(content["epoch"]), int(content["step"])

    def after_step(self, epoch: int, steps: int, *, stop: bool) -> None:
        """After `steps` steps of `epoch` (from 0): write where it is time, by rank 0's clock, or training stops."""
        if self._run.settings.checkpoint is None:
            return
        if self._every.seconds is not None and not stop:
            self._due[0] = time.monotonic() - self._written >= self._every.seconds
            self._run.over.broadcast(self._due)
        if stop or self._due[0]:
            self.write(epoch, steps)

    def after_update(self, epoch: int) -> None:
        """After an update of a master's weights, within `epoch` (from 0): write where it is time."""
        due = self._every.seconds is not None and time.monotonic() - self._written >= self._every.seconds
        if due and self._folder is not None:
            self.write(epoch, 0, within=True)

    def after_epoch(self, row: EpochRow, *, last: bool) -> None:
        """After an epoch whose row is in the history: write where it is time; `last`: always."""
        if self._run.settings.checkpoint is None:
            return
        self._keep_best()  # a result that came late may be of the one that is now the latest
        if self._every.epochs is not None:
            due = row.epoch % self._every.epochs == 0
        else:  # the best is kept whenever it comes
            scores = self._scores()
            due = row.epoch in scores and scores[row.epoch] == max(scores.values())
        if due or last:
            self.write(row.epoch, 0)
            self._keep_best()

    def finish(self) -> None:
        """At the run's end, when all test results are known."""
        if self._run.settings.checkpoint is not None:
            self._keep_best()

    def write(self, epoch: int, steps: int, *, within: bool = False) -> None:
        """Write a checkpoint from which a run goes on with epoch number `epoch` (from 0) after `steps` steps of it.

        `within`: the weights have seen more of that epoch than `steps` says, and are not those that were tested.
        """
        run = self._run
        # Results of earlier epochs, which a run that goes on could not compute again.
        run.collect_tests(outstanding=1 if steps == 0 else 0)
        content = self._gather()
        if self._folder is not None and content is not None:
            try:
                self._folder.write(content | {"epoch": epoch, "step": steps}, None if steps or within else epoch)
            except OSError as error:
                self._warn(f"after epoch {epoch}, step {steps}", error)
        self._written = time.monotonic()

    def close(self) -> None:
        """Let another run write to the folder."""
        if self._folder is not None:
            self._folder.close()

    def _open(self) -> None:
        """Rank 0 looks for what to go on from, and whether it can write."""
        settings, path = self._run.settings, self._run.settings.restore_path()
        if path is not None:
            content, file, problem = find(path)
            if problem:
                warnings.warn(
                    f"{problem}. Training goes on from {file.name}, after epoch {content['epoch']}, "
                    f"step {content['step']}.",
                    stacklevel=5,
                )
            self._check(content, file)
            self._found = content, file
        if settings.checkpoint is None:
            return
        weights: list[Tensor] = [*self._run.model.parameters(), *self._run.model.buffers()]
        needed = (1 + OPTIMIZER_SHARE) * sum(tensor.numel() * tensor.element_size() for tensor in weights)
        folder = Path(settings.checkpoint)
        here = self._found is not None and self._found[1].resolve().parent == folder.resolve()
        self._folder = CheckpointFolder(folder, needed, going_on=here)
        if here and self._found is not None:
            content, file = self._found
            self._folder.know(file.name, content["epoch"] if content["step"] == 0 else None)
            self._folder.put_damaged_aside()

    def _check(self, content: dict[str, Any], file: Path) -> None:
        """Refuse a checkpoint of another training."""
        here, there = self._described(), content["described"]
        names = [name for name in here | there if here.get(name) != there.get(name)]
        if names:
            lines = "\n".join(f"  {name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in names)
            raise CheckpointError(
                f"{file} is a checkpoint of another training:\n{lines}\nTrain with the same settings; or to begin a "
                f"new training with its weights, model.load_state_dict(train.load_checkpoint({str(file)!r})['model'])."
            )

    def _described(self) -> dict[str, Any]:
        run = self._run
        without = {*run.settings.around(), "check_replicas"}
        kept = {name: value for name, value in run.described.items() if name not in without}
        plain = {k: v if v is None or isinstance(v, bool | int | float | str) else repr(v) for k, v in kept.items()}
        return plain | {"world_size": run.over.size}

    def _gather(self) -> dict[str, Any] | None:
        """Return a checkpoint's content on rank 0; elsewhere None."""
        run = self._run
        model, optimizer = run.model.state_dict(), run.optim.state_dict()
        mine: dict[str, Any] = {"model": {}, "optimizer": None, "epochs": [asdict(row) for row in run.history.epochs]}
        if run.together:
            mine |= {"recorder": run.recorder.state(), "random": self._random.state()}
        if run.together and run.over.size > 1:
            digests = {name: digest(value) for name, value in model.items()}, digest(optimizer)
            models, optimizers = run.over.all_gather_object(digests)[0]
            mine["model"] = {
                name: on_cpu(value) for name, value in model.items() if models.get(name) != digests[0][name]
            }
            mine["optimizer"] = None if optimizers == digests[1] else on_cpu(optimizer)
        ranks = run.over.all_gather_object(mine) if run.together else [mine]
        if run.over.rank != 0:
            return None
        return {
            "described": self._described(),
            "versions": run.history.versions,
            "model": on_cpu(dict(model)),
            "optimizer": on_cpu(optimizer),
            "ranks": ranks,
        }

    def _scores(self) -> dict[int, float]:
        """How good the weights were after each epoch for which it is known; more is better."""
        rows, found = self._run.history.epochs, {}
        for row in rows:
            of_test = -row.test_loss if math.isnan(row.test_accuracy) else row.test_accuracy
            score = of_test if self._run.settings.validate else -row.loss
            if not math.isnan(score):
                found[row.epoch] = score
        return found

    def _keep_best(self) -> None:
        if self._folder is not None:
            try:
                self._folder.keep_best(self._scores())
            except OSError as error:
                self._warn("of the best epoch", error)

    def _warn(self, which: str, error: OSError) -> None:
        warnings.warn(
            f"the checkpoint {which} could not be written to {self._run.settings.checkpoint}: {error.strerror}. "
            "Training goes on; the checkpoint before it is still there.",
            stacklevel=5,
        )


def digest(thing: Any) -> bytes:
    """Return a checksum of tensors, and of dicts, lists and tuples of them."""
    sha = hashlib.sha256()
    if isinstance(thing, Tensor):
        sha.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        sha.update(thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(thing, dict):
        for name, value in thing.items():
            sha.update(repr(name).encode() + digest(value))
    elif isinstance(thing, list | tuple):
        for value in thing:
            sha.update(digest(value))
    else:
        sha.update(repr(thing).encode())
    return sha.digest()


def on_cpu(thing: Any) -> Any:
    """Return the same with all tensors in ordinary memory."""
    if isinstance(thing, Tensor):
        return thing.detach().cpu()
    if isinstance(thing, dict):
        return {name: on_cpu(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(on_cpu(value) for value in thing)
    return thing


def _raise_everywhere(run: Run, problem: TrainError | None) -> None:
    """Raise rank 0's error on all ranks."""
    text = run.over.all_gather_object(None if problem is None else str(problem))[0]
    if problem is not None:
        raise problem
    if text is not None:
        raise CheckpointError(f"rank 0: {text}")
