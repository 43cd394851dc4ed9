"""What a method computes, apart from who sends what when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .flat import FlatGradients
from .flat_weights import FlatWeights
from .loop import Run
from .roles import Role

__all__ = ["Adding", "MakeRule", "Rule"]


class Rule(Protocol):
    """The arithmetic of a method with a master; the master and each worker have one of their own.

    Attributes
    ----------
    sent
        What a worker sends; at the master, what a push is received into.
    answered
        What a worker receives an answer into; at the master, what it answers with.
    answers_first
        Whether the master answers before it applies a push.
    """

    sent: list[Tensor]
    answered: list[Tensor]
    answers_first: bool

    def local_step(self) -> None:
        """At a worker, after backward: the gradient is in the model."""
        ...

    def pushed(self) -> None:
        """At a worker, when the answer is there."""
        ...

    def apply(self) -> None:
        """At the master: let the push change the weights."""
        ...


MakeRule = Callable[[Run, FlatWeights, FlatGradients, Role], Rule]
"""Makes the rule of one rank."""


class Adding:
    """The rule of a master that adds what comes: θ ← θ + Δ."""

    answers_first = False

    def __init__(self, weights: FlatWeights) -> None:
        self.answered = weights.buffers
        self.sent = [buffer.new_zeros(buffer.shape) for buffer in weights.buffers]

    def local_step(self) -> None:
        """Do nothing: who adds has no worker's side."""

    def pushed(self) -> None:
        """Do nothing."""

    def apply(self) -> None:
        """Add the change to the weights."""
        for weight, change in zip(self.answered, self.sent, strict=True):
            weight += change
