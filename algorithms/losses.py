"""Losses: functions of (logits, labels, prior); where the prior comes from is chosen elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from algorithms.base import knob


@dataclass(frozen=True)
class Loss:
    """A loss whose fields are its hyperparameters."""

    uses_prior: ClassVar[bool] = False

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


LOSSES: dict[str, type[Loss]] = {"ce": CrossEntropy, "focal": Focal, "balanced_softmax": BalancedSoftmax}
