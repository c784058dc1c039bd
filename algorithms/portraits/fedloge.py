"""FedLoGe: the fixed classifier, the norms by which others are realigned, and what the features became."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedloge import FedLoGe, W
from algorithms.pictures import Heatmap, Lines, Picture
from algorithms.portraits import Sitting


def portraits(algorithm: FedLoGe, sitting: Sitting) -> dict[str, Picture]:
    """Return SSE-C's angles, the classifiers' norms by class, and the features' means and variances."""
    fixed, psi, model = sitting.server.fixed[W], sitting.server.psi[W], sitting.server.model
    order = sitting.counts.sum(0).argsort(descending=True, stable=True)
    names, unit = list(map(str, order.tolist())), F.normalize(fixed[order])
    features: dict[str, Tensor] = {}
    for when, body in (("before", sitting.origin), ("after", model)):
        mean, variance = by_rank(*sitting.moments(body))
        features |= {f"mean, {when} training": mean, f"variance, {when} training": variance}
    return {
        "cosines": Heatmap(
            title="Angles of the fixed classifier",
            x="class",
            y="class",
            rows=names,
            columns=names,
            values=unit @ unit.T,
            colour="cosine of two class vectors",
            note="FedLoGe, Fig. 7",
        ),
        "norms": Lines(
            title="Norms of the class vectors",
            x="class, by its number of samples",
            y="norm",
            at=list(sitting.classes),
            series={
                "fixed": fixed[order].norm(dim=1),
                "trained beside it (psi)": psi[order].norm(dim=1),
                "generic, in the end": model[W][order].norm(dim=1),
            },
            note="FedLoGe, eqs. 5 and 6",
        ),
        "features": Lines(
            title="Features of a class, on average over the classes",
            x="feature, by its mean in the class",
            y="mean and variance within the class",
            at=list(range(fixed.shape[1])),
            series=features,
            note="FedLoGe, Fig. 1",
        ),
    }


def by_rank(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each class's features by their mean, the largest first; average what is at the same rank over classes."""
    known = mean.isfinite().all(1)
    mean, variance = mean[known], variance[known]
    ranked = mean.argsort(dim=1, descending=True)
    return mean.gather(1, ranked).mean(0), torch.gather(variance, 1, ranked).mean(0)
