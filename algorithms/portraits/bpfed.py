"""BPFed: how strongly labels are smoothed, and in which directions features are perturbed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from algorithms.bpfed import BPFed
from algorithms.pictures import Lines, Picture
from algorithms.portraits import Sitting


def portraits(algorithm: BPFed, sitting: Sitting) -> dict[str, Picture]:
    """Return g(n_k^c) of a large, a middling and a small client, and the spectrum of M_glo."""
    order = sitting.counts.sum(0).argsort(descending=True, stable=True)
    size = sitting.counts.sum(1)
    by_size = [k for k in size.argsort(descending=True, stable=True).tolist() if size[k] > 0]
    shown: dict[str, Any] = {}
    for k in dict.fromkeys((by_size[0], by_size[len(by_size) // 2], by_size[-1])):
        q = algorithm.soft_labels(SimpleNamespace(counts=sitting.counts[k].float()))  # type: ignore[arg-type]
        g = (1 - q.diagonal()).masked_fill(sitting.counts[k] == 0, torch.nan)
        shown[f"client {k}, {int(size[k])} samples"] = g[order]
    found: dict[str, Picture] = {
        "smoothing": Lines(
            title="Smoothing of the labels",
            x="class, by its number of samples",
            y="weight taken from the true label",
            at=list(sitting.classes),
            series=shown,
            note="BPFed, eq. 20",
        )
    }
    if sitting.server.M is not None:
        values = torch.linalg.eigvalsh(sitting.server.M.double()).flip(0).clamp_min(0)
        found["spectrum"] = Lines(
            title="Spectrum of the features' covariance within classes",
            x="direction, the widest first",
            y="share of the variance, up to this direction",
            at=list(range(1, len(values) + 1)),
            series={"M_glo": values.cumsum(0) / values.sum().clamp_min(1e-30)},
            note="BPFed, eq. 16",
        )
    return found
