"""What several papers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def balanced(y: Tensor) -> Callable[[torch.Generator], Tensor]:
    """Return a sampler of as many rows as there are labels: a class uniformly, then one of its samples."""
    y = y.cpu()
    members = [torch.nonzero(y == c).flatten() for c in y.unique()]

    def draw(rng: torch.Generator) -> Tensor:
        classes = torch.randint(len(members), (len(y),), generator=rng)
        places = torch.rand(len(y), generator=rng)
        return torch.stack([members[c][int(u * len(members[c]))] for c, u in zip(classes, places, strict=True)])

    return draw
