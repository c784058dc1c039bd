"""GPI: how well the classes' shares were read off the classifiers' updates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from algorithms.gpi import GPI
from algorithms.pictures import Lines, Picture
from algorithms.portraits import Sitting


def portraits(algorithm: GPI, sitting: Sitting) -> dict[str, Picture]:
    """Return the estimate beside the truth, and each client's likeness to its own labels (LDAE, Figs. 3 and 7)."""
    truth = sitting.counts.sum(0).double()
    share, estimate = truth / truth.sum(), sitting.server.prior.double()
    order = truth.argsort(descending=True, stable=True)
    proxies = sorted(sitting.server.proxies.items())
    omega = torch.stack([proxy for _, proxy in proxies]).double().clamp_min(0)
    likeness = F.cosine_similarity(omega, sitting.counts[[k for k, _ in proxies]].double())
    cosine, known = F.cosine_similarity(share, estimate, dim=0), share > 0
    # The cosine is of the large classes alone, while a loss takes the logarithm, of which the small ones have most.
    worst = (estimate[known] / share[known]).log().abs().max().exp()
    return {
        "gpi": Lines(
            title=f"Class prior from updates: cosine {cosine:.3f} with the labels, at worst {worst:.1f} times off",
            x="class, by its number of samples",
            y="share of the training samples",
            at=list(sitting.classes),
            series={"labels": share[order], "GPI": estimate[order]},
            note="LDAE, Fig. 3",
        ),
        "lpi": Lines(
            title="Each client's own estimate",
            x="client",
            y="cosine with the client's label counts",
            at=[k for k, _ in proxies],
            series={"LPI": likeness},
            note="LDAE, Fig. 7",
        ),
    }
