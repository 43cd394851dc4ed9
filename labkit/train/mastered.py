"""A training run with a master: who does what, and what all ranks have at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from labkit import comm
from labkit.data import DatasetLike

from .exchange import Channel
from .flat import FlatGradients
from .flat_weights import FlatWeights
from .history import History
from .loop import Run
from .master import Master
from .replicas import TrainError
from .roles import assign
from .rule import MakeRule
from .settings import SettingError, Settings
from .submaster import SubMaster
from .synchronous import sync_initial_weights
from .transport import Alone, MPITransport, Transport
from .work import Worker, own_mean

__all__ = ["at_least_one", "train_with_master"]


def train_with_master(
    method: str,
    model: nn.Module,
    dataset: DatasetLike,
    settings: Settings,
    own: dict[str, Any],
    rule: MakeRule,
    *,
    sync_every: int = 1,
    every_batch: bool = False,
    ranks_per_worker: int = 1,
    masters: int = 1,
    sync_every_masters: int = 1,
    master: Callable[..., Master] = Master,
) -> History:
    """Train with rank 0 as the master and the others as its workers; all ranks call it alike.

    Parameters
    ----------
    method, model, dataset, settings, own
        As for `Run`.
    rule
        Makes what the method computes.
    sync_every, every_batch
        As for `Worker`.
    ranks_per_worker
        Ranks that share each worker's batch.
    masters
        More than 1: so many under rank 0.
    sync_every_masters
        Updates of such a master from one push to rank 0 to the next.
    master
        What rank 0 is, when it is the only one.

    Returns
    -------
    History
        Of the same epochs on all ranks, and of each rank's own steps; a master has none.

    Raises
    ------
    TrainError
        On all ranks, when there are too few, or what carries the tensors cannot receive from any rank.
    """
    over = settings.transport
    group = group_of(method, over)
    role = assign(method, over.rank, over.size, masters, ranks_per_worker)
    ranks = role.workers * ranks_per_worker
    with Run(method, model, dataset, settings, own, computing=(role.place, ranks)) as run:
        sync_initial_weights(model, run.over)
        channel = Channel(group.dup())
        part = group.split(None if role.worker < 0 else role.worker) if ranks_per_worker > 1 else None
        team: Transport = MPITransport(part) if part else Alone()
        weights, gradients = FlatWeights(model), FlatGradients(model)
        rows: dict[int, tuple[float, float]] = {}
        first, _ = run.resume()
        try:
            what = rule(run, weights, gradients, role)
            if role.worker >= 0:
                worker = Worker(
                    run,
                    channel,
                    what,
                    role,
                    team,
                    gradients,
                    weights.statistics,
                    sync_every=sync_every,
                    every_batch=every_batch,
                )
                worker.train(first)
                rows = {epoch + 1: own_mean(sums) for epoch, sums in worker.own.items()}
            elif role.top:
                batches = -(-run.dataset.samples // (ranks * run.batch_size)) * role.workers
                master(run, channel, what, weights.statistics, role.children, batches).serve()
            else:
                SubMaster(run, channel, what, weights, role, sync_every_masters).serve()
            for tensor in (*weights.buffers, *weights.statistics):
                run.over.broadcast(tensor)
        finally:
            run.history.copies = gradients.copies
            gradients.release()
            weights.release()
        _share(run, rows)
        channel.group.free()
        if part:
            part.free()
    return run.history


def group_of(method: str, over: Transport) -> comm.Communicator:
    """Return the communicator of those that train.

    Raises
    ------
    TrainError
        When `over` is none of MPI's.
    """
    if isinstance(over, MPITransport):
        return over.group or comm.world()
    if isinstance(over, Alone):
        raise TrainError(
            f"{method} needs a master and workers, and this is one process: start several ranks, for example "
            'labkit.start(ranks=4) or labkit train --world-size 4, or train with "single"'
        )
    raise TrainError(
        f"{method} needs labkit's MPI, since its master receives from whichever worker comes first, and this run goes "
        f'over {over.name}: leave out over=, or give a communicator (train alone with "single")'
    )


def at_least_one(**numbers: int) -> None:
    """Raise SettingError unless all are whole numbers of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, not {number!r}")


def _share(run: Run, rows: dict[int, tuple[float, float]]) -> None:
    """Give all ranks the master's epochs, each with this rank's own figures in it."""
    history = run.history
    known = (history.epochs, history.stopped, history.settings) if run.over.rank == 0 else None
    told: Sequence[Any] = run.over.all_gather_object(known)[0]
    if run.over.rank == 0:
        return
    epochs, history.stopped, settings = told
    history.epochs = []
    history.settings = settings | {"device": history.settings["device"]}
    for row in epochs:
        loss, accuracy = rows.get(row.epoch, own_mean(None))
        history.epochs.append(dataclasses.replace(row, rank_loss=loss, rank_accuracy=accuracy))
