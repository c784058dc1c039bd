"""ECL: which expert answers for which class of each client, and how much its logits are scaled."""

from __future__ import annotations

import torch

from algorithms.ecl import ECL, classifier
from algorithms.pictures import Heatmap, Lines, Picture
from algorithms.portraits import Sitting


def portraits(algorithm: ECL, sitting: Sitting) -> dict[str, Picture]:
    """Return the owners of the classes and the scales of the experts (eq. 5)."""
    clients = {k: own for k, own in sorted(sitting.clients.items()) if own.experts}
    if not clients:
        return {}
    order = sitting.counts.sum(0).argsort(descending=True, stable=True)
    owners = torch.stack([own.owner for own in clients.values()]).double()
    scales = {
        k: [float(algorithm.scale(classifier(v), classifier(own.head)).mean()) for v in own.experts]
        for k, own in clients.items()
    }
    most = max(map(len, scales.values()))
    return {
        "owners": Heatmap(
            title="Who answers for a class (empty: no samples)",
            x="class, the most frequent one first",
            y="client",
            rows=list(map(str, clients)),
            columns=list(map(str, order.tolist())),
            values=owners.masked_fill(owners < 0, torch.nan)[:, order],
            colour="expert; 0 has the largest classes",
        ),
        "scales": Lines(
            title="How much the experts' logits are scaled",
            x="client",
            y="factor on an expert's logits",
            at=list(clients),
            series={f"expert {m}": [s[m] if m < len(s) else None for s in scales.values()] for m in range(most)},
            note="ECL, eq. 5",
        ),
    }
