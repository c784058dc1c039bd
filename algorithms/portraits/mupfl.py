"""MuPFL: how the clients' models fall into clusters."""

from __future__ import annotations

import torch

from algorithms import federated_features as ff
from algorithms.mupfl import MuPFL
from algorithms.pictures import Lines, Picture, Points
from algorithms.portraits import Sitting


def portraits(algorithm: MuPFL, sitting: Sitting) -> dict[str, Picture]:
    """Return the clients' last updates in two dimensions, and the silhouette by the number of clusters (eqs. 9-13)."""
    models = {k: w for k, own in sorted(sitting.clients.items()) if (w := own.fields().get("w")) is not None}
    if len(models) < 4:
        return {}
    delta = torch.stack([(w - sitting.server.model).flat for w in models.values()]).double()
    tried = ff.groupings(ff.cosines(list(delta)), algorithm.kappa_min, algorithm.kappa_max, seed=0)
    _, cluster = max(tried, key=lambda found: found[0])
    centred = delta - delta.mean(0)
    flat = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    return {
        "clusters": Points(
            title="Clients by what training changes in their models",
            x="first principal component",
            y="second principal component",
            series={f"cluster {c}": flat[[own == c for own in cluster]].tolist() for c in sorted(set(cluster))},
            note="MuPFL, Fig. 10; clustered by the updates alone, not by activation maps",
        ),
        "silhouettes": Lines(
            title="How well the clients fall into clusters",
            x="number of clusters",
            y="mean silhouette",
            at=[len(set(found)) for _, found in tried],
            series={"k-means": [score for score, _ in tried]},
            note="MuPFL, eq. 12",
        ),
    }
