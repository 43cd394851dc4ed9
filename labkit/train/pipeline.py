"""Pipeline parallelism: each rank has some of the layers, and parts of a batch go through the ranks in turn.

What the ranks exchange are the activations between two stages and their gradients, however large the layers are. While
one rank works on a micro-batch the next works on the one before; at the start and at the end of each step some have
nothing to do (see `labkit.train.schedules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from labkit import comm
from labkit.data import Batch, DatasetLike, share

from .history import History
from .loop import Run
from .methods import method
from .models import check_log_probabilities
from .pieces import Piece, pieces_of
from .ranks import CommonFeed, Ranks, ranks_of, whole_feed
from .schedules import SCHEDULES
from .settings import SettingError, Settings
from .stages import PipelineStage, broadcast_stages, stages_of
from .synchronous import sync_initial_weights
from .transport import Alone, MPITransport

__all__ = ["pipeline"]


@method("pipeline")
def pipeline(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    cut: Sequence[int] | None = None,
    **settings: Any,
) -> History:
    """Train `model` with its layers spread over the ranks, one stage each; all ranks call it alike.

    R ranks with batch size B take the same steps as one rank with R·B: the R·B samples of a step go through all
    stages, and each rank counts B of them as its own. Layers that mix the samples of a batch (BatchNorm) see one
    micro-batch at a time.

    A rank is idle at least (R − 1)/(m + R − 1) of a step with m micro-batches (`schedules.bubble_share`), more where
    stages differ: the steps' ``wait_s`` has it, measured.

    Parameters
    ----------
    model
        The same on all ranks; changed in place and moved to the device. It gets rank 0's weights before the first
        epoch, and after each what the ranks have learnt, put together. An ``nn.Sequential``, or any model whose
        forward is a fixed list of operations (`labkit.train.pieces`).
    dataset
        The same on all ranks.
    micro_batches
        How many to cut the samples of a step into; default: 4 a rank, so that ranks are idle 1/5 of the time at most.
    schedule
        ``"gpipe"``: all forward, then all backward; ``"1f1b"``: backward as soon as possible, with activations of
        fewer micro-batches kept.
    cut
        With which pieces (numbers from 1; `labkit.train.pieces.pieces_of` shows them) the second rank's stage begins,
        the third's, …; default: such that all have about as much to multiply.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` and the others of `labkit.train.Settings`.

    Returns
    -------
    History
        Times and losses by step, results by epoch. A rank's loss is that of all samples of the step. Its settings
        tell each rank's ``stages``, and how many micro-batches' activations this rank ``kept`` at most.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when they were called with different things or the model cannot be cut.
    KeyboardInterrupt
        When interrupted; each rank's model has the weights it had reached in its own stage, and in the others those
        of the last epoch that ended.
    """
    common = Settings.of("pipeline", settings, ["micro_batches", "schedule", "cut"])
    if schedule not in SCHEDULES:
        raise SettingError(f'schedule must be "gpipe" or "1f1b", not {schedule!r}')
    over = ranks_of(common.transport, "pipeline")
    micro_batches = 4 * over.size if micro_batches is None else micro_batches
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise SettingError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r}")
    own = {"micro_batches": micro_batches, "schedule": schedule, "cut": None if cut is None else list(cut)}
    with Run("pipeline", model, dataset, common, own) as run, _channel(over) as channel:
        sync_initial_weights(model, over)
        stages = stages_of(_pieces(run), over.size, cut)
        stage = PipelineStage(stages, SCHEDULES[schedule], run.criterion, channel)
        feed = run.feed = CommonFeed(whole_feed(run), over.rank, over.size)
        told = torch.zeros(1 + over.size, dtype=torch.float64, device=run.device)  # loss, and right answers by rank

        def step(batch: Batch) -> tuple[float, int]:
            for parameter in model.parameters():
                parameter.grad = None
            images, labels, n = feed.whole
            with run.slowed:
                loss, right = stage.step(images.to(run.dtype) if over.rank == 0 else images, labels, micro_batches)
            run.optim.step()
            if len(right):
                told[0] = loss
                told[1:] = torch.stack([right[slice(*share(n, r, over.size))].sum() for r in range(over.size)])
            over.broadcast(told, src=over.size - 1)
            return float(told[0]), int(told[1 + over.rank])

        def put_together() -> None:
            broadcast_stages(stages, over)

        run.in_step(step, after_steps=put_together, after_restore=put_together)
        run.history.settings |= {
            "stages": [[piece.name for piece in each] for each in stages],
            "kept": stage.kept,
        }
    return run.history


@contextmanager
def _channel(over: Ranks) -> Iterator[Ranks]:
    """The same ranks on a communicator of their own: messages of an interrupted step stay there."""
    if isinstance(over, Alone):
        yield over
        return
    group = (over.group or comm.world()).dup()
    yield MPITransport(group)
    group.free()  # not after an error, which may have come on this rank alone


def _pieces(run: Run) -> list[Piece]:
    sample = torch.zeros((1, *run.test.images.shape[1:]), dtype=run.dtype, device=run.device)
    if run.settings.loss is None:
        run.model.eval()
        with torch.no_grad():
            check_log_probabilities(run.model(sample))  # on all ranks: later the last alone sees an output
        run.model.train()
    return pieces_of(run.model, sample)
