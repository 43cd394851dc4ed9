"""Tensors of more elements than MPI counts, cut into pieces: both sides cut alike, so pieces meet pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.comm.buffers import LARGEST_COUNT

if TYPE_CHECKING:
    import torch

__all__ = ["in_pieces", "pieces"]

LARGEST_PIECE = LARGEST_COUNT // 2
"""Elements: the same for every dtype and rank."""


def in_pieces(x: torch.Tensor) -> bool:
    """Whether `x` is to be cut."""
    return x.numel() > LARGEST_PIECE


def pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """The vector `flat` as views of at most `LARGEST_PIECE` elements, in order; itself alone where that is enough."""
    return flat.split(LARGEST_PIECE) if in_pieces(flat) else (flat,)
