"""The networks of the lab: small enough that four ranks on two cores train them while one watches.

All return log-probabilities, N×classes, for `torch.nn.functional.nll_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .replicas import TrainError

__all__ = ["CNN", "DNN", "MODELS", "GRUClassifier", "LeNet", "check_log_probabilities", "count_parameters"]


class LeNet(nn.Module):
    """Two convolutions and two linear layers: 21,840 parameters for MNIST.

    The network of PyTorch's first MNIST example, after LeCun et al., "Gradient-based learning applied to
    document recognition", 1998.

    Parameters
    ----------
    channels, image_size, classes
        Of the images: ``1, 28, 10`` for MNIST, ``3, 32, 10`` for CIFAR-10.
    dropout
        Share of the second convolution's channels, and of the first linear layer's outputs, left out in
        training; that example has 0.5. Without it R ranks compute exactly what one does.
    """

    def __init__(self, channels: int = 1, image_size: int = 28, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        side = _side(((image_size - 4) // 2 - 4) // 2, image_size)
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(20 * side * side, 50)
        self.fc2 = nn.Linear(50, classes)
        self.dropout2d = nn.Dropout2d(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, N×classes, for images, N×C×H×W."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.dropout2d(self.conv2(x)), 2))
        x = self.dropout(functional.relu(self.fc1(x.flatten(1))))
        return functional.log_softmax(self.fc2(x), dim=1)


class CNN(nn.Module):
    """Two convolutions with 32 and 64 channels and two linear layers: 1,199,882 parameters for MNIST.

    The network of PyTorch's present MNIST example.

    Parameters
    ----------
    channels, image_size, classes
        Of the images.
    dropout
        Share left out after the convolutions and after the first linear layer; that example has 0.25, 0.5.
    """

    def __init__(
        self,
        channels: int = 1,
        image_size: int = 28,
        classes: int = 10,
        dropout: tuple[float, float] = (0.25, 0.5),
    ) -> None:
        super().__init__()
        side = _side((image_size - 4) // 2, image_size)
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(dropout[0])
        self.fc1 = nn.Linear(64 * side * side, 128)
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, N×classes, for images, N×C×H×W."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


class DNN(nn.Module):
    """Two hidden layers with sigmoids between plain matrices: 109,386 parameters for MNIST.

    Parameters
    ----------
    channels, image_size, classes
        Of the images.
    hidden
        Width of the two hidden layers.
    """

    def __init__(
        self,
        channels: int = 1,
        image_size: int = 28,
        classes: int = 10,
        hidden: tuple[int, int] = (128, 64),
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels * image_size * image_size, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, N×classes, for images, N×C×H×W."""
        x = torch.sigmoid(self.fc1(x.flatten(1)))
        x = torch.sigmoid(self.fc2(x))
        return functional.log_softmax(self.fc3(x), dim=1)


class GRUClassifier(nn.Module):
    """A gated recurrent unit that reads an image row by row: 18,698 parameters for MNIST.

    Parameters
    ----------
    channels, image_size, classes
        Of the images; a row with all its channels is one element of the sequence.
    hidden
        Size of its state.
    """

    def __init__(self, channels: int = 1, image_size: int = 28, classes: int = 10, hidden: int = 64) -> None:
        super().__init__()
        self.gru = nn.GRU(channels * image_size, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, N×classes, for images, N×C×H×W."""
        rows = x.transpose(1, 2).flatten(2)  # N×H×(C·W)
        states, _ = self.gru(rows)
        return functional.log_softmax(self.fc(states[:, -1]), dim=1)


MODELS: dict[str, type[nn.Module]] = {"lenet": LeNet, "cnn": CNN, "dnn": DNN, "gru": GRUClassifier}
"""The names under which the command line knows the networks."""


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def check_log_probabilities(output: Tensor) -> None:
    """Refuse what nll_loss would take for log-probabilities: its minimum is then minus infinity."""
    if output.ndim != 2 or not torch.allclose(output.detach().logsumexp(1), output.new_zeros(()), atol=1e-2):
        raise TrainError(
            "the model does not return log-probabilities, which nll_loss needs: end its forward with "
            "log_softmax(x, dim=1), or give loss=torch.nn.functional.cross_entropy"
        )


def _side(side: int, image_size: int) -> int:
    """Return the height of the last feature map, which must not be empty."""
    if side < 1:
        raise ValueError(f"images of {image_size}×{image_size} are too small for this network's convolutions")
    return side
