"""Networks for semantic segmentation: a body that makes a map of features, and one linear classifier for every cell."""

from collections import OrderedDict
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.models.network import Network, Shape
from orchestrator.models.vision import torchvision
from orchestrator.models.zoo import inside_blocks, take_channels

INNER = 128  #: channels that LR-ASPP makes of the highest map


@lru_cache
def _weights(have: int, want: int) -> Tensor:
    """Return the matrix [want, have] that enlarges a line by linear interpolation between the middles of its cells."""
    at = ((torch.arange(want) + 0.5) * have / want - 0.5).clamp(0, have - 1)
    return (1 - (at[:, None] - torch.arange(have)).abs()).clamp_min(0)


def enlarge(h: Tensor, size: tuple[int, int]) -> Tensor:
    """Bring maps to a size bilinearly; by products of matrices, for on a GPU torch's own gradient is never the same."""
    down, across = (_weights(have, want).to(h) for have, want in zip(h.shape[2:], size, strict=True))
    return down @ h @ across.T


class PixelClassifier(nn.Linear):
    """A linear classifier of feature vectors [N, d], or of every cell of feature maps, for every pixel of an image."""

    def __init__(self, dim: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__(dim, classes)
        self.size = size  #: height and width of an image

    def forward(self, h: Tensor) -> Tensor:
        """Logits [N, classes] of vectors, or [B, classes, H, W] of maps."""
        if h.dim() == 2:
            return super().forward(h)
        return enlarge(F.conv2d(h, self.weight[:, :, None, None], self.bias), self.size)


class LRASPP(nn.Module):
    """Lite R-ASPP (Howard et al., ICCV 2019, Section 6.4): the highest map, gated by its own mean, on its own input.

    The paper's two 1x1 classifiers, of the highest map and of a lower one, are added up: they are one of both maps.
    """

    def __init__(self, layers: nn.Sequential, dim: int) -> None:
        super().__init__()
        self.layers = layers
        self.high = nn.Sequential(nn.Conv2d(dim, INNER, 1, bias=False), nn.BatchNorm2d(INNER), nn.ReLU())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(dim, INNER, 1, bias=False), nn.Sigmoid())

    def forward(self, low: Tensor) -> Tensor:
        """Features of a lower map's own size: its channels, and those of the highest."""
        h = self.layers(low)
        return torch.cat([low, enlarge(self.high(h) * self.gate(h), (low.shape[2], low.shape[3]))], dim=1)


def cnn_pixels(shape: Shape, classes: int, width: int = 16) -> Network:
    """Two 3x3 convolutions that halve the map and a dilated one, each twice as wide as the one before."""
    body = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(shape[0], width, 3, 2, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(width, 2 * width, 3, 2, padding=1),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(2 * width, 4 * width, 3, padding=2, dilation=2),
            relu3=nn.ReLU(),
        )
    )
    return Network(
        body,
        PixelClassifier(4 * width, classes, shape[1:]),
        dim=4 * width,
        last_stage="body.conv3.",
        last_block="body.conv3.",
        activations=("body.relu1", "body.relu2", "body.relu3"),
    )


def lraspp_mobilenet_v3_small(shape: Shape, classes: int) -> Network:
    """Torchvision's MobileNetV3-small with its last stage dilated, and LR-ASPP on the maps of an 8th and a 16th."""
    layers = torchvision().models.mobilenet_v3_small(dilated=True).features
    take_channels(layers[0], "0", shape[0])
    low, high = layers[2].out_channels, layers[-1].out_channels
    body = nn.Sequential(
        OrderedDict[str, nn.Module](stem=layers[0], stage1=layers[1], stage2=layers[2], top=LRASPP(layers[3:], high))
    )
    return Network(
        body,
        PixelClassifier(low + INNER, classes, shape[1:]),
        dim=low + INNER,
        last_stage="body.top.",
        last_block="body.top.",  # no shorter prefix names the last block and what follows it
        activations=inside_blocks(body),
    )
