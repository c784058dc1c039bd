"""Losses: functions of (logits, labels, prior); where the prior comes from is chosen elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import knob

#: What a loss is given as prior: shares of the classes, as many samples as these stand for, or the client's own counts.
Statistic = Literal["shares", "pseudo_counts", "own_counts"]


@dataclass(frozen=True)
class Loss:
    """A loss whose fields are its hyperparameters."""

    uses_prior: ClassVar[bool] = False  #: whether a class prior must be chosen for it
    takes: ClassVar[Statistic] = "shares"  #: what it is given as prior

    @property
    def cosine(self) -> float | None:
        """Scale of the cosine classifier without which it makes no sense; None where any classifier will do."""
        return None

    def at(self, progress: float) -> Loss:
        """Return what it becomes when this share of a phase's rounds is over."""
        return self

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        raise TypeError(f"{type(self).__name__} must define __call__")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross entropy; the prior is not used."""

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        return F.cross_entropy(logits, y)


@dataclass(frozen=True)
class Focal(Loss):
    """Focal loss (Lin et al., ICCV 2017): (1 - p_y)^gamma CE; the prior is not used."""

    gamma: float = knob(2.0, ge=0)  #: gamma, the focusing exponent

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        ce = F.cross_entropy(logits, y, reduction="none")
        return ((1 - (-ce).exp()).clamp_min(0) ** self.gamma * ce).mean()


@dataclass(frozen=True)
class BalancedSoftmax(Loss):
    """Balanced softmax (Ren et al., NeurIPS 2020): CE(z + log pi, y); a class of prior 0 drops out."""

    uses_prior: ClassVar[bool] = True

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        return F.cross_entropy(logits + prior.log(), y)


@dataclass(frozen=True)
class FedLC(Loss):
    """FedLC (Zhang et al., ICML 2022): CE(z - tau n^{-1/4}, y) of the client's own counts n."""

    # The printed formula leaves the true class out of the denominator; that collapses, so here it is in.

    takes: ClassVar[Statistic] = "own_counts"
    margin: float = knob(1.0, ge=0)  #: tau; 0: cross entropy

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        n = prior.clamp_min(1e-8)  # 100 tau off the logit of a class without samples, which as good as masks it
        return F.cross_entropy(logits - self.margin * n**-0.25, y)


@dataclass(frozen=True)
class LDAM(Loss):
    """LDAM-DRW (Cao et al., NeurIPS 2019, Algorithm 1): CE(s (cos - m_y), y), margins m; weighted by class later on."""

    uses_prior: ClassVar[bool] = True
    takes: ClassVar[Statistic] = "pseudo_counts"
    margin: float = knob(0.5, ge=0)  #: the margin of the smallest class
    scale: float = knob(30.0, gt=0)  #: s, of the cosine classifier
    drw_from: float = knob(2 / 3, ge=0, le=1)  #: share of the rounds before classes are weighted; 1: they never are
    drw_beta: float = knob(0.9999, ge=0, lt=1)  #: beta, by which the effective number of samples saturates

    @property
    def cosine(self) -> float | None:
        """Margins are of cosines."""
        return self.scale

    def at(self, progress: float) -> Loss:
        """Begin to weight classes when it is time."""
        return replace(self, drw_from=0.0) if progress >= self.drw_from else self

    def margins(self, n: Tensor) -> Tensor:
        """m_c = margin n_c^{-1/4} / max_j n_j^{-1/4}."""
        m = n**-0.25
        return self.margin * (m / m.max())

    def weights(self, n: Tensor) -> Tensor:
        """(1 - beta) / (1 - beta^{n_c}), the inverse effective numbers (Cui et al., CVPR 2019), to a mean of 1."""
        log_beta = math.log(self.drw_beta) if self.drw_beta else -math.inf
        inverse = -1 / torch.expm1(n * log_beta)  # beta^n is close to 1: the plain difference would lose digits
        return inverse / inverse.mean()

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch, by class weights once they are on; the logits are s cos."""
        own = y[:, None] == torch.arange(len(prior), device=y.device)
        weight = self.weights(prior) if self.drw_from == 0 else None
        return F.cross_entropy(logits - self.scale * self.margins(prior) * own, y, weight=weight)


@dataclass(frozen=True)
class LADE(Loss):
    """LADE (Hong et al., CVPR 2021): balanced softmax plus LADER, which draws z_c to log p(x|c) / p(x)."""

    uses_prior: ClassVar[bool] = True
    weight: float = knob(0.1, ge=0)  #: alpha, of the regulariser LADER; 0: balanced softmax
    remine: float = knob(0.1, ge=0)  #: lambda, of the squared log partition in LADER

    def __call__(self, logits: Tensor, y: Tensor, prior: Tensor) -> Tensor:
        """Return the mean loss over the batch; of a class that is not in it only the partition counts."""
        own = y[:, None] == torch.arange(len(prior), device=y.device)
        mean = (logits * own).sum(0) / own.sum(0).clamp_min(1)
        uniform = logits - prior.log() - math.log(len(prior))  # as if every class were alike
        partition = uniform.logsumexp(0) - math.log(len(y))
        lader = -(prior * (mean - partition - self.remine * partition**2)).sum()
        return BalancedSoftmax()(logits, y, prior) + self.weight * lader


LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "focal": Focal,
    "balanced_softmax": BalancedSoftmax,
    "fedlc": FedLC,
    "ldam": LDAM,
    "lade": LADE,
}
