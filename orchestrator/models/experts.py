"""ResNet-32 with several experts on one trunk (RIDE, Wang et al., ICLR 2021; also LDAE's network)."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.models.network import Network, Shape
from orchestrator.models.resnet import Pad, initialise, pool, resnet, stage, stem

BLOCKS = 5  #: blocks per stage
TRUNK, MIDDLE, LAST = 16, 24, 48  #: channels of the shared stage 1 and of an expert's stages 2 and 3


class Fork(nn.Module):
    """A shared trunk and the experts' own stages; the features are theirs side by side."""

    def __init__(self, channels: int, experts: int) -> None:
        super().__init__()
        self.stem = stem(channels, TRUNK)
        self.stage1 = stage(TRUNK, TRUNK, BLOCKS, 1, Pad)
        self.experts = nn.ModuleList(
            nn.Sequential(
                OrderedDict[str, nn.Module](
                    stage2=stage(TRUNK, MIDDLE, BLOCKS, 2, Pad), stage3=stage(MIDDLE, LAST, BLOCKS, 2, Pad), pool=pool()
                )
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, experts * 48], expert 0 first."""
        h = self.stage1(self.stem(x))
        return torch.cat([expert(h) for expert in self.experts], dim=1)


class Cosine(nn.Module):
    """A classifier whose logits are scaled cosines between features and class weights."""

    def __init__(self, dim: int, classes: int, scale: float = 30.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(F.normalize(torch.empty(classes, dim).uniform_(-1, 1)))

    def forward(self, h: Tensor) -> Tensor:
        """Logits between -scale and scale."""
        return self.scale * F.linear(F.normalize(h), F.normalize(self.weight))


class CosineExperts(nn.Module):
    """One cosine classifier per expert, each on its own slice of the features."""

    def __init__(self, experts: int, dim: int, classes: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Cosine(dim, classes) for _ in range(experts))

    def expert_logits(self, h: Tensor) -> Tensor:
        """Every expert's logits, [experts, B, classes]."""
        slices = h.chunk(len(self.experts), dim=1)
        return torch.stack([expert(own) for expert, own in zip(self.experts, slices, strict=True)])

    def forward(self, h: Tensor, each: bool = False) -> Tensor:
        """Average the experts' logits, or with `each` give them all: functional calls reach only `forward`."""
        logits = self.expert_logits(h)
        return logits if each else logits.mean(0)


def resnet32_experts(shape: Shape, classes: int, experts: int = 3) -> Network:
    """RIDE's layout: shared stem and stage 1, narrower stages 2 and 3 per expert; one expert is the plain ResNet-32."""
    if experts == 1:
        return resnet(shape, classes, (BLOCKS,) * 3, TRUNK, Pad, experts=(("body.stage2.", "body.stage3.", "head."),))
    body = Fork(shape[0], experts)
    initialise(body)
    stages = tuple(f"body.experts.{i}.stage{s}" for i in range(experts) for s in (2, 3))
    return Network(
        body,
        CosineExperts(experts, LAST, classes),
        dim=experts * LAST,
        last_stage="body.experts.",  # no shorter prefix names the last stage of every expert
        last_block="body.experts.",
        activations=("body.stage1", *stages),
        experts=tuple((f"body.experts.{i}.", f"head.experts.{i}.") for i in range(experts)),
    )
