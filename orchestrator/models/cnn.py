"""Small convolutional networks without batch-norm."""

from collections.abc import Callable

from torch import nn

from orchestrator.models.experts import Layers, fork, of_experts
from orchestrator.models.network import Network, Shape, Stack

MAPS = ("relu1", "relu2")


def cnn_small(shape: Shape, classes: int, experts: int = 1) -> Network:
    """Two 3x3 convolutions and one hidden layer: cheap enough for 8x8 digits and for tests."""
    channels, height, width = shape
    convolutions = Layers(
        conv1=nn.Conv2d(channels, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flat=nn.Flatten(),
    )
    flat = 32 * (height // 2) * (width // 2)
    return _network(convolutions, lambda: Layers(fc=nn.Linear(flat, 64), relu3=nn.ReLU()), 64, classes, "fc", experts)


def cnn_ecl(shape: Shape, classes: int, width: int = 6, experts: int = 1) -> Network:
    """Layers of the sizes of LeNet-5, which pads the 28x28 images of Fashion-MNIST to 32x32, or of its proportions."""
    channels, high, wide = shape
    maps, first, last = width * 16 // 6, width * 20, width * 14
    convolutions = Layers(
        conv1=nn.Conv2d(channels, width, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(width, maps, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
    )
    flat = maps * ((high // 2 - 4) // 2) * ((wide // 2 - 4) // 2)

    def hidden() -> Layers:
        return Layers(fc1=nn.Linear(flat, first), relu3=nn.ReLU(), fc2=nn.Linear(first, last), relu4=nn.ReLU())

    return _network(convolutions, hidden, last, classes, "fc2", experts)


def cnn_mupfl(shape: Shape, classes: int) -> Network:
    """Two 5x5 convolutions for Fashion-MNIST, and the head right on the flattened maps."""
    channels, height, width = shape
    convolutions = Layers(
        conv1=nn.Conv2d(channels, 32, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
    )
    dim = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return _network(convolutions, Layers, dim, classes, "conv2")


def _network(
    convolutions: Layers, hidden: Callable[[], Layers], dim: int, classes: int, last: str, experts: int = 1
) -> Network:
    """Put hidden layers and a linear head on the convolutions, or those of several experts; `last` is a layer."""
    if experts > 1:
        return of_experts(fork(convolutions, hidden, experts), dim, classes, MAPS)
    body, last = Stack(convolutions | hidden()), f"body.{last}."
    maps = tuple(f"body.{name}" for name in MAPS)
    return Network(body, nn.Linear(dim, classes), dim=dim, last_stage=last, last_block=last, activations=maps)
