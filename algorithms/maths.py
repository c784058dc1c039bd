"""What several papers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from algorithms.base import Client, Objective
from algorithms.params import Params


def balanced(y: Tensor) -> Callable[[torch.Generator], Tensor]:
    """Return a sampler of as many rows as there are labels: a class uniformly, then one of its samples."""
    y = y.cpu()
    members = [torch.nonzero(y == c).flatten() for c in y.unique()]

    def draw(rng: torch.Generator) -> Tensor:
        classes = torch.randint(len(members), (len(y),), generator=rng)
        places = torch.rand(len(y), generator=rng)
        return torch.stack([members[c][int(u * len(members[c]))] for c, u in zip(classes, places, strict=True)])

    return draw


def fresh(head: Params, rng: torch.Generator) -> Params:
    """Return a new classifier of the same form, drawn as torch begins a linear layer: uniform within 1/sqrt(d)."""
    dim = next(t.shape[1] for t in head.values() if t.dim() == 2)
    drawn = torch.rand(head.flat.shape, generator=rng).to(head.flat)
    return Params(head.layout, (2 * drawn - 1) / dim**0.5, head.buffers)


def proximal(objective: Objective, mu: float, anchor: Params) -> Objective:
    """Return the objective of a model w plus mu/2 ||w - anchor||^2."""

    def held(client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:
        drift = w - anchor
        return objective(client, x, y, w) + mu / 2 * drift.dot(drift)

    return held


def effective_steps(steps: int, momentum: float) -> float:
    """Return how often the gradients of so many SGD steps are in the weights, all together; m = 0: once each."""
    return sum((1 - momentum**j) / (1 - momentum) for j in range(1, steps + 1))


def linear(model: Params, method: str) -> Params:
    """Return the classifier of a model, which must be one linear layer with a bias for this method to rescale it."""
    if set(model.head) != {"head.weight", "head.bias"}:
        raise ValueError(f"{method} rescales one linear classifier, but this network has {', '.join(model.head)}")
    return model.head


def smoothed(eps: Tensor, others: Tensor) -> Tensor:
    """Return the soft label of each class as a row: 1 - eps_c for c itself, eps_c shared evenly by its others."""
    return torch.diag(1 - eps) + (eps / others.sum(1).clamp_min(1))[:, None] * others
