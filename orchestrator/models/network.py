"""A network as two halves: a body that turns images into features, and a head that turns features into logits."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Channels, height, width.
Shape = tuple[int, int, int]


class Stack(nn.Sequential):
    """Layers one after another; it pools before it rectifies, which gives the same at a quarter of the cost."""

    def forward(self, x: Tensor) -> Tensor:
        """Go through the layers, in their own order where somebody watches the rectified map."""
        layers = list(self)
        for i, (layer, following) in enumerate(pairwise(self)):
            if isinstance(layer, nn.ReLU) and isinstance(following, nn.MaxPool2d) and not layer._forward_hooks:
                layers[i : i + 2] = following, layer
        for layer in layers:
            x = layer(x)
        return x


class Network(nn.Module):
    """A classifier cut into body and head, which knows the names of the parts that algorithms single out."""

    body: nn.Sequential  #: images -> features [B, dim], or maps [B, dim, h, w]; its last stage is one of its children
    head: nn.Module  #: features -> logits [B, classes], or [B, classes, H, W]

    def __init__(
        self,
        body: nn.Sequential,
        head: nn.Module,
        *,
        dim: int,
        last_stage: str,
        last_block: str,
        activations: tuple[str, ...],
        experts: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        super().__init__()
        self.body = body  # before the head: parameters are listed in this order, so the body's are contiguous
        self.head = head
        self.dim = dim
        self.last_stage = last_stage  #: parameter-name prefix of the last stage
        self.last_block = last_block  #: parameter-name prefix of the last block of that stage
        self.activations = activations  #: submodules whose output is a map of activations larger than one pixel
        self._experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def halves(self) -> tuple[nn.Module, nn.Module]:
        """The body in two: all before its last stage, and from there on; they share their layers with it."""
        names = [f"body.{name}." for name, _ in self.body.named_children()]
        cut = names.index(self.last_stage)
        return self.body[:cut], self.body[cut:]

    @property
    def channels_last(self) -> bool:
        """Whether convolutions on the CPU may take their channels last, which is up to 1.6 times as fast."""
        return all(m.groups == 1 for m in self.modules() if isinstance(m, nn.Conv2d))

    @property
    def experts(self) -> int:
        """How many experts share this network's trunk; 0 for a network that is not built of experts."""
        return len(self._experts)

    def expert_prefixes(self, i: int) -> tuple[str, ...]:
        """Parameter-name prefixes of everything that expert i alone owns."""
        if not 0 <= i < self.experts:
            raise ValueError(f"there is no expert {i}: this network has {self.experts} experts, counted from 0")
        return self._experts[i]


def prepare(network: Network, shape: Shape) -> None:
    """Make a new network fit for functional calls on images of this shape."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
            module.num_batches_tracked = None  # an integer among float buffers, of no use to a constant momentum
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]  # would clobber an activation that somebody keeps
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.stride != (1, 1):
            # The same, but its backward pass in channels last writes out of bounds on the CPU (torch 2.13, oneDNN).
            module.register_forward_pre_hook(partial(_subsampled, module.stride))
            module.stride = (1, 1)
    maps = map_sizes(network, shape)
    network.activations = tuple(name for name in network.activations if maps[name].numel() > 1)


def _subsampled(stride: tuple[int, ...], module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return subsample(args[0], stride)


def subsample(x: Tensor, stride: int | tuple[int, ...]) -> Tensor:
    """Take every so-manieth pixel of a map; by slices the gradient would lose its channels-last order."""
    return F.avg_pool2d(x, 1, stride)


def map_sizes(network: Network, shape: Shape) -> dict[str, torch.Size]:
    """Height and width of each of the network's activation maps for images of this shape."""
    sizes: dict[str, torch.Size] = {}

    def note(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        sizes[name] = output.shape[2:]

    hooks = [network.get_submodule(name).register_forward_hook(partial(note, name)) for name in network.activations]
    # One blank image: tensors without storage would do, but their first use costs two seconds of imports per process.
    with torch.no_grad():
        network.eval()(torch.zeros(1, *shape))
    network.train()
    for hook in hooks:
        hook.remove()
    return sizes
