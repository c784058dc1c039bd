"""RIDE: routing diverse distribution-aware experts (Wang, Lian, Miao, Liu, Yu; ICLR 2021), stage one.

Several experts on one trunk learn side by side, each by the experiment's loss, and a term drives them apart, further
for small classes. The authors take `ldam` with `drw_from: 0.8`. Their second stage, which routes images to fewer
experts, saves time and is left out: all clients train all experts, and all experts are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Card, Client, Model, knob
from algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class RIDE(FedAvg):
    """FedAvg of a network of experts; they predict by the mean of their logits."""

    card: ClassVar[Card] = Card("class imbalance")
    per_image: ClassVar[str] = "no network for pixels has several experts"
    num_experts: int = knob(3, ge=1)  #: M; one expert is FedAvg with the experiment's loss
    diversity: float = knob(-0.2)  #: d, weight of the KL term; negative: experts are driven apart
    temperature_spread: float = knob(0.05, ge=0, lt=1)  #: gamma, how far temperatures follow the prior; 0: all are 1

    @property
    def experts(self) -> int | None:
        """M."""
        return self.num_experts

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return the sum over experts of their losses and of d KL(mean prediction || their own)."""
        v = client.classify(w, client.features(w, x), each=True)
        loss = torch.stack([client.loss(v_i, y) for v_i in v]).sum()
        return loss + self.diversity * self.apart(v, client.prior) if len(v) > 1 else loss

    def apart(self, v: Tensor, prior: Tensor) -> Tensor:
        """Return sum_i T^2 KL(softmax(mean_j v_j / T) || softmax(v_i / T)), in which the mean is held fixed."""
        T = self.temperatures(prior)
        mean = (v.mean(0).detach() / T).log_softmax(1)  # in the sum its gradients would only cancel
        own = (v / T).log_softmax(2)
        return T.mean() ** 2 * F.kl_div(own, mean.expand_as(own), reduction="sum", log_target=True) / v.shape[1]

    def temperatures(self, prior: Tensor) -> Tensor:
        """T_c = psi_c / max_j psi_j with psi_c = gamma C pi_c + 1 - gamma: the smaller a class, the more it counts."""
        gamma = self.temperature_spread
        psi = gamma * len(prior) * prior + 1 - gamma
        return psi / psi.max()
