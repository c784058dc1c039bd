"""LDAE: what the groups of clients, one for each expert, have in common."""

from __future__ import annotations

import torch

from algorithms.ldae import LDAE
from algorithms.pictures import Heatmap, Picture
from algorithms.portraits import Sitting


def portraits(algorithm: LDAE, sitting: Sitting) -> dict[str, Picture]:
    """Return the label distribution of each expert's group."""
    groups = sitting.server.groups
    if not groups:
        return {}
    order = sitting.counts.sum(0).argsort(descending=True, stable=True)
    counts = torch.stack([sitting.counts[group].sum(0) for group in groups]).double()[:, order]
    return {
        "groups": Heatmap(
            title="The labels of each expert's group of clients",
            x="class, the most frequent one first",
            y="expert",
            rows=[f"{i} ({len(group)} clients)" for i, group in enumerate(groups)],
            columns=list(map(str, order.tolist())),
            values=counts / counts.sum(1, keepdim=True).clamp_min(1),
            colour="share of the group's samples",
            note="LDAE, section 3.3",
        )
    }
