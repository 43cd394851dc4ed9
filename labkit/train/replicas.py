"""Whether all ranks hold the same model, and whether they were asked for the same training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .transport import MPITransport, Transport

__all__ = ["TrainError", "agree", "replica_differences"]


class TrainError(Exception):
    """Training cannot go on as asked; the message names the ranks and the cure."""


def replica_differences(model: nn.Module, over: Transport | None = None) -> list[float]:
    """Return each rank's largest difference of any parameter from rank 0's, the same list on all ranks.

    Exactly 0 as long as all ranks began alike and took every step with the same gradients. Infinite where
    a parameter is no number on one side only.
    """
    over = over or MPITransport()
    largest = 0.0
    for parameter in model.parameters():
        mine = parameter.detach()
        first = mine.clone(memory_format=torch.contiguous_format)
        over.broadcast(first)
        if mine.numel():
            # Equal numbers first: infinity minus infinity is no number.
            alike = (mine == first) | (mine.isnan() & first.isnan())
            difference = float(torch.where(alike, 0, (mine - first).abs()).max())
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return [float(value) for value in over.all_gather_object(largest)]


def agree(over: Transport, settings: dict[str, Any]) -> None:
    """Make sure that all ranks were called with the same settings.

    Raises
    ------
    TrainError
        On every rank, with each rank's side, where they differ: the ranks would wait for each other for
        ever, or train different things and average them.
    """
    everybody: list[dict[str, Any]] = over.all_gather_object(settings)
    differing = [name for name in settings if any(theirs.get(name) != settings[name] for theirs in everybody)]
    if differing:
        lines = [
            f"  {name}: " + ", ".join(f"rank {rank}: {theirs.get(name)!r}" for rank, theirs in enumerate(everybody))
            for name in differing
        ]
        raise TrainError(
            "the ranks were given different things to train:\n" + "\n".join(lines) + "\nGive all ranks the same."
        )


def shapes(model: nn.Module) -> str:
    """Return the model's parameters in words, for `agree`."""
    parameters: list[Tensor] = list(model.parameters())
    tensors = ", ".join("×".join(map(str, p.shape)) or "1" for p in parameters)
    return f"{type(model).__name__} with {sum(p.numel() for p in parameters):,} parameters ({tensors})"
