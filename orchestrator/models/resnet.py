"""Residual networks for small images (He et al., CVPR 2016): a 3x3 stem, no max-pool, global average pooling."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.models.experts import Layers, fork, of_experts
from orchestrator.models.network import Network, Shape, subsample

#: Makes the way around a block that changes the shape, from input channels, output channels and stride.
Shortcut = Callable[[int, int, int], nn.Module]


class Pad(nn.Module):
    """He et al.'s option A: a shortcut without parameters, which subsamples the map and pads channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Subsample the map and pad its channels."""
        return F.pad(subsample(x, self.stride), (0, 0, 0, 0, self.before, self.after))


def project(inputs: int, outputs: int, stride: int) -> nn.Module:
    """He et al.'s option B: a 1x1 convolution with batch-norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions find to what went around them."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        around = self.shortcut(x)
        # With weights of fewer channels than the block was made for, what goes around is narrowed as they are.
        return F.relu(h + (around if around.shape == h.shape else around[:, : h.shape[1]]))


def stem(channels: int, outputs: int) -> nn.Sequential:
    """Make the first layer, on the image itself."""
    conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
    return nn.Sequential(Layers(conv=conv, bn=nn.BatchNorm2d(outputs), relu=nn.ReLU()))


def stage(inputs: int, outputs: int, blocks: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    """Blocks of one width; the first of them takes the stride."""
    first = BasicBlock(inputs, outputs, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, shortcut) for _ in range(blocks - 1)))


def pool() -> nn.Sequential:
    """Global average pooling to a feature vector."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def initialise(body: nn.Module) -> None:
    """He et al.'s normal initialisation of every convolution."""
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet(
    shape: Shape, classes: int, blocks: Sequence[int], width: int, shortcut: Shortcut, experts: int = 1
) -> Network:
    """Make a residual network from its blocks per stage; each stage is twice as wide as the one before.

    Several experts share all but the last two stages, and their own are three quarters as wide.
    """

    def stages(first: int, last: int, share: float = 1.0) -> Layers:
        widths = [width, *(int((width << i) * (share if i >= first else 1)) for i in range(len(blocks)))]
        return Layers(
            (f"stage{i + 1}", stage(widths[i], widths[i + 1], blocks[i], 2 if i else 1, shortcut))
            for i in range(first, last)
        )

    count, maps = len(blocks), [f"stage{i + 1}" for i in range(len(blocks))]
    if experts > 1:
        shared = Layers(stem=stem(shape[0], width)) | stages(0, count - 2)
        body = fork(shared, lambda: stages(count - 2, count, 0.75) | Layers(pool=pool()), experts)
        initialise(body)
        return of_experts(body, int((width << count - 1) * 0.75), classes, maps[:-2], maps[-2:])
    body = nn.Sequential(Layers(stem=stem(shape[0], width)) | stages(0, count) | Layers(pool=pool()))
    initialise(body)
    dim = width << count - 1
    return Network(
        body,
        nn.Linear(dim, classes),
        dim=dim,
        last_stage=f"body.{maps[-1]}.",
        last_block=f"body.{maps[-1]}.{blocks[-1] - 1}.",
        activations=tuple(f"body.{name}" for name in maps),
    )


def resnet8(shape: Shape, classes: int, width: int = 64, experts: int = 1) -> Network:
    """Shang et al.'s ResNet-8 (IJCAI 2022): one block per stage, four times as wide, projection shortcuts."""
    return resnet(shape, classes, (1, 1, 1), width, project, experts)


def resnet20(shape: Shape, classes: int, width: int = 16, experts: int = 1) -> Network:
    """He et al.'s ResNet-20 for CIFAR."""
    return resnet(shape, classes, (3, 3, 3), width, Pad, experts)


def resnet32(shape: Shape, classes: int, width: int = 16, experts: int = 1) -> Network:
    """He et al.'s ResNet-32 for CIFAR."""
    return resnet(shape, classes, (5, 5, 5), width, Pad, experts)


def resnet18(shape: Shape, classes: int, width: int = 64, experts: int = 1) -> Network:
    """ResNet-18 with the stem for small images."""
    return resnet(shape, classes, (2, 2, 2, 2), width, project, experts)


def resnet34(shape: Shape, classes: int, width: int = 64, experts: int = 1) -> Network:
    """ResNet-34 with the stem for small images."""
    return resnet(shape, classes, (3, 4, 6, 3), width, project, experts)
