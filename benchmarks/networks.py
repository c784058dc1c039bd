"""The networks of the workloads as anybody writes them in plain PyTorch, their tensors in the order of ours."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int, int]


def cnn_small(shape: Shape, classes: int) -> nn.Module:
    """Two 3x3 convolutions and a hidden layer, for the digits."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def cnn_mupfl(shape: Shape, classes: int) -> nn.Module:
    """Two 5x5 convolutions and a classifier, for Fashion-MNIST."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2), classes),
    )


class Pointwise(nn.Conv2d):
    """A 1x1 convolution; with a stride and in channels last, torch 2.13's own writes out of bounds in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Subsample before, which is the same."""
        if self.stride != (1, 1) and x.is_contiguous(memory_format=torch.channels_last):
            return F.conv2d(F.avg_pool2d(x, 1, self.stride), self.weight)  # type: ignore[arg-type]
        return super().forward(x)


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = Pointwise(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


def resnet(shape: Shape, classes: int, blocks: Sequence[int], width: int) -> nn.Module:
    """Make a residual network for small images from its blocks per stage."""
    layers = [nn.Conv2d(shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Block(inputs, width << stage, 2 if stage and not i else 1))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn_small": cnn_small,
    "cnn_mupfl": cnn_mupfl,
    "resnet8": lambda shape, classes: resnet(shape, classes, (1, 1, 1), 16),
    "resnet18": lambda shape, classes: resnet(shape, classes, (2, 2, 2, 2), 64),
}
