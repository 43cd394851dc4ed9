"""Weights laid side by side, so that one message carries them all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .transport import Alone, Transport

__all__ = ["FlatWeights"]


class FlatWeights:
    """A model's weights as views into one flat buffer for each dtype, in the order of `FlatGradients`.

    What is received into the buffers is at once in the model, and nothing is copied.

    Parameters
    ----------
    model
        Its trainable parameters, and its buffers such as batch norm's running mean, become views.
    over
        Makes the parameters' memory, where its all-reduce is fastest; all ranks make theirs together.
        Default: ordinary memory.

    Attributes
    ----------
    buffers
        One flat tensor for each dtype and device of the trainable parameters.
    statistics
        Likewise for what the model counts by itself (``model.buffers()``); mostly none.
    """

    def __init__(self, model: nn.Module, over: Transport | None = None) -> None:
        self._views: list[Tensor] = []
        self.buffers = self._flatten((p for p in model.parameters() if p.requires_grad), over or Alone())
        self.statistics = self._flatten(model.buffers(), Alone())

    def release(self) -> None:
        """Give each tensor memory of its own again, with the value that it has."""
        for tensor in self._views:
            tensor.data = tensor.data.clone()
        self._views = []

    def _flatten(self, tensors: Iterable[Tensor], over: Transport) -> list[Tensor]:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        flat = []
        for (dtype, device), alike in kinds.items():
            buffer = over.zeros(sum(t.numel() for t in alike), dtype, device)
            for tensor, piece in zip(alike, buffer.split([t.numel() for t in alike]), strict=True):
                view = piece.view(tensor.shape)
                view.copy_(tensor.data)
                tensor.data = view
            self._views += alike
            flat.append(buffer)
        return flat
