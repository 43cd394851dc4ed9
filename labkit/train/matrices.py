"""Scatter, gather, broadcast: the root deals out the samples, collects the gradients, and sends the new weights.

The way of parallel programs before all-reduce was common: the root alone updates. One iteration, over a batch of M
samples and R ranks:

1. the root scatters the images and labels, M/R to each rank (`ScatteredFeed`);
2. each rank computes forward and backward on its part (`labkit.train.plain_network`);
3. the root gathers the gradients and adds them up (`collect`);
4. the root updates its weights;
5. the root broadcasts them (`broadcast_weights`).

With G bytes of gradients the root receives (R − 1)·G when it gathers, one part after the other; a reduction adds them
up on their way in a tree, so that no rank takes in more than about log₂R·G.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit import comm
from labkit.data import Batch, DatasetLike, Feed, as_dataset, share

from .history import History
from .loop import Run
from .methods import method
from .plain_network import PlainNetwork
from .ranks import Ranks, ranks_of, whole_feed
from .settings import SettingError, Settings
from .transport import Alone

__all__ = ["GATHERS", "ScatteredFeed", "broadcast_weights", "collect", "matrices", "scatter"]

GATHERS = ("gather", "reduce")
"""Ways in which the gradients come to the root."""
ROOT = 0


def scatter(part: Tensor, whole: Tensor | None, over: Ranks) -> None:
    """Fill each rank's `part` with its rows of the root's `whole`, as even as they can be cut.

    Parameters
    ----------
    part
        This rank's. As for MPI's Scatterv, it has as many rows as will come: ``share(M, rank, R)`` of `labkit.data`.
    whole
        At the root, M rows; elsewhere not used.
    over
        The ranks.
    """
    if isinstance(over, Alone):
        assert whole is not None
        part.copy_(whole)
        return
    parts = None
    if whole is not None:
        parts = [whole[slice(*share(len(whole), rank, over.size))].to(part.dtype) for rank in range(over.size)]
    comm.scatterv(part, parts, src=ROOT, group=over.group)


def collect(gradients: Sequence[Tensor], way: str, over: Ranks) -> None:
    """Add up all ranks' gradients in those of the root; the other ranks keep theirs.

    Parameters
    ----------
    gradients
        Of the same shapes on all ranks.
    way
        ``"gather"``: the root receives every rank's and adds them; ``"reduce"``: they are added up on their way.
    over
        The ranks.
    """
    if isinstance(over, Alone):
        return
    for gradient in gradients:
        if way == "reduce":
            comm.reduce(gradient, dst=ROOT, op="sum", group=over.group)
            continue
        everybody = comm.gather(gradient, dst=ROOT, group=over.group)
        if everybody is not None:
            for theirs in everybody[1:]:  # its own it has already
                gradient += torch.as_tensor(theirs, device=gradient.device)


def broadcast_weights(network: PlainNetwork, over: Ranks) -> None:
    """Give every rank the root's weights."""
    for matrix in network.matrices:
        over.broadcast(matrix, src=ROOT)


class ScatteredFeed:
    """Batches that lie at the root alone, until `scatter` gives each rank its part.

    Parameters
    ----------
    feed
        At the root, hands out whole batches; elsewhere None.
    n, batch_size
        Samples of an epoch and of a whole batch. All ranks know them: each has room for its part before it comes.
    shape, dtype, device
        Of one image, and where this rank's parts are to lie.
    over
        The ranks.
    """

    together = True
    missing = 0

    def __init__(
        self,
        feed: Feed | None,
        n: int,
        batch_size: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        over: Ranks,
    ) -> None:
        self._feed, self._n, self._batch_size, self._over = feed, n, batch_size, over
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._whole: Batch | None = None
        self._scattered: Batch | None = None

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-self._n // self._batch_size)

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Go through epoch `number`, beginning with batch `first`: room for this rank's part of each.

        Where a batch has all samples it is scattered once, in the first epoch's order, which is as good as any.
        """
        wholes = None if self._feed is None else self._feed.epoch(0 if self.steps == 1 else number, first)
        for begin in range(first * self._batch_size, self._n, self._batch_size):
            if self.steps == 1 and self._scattered is not None:
                yield self._scattered
                continue
            total = min(self._batch_size, self._n - begin)
            mine, end = share(total, self._over.rank, self._over.size)
            images = torch.empty((end - mine, *self._shape), dtype=self._dtype, device=self._device)
            self._whole = None if wholes is None else next(wholes)
            yield Batch(images, torch.empty(end - mine, dtype=torch.int64, device=self._device), total)

    def scatter(self, batch: Batch) -> None:
        """Fill `batch`, which `epoch` has handed out, from the root; all ranks call it together."""
        if batch is not self._scattered:
            scatter(batch.images, self._whole and self._whole.images, self._over)
            scatter(batch.labels, self._whole and self._whole.labels, self._over)
            self._scattered, self._whole = batch, None


@method("matrices")
def matrices(
    model: nn.Module,
    dataset: DatasetLike,
    *,
    gather: str = "gather",
    batch_size: int | str | None = None,
    **settings: Any,
) -> History:
    """Train fully connected layers with plain matrices, by scatter, gather and broadcast; all ranks call it alike.

    R ranks with batch size B take the same steps as one rank with R·B. Only the root, rank 0, reads training samples
    and has an optimizer.

    The defaults train ``train.DNN()`` on MNIST to 97 % in 160 iterations with all samples in each. The textbook's
    recipe of 60 iterations at a learning rate of 0.1 is ``lr=0.1, momentum=0``.

    Parameters
    ----------
    model
        Linear layers with sigmoids between them and log_softmax at the end, such as ``train.DNN()``: its weights are
        the matrices, changed in place. It gets the root's before the first iteration.
    dataset
        The same on all ranks.
    gather
        ``"gather"``: the root receives the gradients of all ranks and adds them up; ``"reduce"``: they are added up
        on their way.
    batch_size
        Samples of one rank in an iteration, as in `labkit.train.Settings`; default: all, spread over the ranks.
    **settings
        Those of `labkit.train.Settings`, with other defaults: 60 ``epochs``, ``lr`` 1, ``momentum`` 0.9. ``loss`` is
        the cross-entropy, whose gradient is written down.

    Returns
    -------
    History
        Times and losses by step, results by epoch; in its ``parts`` the seconds of scattering, forward, backward,
        gathering, update and broadcast, step by step.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when they were called with different things, or the model is made of other things.
    KeyboardInterrupt
        When interrupted; the model keeps the weights it had reached and can be trained on.
    """
    if gather not in GATHERS:
        raise SettingError(f'gather must be "gather" or "reduce", not {gather!r}')
    dataset = as_dataset(dataset)
    n = dataset.samples
    given = {"epochs": 60, "lr": 1.0, "momentum": 0.9} | settings
    over = ranks_of(Settings.of("matrices", given, ["gather", "batch_size"]).transport, "matrices")
    whole_batch = max(1, -(-n // over.size))
    common = Settings.of("matrices", given | {"batch_size": whole_batch if batch_size is None else batch_size})
    if common.loss is not None:
        raise SettingError('method "matrices" computes the gradient of cross-entropy by its formula: leave loss out')
    with Run("matrices", model, dataset, common, {"gather": gather}) as run:
        network = PlainNetwork.of(model)
        shape = run.test.images.shape[1:]
        whole = whole_feed(run) if over.rank == ROOT else None
        feed = run.feed = ScatteredFeed(whole, n, run.batch_size * over.size, shape, run.dtype, run.device, over)
        broadcast_weights(network, over)
        network.check(model, torch.randn((4, *shape), dtype=run.dtype, device=run.device))
        clock = Clock(run.device)

        def step(batch: Batch) -> tuple[float, int]:
            with clock("scatter_s"):
                feed.scatter(batch)
            with run.slowed:
                with clock("forward_s"):
                    activations = network.forward(batch.images)
                with clock("backward_s"):
                    gradients = network.backward(activations, batch.labels, batch.total)
            with clock("gather_s"):
                collect(gradients, gather, over)
            with clock("update_s"):
                if over.rank == ROOT:
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.grad = gradient
                    run.optim.step()
            with clock("broadcast_s"):
                broadcast_weights(network, over)
            log_p = activations[-1]
            return float(network.loss(log_p, batch.labels)), int((log_p.argmax(1) == batch.labels).sum())

        try:
            run.in_step(step)
        finally:
            model.zero_grad()
        run.history.parts = clock.parts
    return run.history


class Clock:
    """Times the parts of a step, each in a ``with`` statement.

    Parameters
    ----------
    device
        Where they compute: what a GPU was given to do belongs to the part that gave it.

    Attributes
    ----------
    parts
        Seconds, one number a step, by the part's name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        begun = self._now()
        yield
        self._seconds.setdefault(name, []).append(self._now() - begun)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """What was timed."""
        return {name: np.array(seconds) for name, seconds in self._seconds.items()}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
