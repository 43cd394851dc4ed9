"""The notebook's Stop button and learning-rate slider, obeyed by all ranks at the same step."""

from __future__ import annotations

import math

import torch

from labkit import telemetry

from .optimizers import Optimizer
from .transport import Transport

__all__ = ["Wishes"]


class Wishes:
    """Asks the notebook before each step, on behalf of all ranks.

    Rank 0 reads and broadcasts: a rank that read for itself could leave a step before the others, which
    would then wait for it. Where not every rank is connected to a notebook, none asks.

    Parameters
    ----------
    over
        Carries rank 0's answer.
    device
        Where `over` wants its tensors.
    optim
        The optimizer whose learning rate the slider moves.

    Attributes
    ----------
    emitter
        Where this rank's steps go; None when nobody watches.
    """

    def __init__(self, over: Transport, device: torch.device, optim: Optimizer) -> None:
        self._over = over
        self._optim = optim
        self._rates = [group["lr"] for group in optim.param_groups]
        self._answer = torch.zeros(2, dtype=torch.float64, device=device)  # stop?, learning rate or NaN
        self.emitter = telemetry.emitter()
        reader = telemetry.control()
        watched = over.all_gather_object(self.emitter is not None and reader is not None)
        self._reader = reader if all(watched) else None
        if self.emitter is not None and all(watched):
            # Rank 0's clock names the run on all ranks, so that the chart knows their steps for one run.
            begun = self.emitter.begin_run() if over.rank == 0 else None
            begun = over.all_gather_object(begun)[0]
            if over.rank != 0:
                self.emitter.begin_run(begun)

    def stop(self) -> bool:
        """Set the learning rate that is asked for; return whether to stop before the next step."""
        if self._reader is None:
            return False
        if self._over.rank == 0:
            self._answer[:] = torch.tensor(self.read())
        self._over.broadcast(self._answer)
        return self.obey(*self._answer.tolist())

    def read(self) -> tuple[float, float]:
        """Return what is asked for now: whether to stop (0 or 1), and the learning rate, or NaN."""
        if self._reader is None:
            return 0.0, math.nan
        state = self._reader.latest()
        return float(state.stop), math.nan if state.lr is None else state.lr

    def obey(self, stop: float, rate: float) -> bool:
        """Set the learning rate that `read` returned, on whichever rank; return whether to stop."""
        for group, own in zip(self._optim.param_groups, self._rates, strict=True):
            group["lr"] = own if math.isnan(rate) else rate
        return bool(stop)

    def close(self) -> None:
        """Send the last steps on."""
        if self.emitter is not None:
            self.emitter.flush()
