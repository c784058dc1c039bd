"""How the server combines what clients send to be added up: as it is, robustly, or privately.

A method knows nothing of it: it sends a Sum and gets one back, `total.w / total.n` being the combined w. What counts
for an aggregation is each client's own value of a term (a weighted term without its weight) and how far it lies from
what the client was sent: a model from the model under the same names, anything else from zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import iadd
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms.base import Sum, knob
from algorithms.terms import clipped, coordinatewise, each_tensor, own, started_from, times, with_terms


@dataclass(frozen=True)
class Aggregation:
    """Add up."""

    each: ClassVar[bool] = False  #: whether it compares single uploads, so that nothing may be added up before
    private: ClassVar[bool] = False  #: whether it promises to hide each client

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Return what a client hands over of its upload; `sent`: all tensors of models that it was sent."""
        return upload

    def combined(self, uploads: Sequence[Sum]) -> Sum:
        """Combine single uploads, or sums of them."""
        return reduce(iadd, uploads[2:], uploads[0] + uploads[1]) if len(uploads) > 1 else uploads[0]

    def released(self, total: Sum, rng: torch.Generator) -> Sum:
        """Return what the method gets to see of the total."""
        return total


@dataclass(frozen=True)
class Clip(Aggregation):
    """Norm clipping (Sun et al., 2019): no client's term lies farther than `norm` from what it was sent."""

    norm: float = knob(1.0, gt=0)  #: largest distance

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Shorten what is too long; weights stay."""
        n = upload.weights()
        return with_terms(upload, lambda name, value: times(clipped(own(value, n[name]), sent, self.norm), n[name]))


class _Robust(Aggregation, ABC):
    each: ClassVar[bool] = True

    def combined(self, uploads: Sequence[Sum]) -> Sum:
        """Combine the clients' own values coordinate by coordinate, each client counting once; weights add up."""
        total = super().combined(uploads)
        counted = [u for u in uploads if all(n > 0 for n in u.weights().values())]
        if not counted:
            return total

        def middle(name: str, value: Any) -> Any:
            values = [own(u.terms()[name], u.weights()[name]) for u in counted]
            return times(coordinatewise(self.middle, values), total.weights()[name])

        return with_terms(total, middle)

    @abstractmethod
    def middle(self, values: Tensor) -> Tensor:
        """Return one value of those of all clients, [clients, ...]."""


@dataclass(frozen=True)
class Median(_Robust):
    """Coordinate-wise median (Yin et al., ICML 2018)."""

    def middle(self, values: Tensor) -> Tensor:
        """Return the median, of an even number the mean of the two in the middle."""
        ordered: Tensor = values.sort(dim=0).values
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


@dataclass(frozen=True)
class TrimmedMean(_Robust):
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018)."""

    share: float = knob(0.1, ge=0, lt=0.5)  #: beta, share of the clients left out at either end of each coordinate

    def middle(self, values: Tensor) -> Tensor:
        """Return the mean of what is left."""
        cut = int(self.share * len(values))
        return values.sort(dim=0).values[cut : len(values) - cut].mean(0)


@dataclass(frozen=True)
class Private(Aggregation):
    """User-level differential privacy (McMahan et al., ICLR 2018): clipped terms, equal weights, Gaussian noise."""

    private: ClassVar[bool] = True
    clip: float = knob(1.0, gt=0)  #: largest distance of each term of a client's upload from what it was sent
    noise: float = knob(1.0, gt=0)  #: z, standard deviation of the noise in units of the whole upload's bound
    delta: float = knob(1e-5, gt=0, lt=1)  #: of (epsilon, delta)

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Clip every term; each client counts once, whatever its size."""
        terms, n = upload.terms(), upload.weights()
        for name, value in terms.items():
            if isinstance(value, dict):
                raise TypeError(f"'{name}' has a part for each of the client's {list(value)}, which noise cannot hide")
        loose = {k: clipped(v, sent, self.clip) for k, v in terms.items() if k not in n and not (n and k == "n")}
        values = {k: own(v, n[k]) if n[k] else started_from(v, sent) for k, v in terms.items() if k in n}
        tied = {k: clipped(v, sent, self.clip) for k, v in values.items()}
        return (Sum.weighted(1, **tied) if n else Sum()) | Sum(**loose)

    def released(self, total: Sum, rng: torch.Generator) -> Sum:
        """Add noise to every coordinate of every term but the number of clients, which is no secret."""
        hidden = [name for name in total.terms() if not (total.weights() and name == "n")]
        scale = self.noise * self.clip * len(hidden) ** 0.5  # all terms together lie within clip * sqrt(terms)

        def noisy(tensor: Tensor) -> Tensor:
            drawn = torch.randn(tensor.shape, generator=rng, dtype=torch.float64).to(tensor.device)
            return torch.add(tensor, drawn, alpha=scale)

        return with_terms(total, lambda name, value: each_tensor(noisy, value), hidden)


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "mean": Aggregation,
    "clip": Clip,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "dp": Private,
}
