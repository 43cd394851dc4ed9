"""Times each step, adds up each epoch, and tells whoever watches."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labkit.data import Batch
from labkit.telemetry import Emitter

from .history import EpochRow, Steps
from .optimizers import Optimizer
from .transport import Transport

__all__ = ["Recorder", "Result"]


@dataclass(slots=True)
class Result:
    """What a step came to on this rank: its mean loss (NaN without samples), right answers, and staleness.

    `together` has the sum of the losses and the right answers of all ranks' samples, where the step itself added them
    up. If all steps of an epoch did, its end needs no other rank: one that died since has been counted.
    """

    loss: float = math.nan
    right: int = 0
    staleness: int = 0
    together: tuple[float, float] | None = None


class Recorder:
    """Keeps what a run did.

    Parameters
    ----------
    over
        Tells how long this rank waited and moved data; adds up the ranks' sums.
    device
        Where those sums are made.
    emitter
        Gets each step; None: nobody watches.

    Attributes
    ----------
    step
        Steps made since the run began.
    """

    def __init__(self, over: Transport, device: torch.device, emitter: Emitter | None) -> None:
        self.step = 0
        self._over = over
        self._device = device
        self._emitter = emitter
        self._start = time.perf_counter()
        self._rows: list[tuple[float, ...]] = []
        self._mean_losses: list[float] = []
        self._totals: list[int] = []
        self._epoch = self._first = self._right = 0
        self._begun = self._start
        self._together: list[tuple[float, float]] = []

    def begin_epoch(self, epoch: int) -> None:
        """Begin epoch number `epoch`, from 0."""
        self._epoch = epoch
        self._first = len(self._rows)
        self._right = 0
        self._totals = []
        self._together = []
        self._begun = time.perf_counter()

    @contextlib.contextmanager
    def timed_step(self, batch: Batch, optim: Optimizer) -> Iterator[Result]:
        """Time the step in the ``with`` block, which fills in the result."""
        result = Result()
        rate = optim.param_groups[0]["lr"]
        waited, moved = self._over.spent()
        begun = time.perf_counter()
        yield result
        seconds = time.perf_counter() - begun
        now_waited, now_moved = self._over.spent()
        wait_s, transfer_s = now_waited - waited, now_moved - moved
        compute_s = max(0.0, seconds - wait_s - transfer_s)
        samples = len(batch.labels)
        elapsed = time.perf_counter() - self._start
        self._rows.append((result.loss, compute_s, wait_s, transfer_s, samples, rate, result.staleness, elapsed))
        self._totals.append(batch.total)
        self._right += result.right
        if result.together is not None:
            self._together.append(result.together)
        if self._emitter is not None:
            self._emitter.log(
                step=self.step,
                epoch=self._epoch,
                loss=result.loss,
                compute_s=compute_s,
                wait_s=wait_s,
                transfer_s=transfer_s,
                samples=samples,
            )
        self.step += 1

    def end_epoch(self) -> EpochRow:
        """Add up the epoch over all ranks, in at most one all-reduce; the test is still to come. May be repeated."""
        seconds = time.perf_counter() - self._begun
        rows = self._rows[self._first :]
        sums = [loss * samples if samples else 0.0 for loss, _, _, _, samples, *_ in rows]
        if len(self._together) == len(rows):
            all_sums, all_right = [loss for loss, _ in self._together], sum(right for _, right in self._together)
        else:
            mine = torch.tensor([*sums, self._right], dtype=torch.float64, device=self._device)
            self._over.all_reduce(mine)
            *all_sums, all_right = mine.tolist()
        means = [total / n for total, n in zip(all_sums, self._totals, strict=True)]
        self._mean_losses[self._first :] = means
        images, my_images = sum(self._totals), int(sum(row[4] for row in rows))
        return EpochRow(
            epoch=self._epoch + 1,
            steps=len(rows),
            loss=_ratio(sum(all_sums), images),
            accuracy=_ratio(all_right, images),
            rank_loss=_ratio(sum(sums), my_images),
            rank_accuracy=_ratio(self._right, my_images),
            seconds=seconds,
            images_per_s=_ratio(images, seconds),
            time_s=time.perf_counter() - self._start,
        )

    def end_own_epoch(self) -> None:
        """End an epoch in which each rank makes steps of its own: no rank's step belongs to another's."""
        self._mean_losses += [row[0] for row in self._rows[self._first :]]

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def timed_test(self, row: EpochRow) -> Iterator[None]:
        """Time the test in the ``with`` block, or a part of it."""
        begun = time.perf_counter()
        yield
        row.test_seconds += time.perf_counter() - begun
        row.time_s = self.elapsed

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the steps so far, and how far the epoch is."""
        now = time.perf_counter()
        return {
            "rows": torch.tensor(self._rows, dtype=torch.float64),
            "mean_losses": torch.tensor(self._mean_losses, dtype=torch.float64),
            "totals": torch.tensor(self._totals, dtype=torch.int64),
            "step": self.step,
            "epoch": self._epoch,
            "first": self._first,
            "right": self._right,
            "elapsed_s": now - self._start,
            "epoch_elapsed_s": now - self._begun,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, as if no time had passed since."""
        now = time.perf_counter()
        self._rows = [tuple(row) for row in state["rows"].tolist()]
        self._mean_losses, self._totals = state["mean_losses"].tolist(), state["totals"].tolist()
        self.step, self._epoch = state["step"], state["epoch"]
        self._first, self._right = state["first"], state["right"]
        self._start, self._begun = now - state["elapsed_s"], now - state["epoch_elapsed_s"]

    def steps(self) -> Steps:
        """Return all steps of the epochs that ended."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, 8)
        return Steps(np.array(self._mean_losses), *rows.T)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
