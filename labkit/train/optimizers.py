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

__all__ = ["SGD", "Adam", "Optimizer", "in_words"]


class Optimizer(Protocol):
    """What training asks of an optimizer; `torch.optim.Optimizer` has it too."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def step(self) -> Any:
        """Change the parameters by their gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the state by the parameter's number, and the groups' settings."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from what `state_dict` returned."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return the velocities by the parameter's number, and the settings. The tensors are the optimizer's own."""
        numbers = _numbers(self.param_groups)
        state = {numbers[parameter]: {"velocity": velocity} for parameter, velocity in self._velocity.items()}
        return {"state": state, "param_groups": _settings(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, with copies of its tensors."""
        parameters = _load_settings(self.param_groups, state_dict)
        self._velocity = {parameters[i]: _like(parameters[i], s["velocity"]) for i, s in state_dict["state"].items()}


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

    def state_dict(self) -> dict[str, Any]:
        """Return the moments by the parameter's number, the steps and the settings. The tensors are the optimizer's."""
        numbers = _numbers(self.param_groups)
        state = {numbers[p]: {"first": first, "second": second} for p, (first, second) in self._moments.items()}
        return {"state": state, "steps": self._steps, "param_groups": _settings(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, with copies of its tensors."""
        parameters = _load_settings(self.param_groups, state_dict)
        self._steps = state_dict["steps"]
        self._moments = {
            parameters[i]: (_like(parameters[i], s["first"]), _like(parameters[i], s["second"]))
            for i, s in state_dict["state"].items()
        }


def in_words(optim: Optimizer) -> str:
    """Return an optimizer and its settings."""
    shown = ("lr", "momentum", "betas", "weight_decay", "nesterov")
    settings = ", ".join(f"{name}={optim.defaults[name]}" for name in shown if optim.defaults.get(name))
    return f"{type(optim).__name__}({settings})"


def _numbers(groups: list[dict[str, Any]]) -> dict[nn.Parameter, int]:
    """Count the parameters through all groups, as torch's optimizers do in their state."""
    return {parameter: number for number, parameter in enumerate(p for group in groups for p in group["params"])}


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    numbers = _numbers(groups)
    return [{**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in groups]


def _load_settings(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> list[nn.Parameter]:
    """Take over the groups' settings; return the parameters by number."""
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ValueError("the state is that of an optimizer of other parameters")
    for group, theirs in zip(groups, saved, strict=True):
        group.update({name: value for name, value in theirs.items() if name != "params"})
    return list(_numbers(groups))


def _like(parameter: nn.Parameter, saved: Tensor) -> Tensor:
    return saved.detach().to(parameter.device, parameter.dtype, copy=True)
