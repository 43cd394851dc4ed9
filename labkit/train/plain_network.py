"""A network of fully connected layers written with plain matrices: its forward, its backward, no autograd.

N samples of d features go through layers l = 1 … L of n₁ … n_L units; the last has one unit a class. A₀ = X (N×d), the
weights Wₗ are nₗ×nₗ₋₁ and the biases bₗ have nₗ numbers, as in `torch.nn.Linear`.

Forward, for the hidden layers and for the output::

    Aₗ = σ(Aₗ₋₁·Wₗᵀ + bₗ)                    N×nₗ,   σ(z) = 1 / (1 + e⁻ᶻ)
    P  = softmax(A_L₋₁·W_Lᵀ + b_L)            N×n_L

Loss, the mean cross-entropy over a batch of M samples, of which these N are a part::

    J = −1/M · Σᵢ log P[i, yᵢ]

Backward, from the output to the input, where Y (N×n_L) has a 1 at each sample's class and 0 elsewhere::

    Δ_L = (P − Y) / M                         N×n_L   ∂J/∂Z_L: softmax and cross-entropy together
    ∂J/∂Wₗ = Δₗᵀ·Aₗ₋₁                         nₗ×nₗ₋₁
    ∂J/∂bₗ = Σᵢ Δₗ[i]                         nₗ
    Δₗ₋₁ = (Δₗ·Wₗ) ⊙ Aₗ₋₁ ⊙ (1 − Aₗ₋₁)        N×nₗ₋₁  since σ′ = σ·(1 − σ)

I. Goodfellow, Y. Bengio, A. Courville, "Deep learning", 2016, algorithms 6.3 and 6.4, section 6.2.2.3 for the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .replicas import TrainError

__all__ = ["PlainNetwork"]


class PlainNetwork:
    """Fully connected layers with sigmoids between them and a softmax at the end.

    Parameters
    ----------
    weights
        Wₗ, nₗ×nₗ₋₁, first layer first.
    biases
        bₗ, nₗ numbers.

    Examples
    --------
    >>> network = PlainNetwork.of(nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.LogSoftmax(1)))
    >>> images, labels = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)
    >>> activations = network.forward(images)
    >>> [tuple(matrix.shape) for matrix in activations]
    [(5, 4), (5, 3), (5, 2)]
    >>> [tuple(matrix.shape) for matrix in network.backward(activations, labels, total=5)]
    [(3, 4), (3,), (2, 3), (2,)]
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.biases = list(biases)

    @classmethod
    def of(cls, model: nn.Module) -> PlainNetwork:
        """The matrices of `model`'s `torch.nn.Linear` layers, in their order: the same memory, seen without autograd.

        Raises
        ------
        TrainError
            If it has parameters elsewhere, or layers that don't fit one upon the other.
        """
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias) if tensor is not None]
        odd = [name for name, p in model.named_parameters() if not any(p is tensor for tensor in tensors)]
        unbiased = [layer for layer in layers if layer.bias is None]
        loose = [(a, b) for a, b in itertools.pairwise(layers) if a.out_features != b.in_features]
        if odd or unbiased or loose or not layers or len(tensors) != len(list(model.parameters())):
            raise TrainError(
                f"{type(model).__name__} cannot be written with plain matrices: it must be made of Linear layers with "
                "bias, one upon the other, with sigmoids between them and log_softmax at the end, as train.DNN is"
                + (f"; it also has {', '.join(odd)}" if odd else "")
            )
        return cls([layer.weight.detach() for layer in layers], [layer.bias.detach() for layer in layers])

    @property
    def matrices(self) -> list[Tensor]:
        """W₁, b₁, W₂, b₂ …: in the order in which `backward` returns their gradients."""
        return [tensor for pair in zip(self.weights, self.biases, strict=True) for tensor in pair]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return A₀ … A_L₋₁ and, in place of P, its logarithm; `images` is N×…."""
        activations = [images.flatten(1)]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            activations.append(torch.sigmoid(activations[-1] @ weight.T + bias))
        scores = activations[-1] @ self.weights[-1].T + self.biases[-1]
        # log P and not P: the logarithm of a P that has become 0 would make the loss infinite.
        activations.append(scores - scores.logsumexp(1, keepdim=True))
        return activations

    @staticmethod
    def loss(log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of these N samples, a number; NaN for none."""
        return -log_p[torch.arange(len(labels), device=labels.device), labels].mean()

    def backward(self, activations: list[Tensor], labels: Tensor, total: int) -> list[Tensor]:
        """Return ∂J/∂W₁, ∂J/∂b₁, ∂J/∂W₂ ….

        Parameters
        ----------
        activations
            What `forward` returned.
        labels
            int64, N.
        total
            M, the samples of the whole batch: the parts' gradients then add up to the batch's.
        """
        delta = activations[-1].exp()
        delta[torch.arange(len(labels), device=labels.device), labels] -= 1
        delta /= total
        gradients: list[Tensor] = []
        for layer in reversed(range(len(self.weights))):
            below = activations[layer]
            gradients = [delta.T @ below, delta.sum(0), *gradients]
            if layer > 0:
                delta = (delta @ self.weights[layer]) * below * (1 - below)
        return gradients

    def check(self, model: nn.Module, images: Tensor) -> None:
        """See that `model` computes from `images` what these formulas do.

        Raises
        ------
        TrainError
            If it has other functions between its layers.
        """
        was_training = model.training
        model.eval()
        with torch.no_grad():
            expected = model(images)
        model.train(was_training)
        ours = self.forward(images)[-1]
        if ours.shape != expected.shape or not torch.allclose(ours, expected, rtol=1e-3, atol=1e-3):
            raise TrainError(
                f"{type(model).__name__} computes something else than these matrices do: there must be sigmoids "
                "between its layers, log_softmax at its end and nothing else, as in train.DNN"
            )
