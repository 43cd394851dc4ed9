"""SGD with momentum, and Adam, written out.

They compute what `torch.optim` computes. The first use of an optimizer of torch's loads its compiler
(`torch._dynamo`): 3.5 s and 170 MB, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["SGD", "Adam", "Optimizer"]


class Optimizer(Protocol):
    """What training asks of an optimizer; `torch.optim.Optimizer` has it too."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def step(self) -> Any:
        """Change the parameters by their gradients."""
        ...


class SGD:
    """Stochastic gradient descent with momentum: v ← μ·v + g, θ ← θ − λ·v.

    Parameters
    ----------
    parameters
        What to change.
    lr
        Learning rate λ.
    momentum
        μ.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, momentum: float = 0.0) -> None:
        self.defaults: dict[str, Any] = {"lr": lr, "momentum": momentum}
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **self.defaults}]
        self._velocity: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = parameter.grad
                if group["momentum"]:
                    velocity = self._velocity.get(parameter)
                    if velocity is None:
                        velocity = self._velocity[parameter] = parameter.grad.clone()
                    else:
                        velocity.mul_(group["momentum"]).add_(parameter.grad)
                    direction = velocity
                parameter.add_(direction, alpha=-group["lr"])


class Adam:
    """Adam: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.

    Parameters
    ----------
    parameters
        What to change.
    lr
        Step size α.
    betas
        Decay of the two moments, β₁ and β₂.
    eps
        ε, which keeps the division finite.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **self.defaults}]
        self._moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients."""
        self._steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            size = group["lr"] / (1 - beta1**self._steps)
            correction = math.sqrt(1 - beta2**self._steps)
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if parameter not in self._moments:
                    self._moments[parameter] = (torch.zeros_like(grad), torch.zeros_like(grad))
                first, second = self._moments[parameter]
                first.lerp_(grad, 1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                parameter.addcdiv_(first, second.sqrt().div_(correction).add_(group["eps"]), value=-size)
