"""Networks of several experts on one trunk, each with a cosine classifier (after Wang et al., ICLR 2021)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.models.network import Network, Stack

#: Named layers, one after another.
Layers = OrderedDict[str, nn.Module]


class Experts(nn.ModuleList):
    """The experts' own layers, each on the same input; the features are theirs side by side."""

    def forward(self, h: Tensor) -> Tensor:
        """Features [B, experts * dim], expert 0 first."""
        return torch.cat([expert(h) for expert in self], dim=1)


def fork(trunk: Layers, own: Callable[[], Layers], experts: int) -> nn.Sequential:
    """Make a shared trunk with the experts' own layers on it."""
    own_layers = Experts(nn.Sequential(own()) for _ in range(experts))
    return nn.Sequential(Layers(trunk=Stack(trunk), experts=own_layers))


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


def classify_by_cosine(network: Network, classes: int, scale: float) -> None:
    """Give a network a cosine classifier of this scale, and this scale to the ones of experts."""
    if not network.experts:
        # Under an expert's name: nobody can take its weights for those of a linear layer.
        network.head = CosineExperts(1, network.dim, classes)
    for expert in network.head.experts:  # type: ignore[union-attr]
        expert.scale = scale


def of_experts(
    body: nn.Sequential, dim: int, classes: int, shared_maps: Sequence[str], own_maps: Sequence[str] = ()
) -> Network:
    """Put the cosine classifiers on a fork whose experts have `dim` features each; maps are named within their part."""
    experts = range(len(list(body[-1].children())))
    return Network(
        body,
        CosineExperts(len(experts), dim, classes),
        dim=len(experts) * dim,
        last_stage="body.experts.",  # no shorter prefix names the last stage of every expert
        last_block="body.experts.",
        activations=(
            *(f"body.trunk.{name}" for name in shared_maps),
            *(f"body.experts.{i}.{name}" for i in experts for name in own_maps),
        ),
        experts=tuple((f"body.experts.{i}.", f"head.experts.{i}.") for i in experts),
    )
