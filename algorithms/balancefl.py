"""BalanceFL: addressing class imbalance in long-tail federated learning (Shuai et al., IPSN 2022).

Clients sample classes uniformly, perturb features of small classes, learn to tell apart the classes in a batch, and
inherit what the received model knows of all others. The authors train by Adam; here it is the experiment's optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Card, Client, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.maths import balanced
from algorithms.params import Params


@dataclass(frozen=True)
class BalanceFL(FedAvg):
    """FedAvg whose clients train as if their data were balanced, and as if they had the classes they lack."""

    card: ClassVar[Card] = Card("class imbalance")
    per_image: ClassVar[str] = "it draws images by their class"
    temperature: float = knob(2.0, gt=0)  #: T of the inheritance
    inherit_weight: float = knob(1.0, ge=0)  #: lambda, weight of the inheritance
    entropy_weight: float = knob(0.002, ge=0)  #: weight of the entropy, which is summed over the batch

    def local(self, client: Client, w: Params) -> Sum:
        """Train with the received model as teacher; a feature is perturbed with probability 1 - n_k^c / n_k^max."""
        received, A = w, self.spread(client, w)
        chance = 1 - client.counts / client.counts.max()

        def objective(client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:
            h = client.features(w, x)
            noisy = (torch.rand(len(y), generator=client.rng).to(h.device) < chance[y])[:, None]
            noise = torch.randn(len(y), len(A), generator=client.rng).to(h.device) @ A
            with torch.no_grad():
                teacher = client.logits(received, x)
            return self.loss(client, client.classify(w, h), client.classify(w, h + noisy * noise), teacher, y)

        w = client.fit(objective, rows=balanced(client.y), w=w).w
        return Sum.weighted(client.n, w=w)

    def spread(self, client: Client, w: Params) -> Tensor:
        """Return A [n_k, d] with A^T A = M = sum_c n_k^c M^c / n_k, so that eA ~ N(0, M) for e ~ N(0, I).

        M^c is the covariance of class c's features, 0 where it has one sample only.
        """
        z, n = client.embed(w), client.counts
        mean = F.one_hot(client.y, len(n)).to(z).T @ z / n.clamp_min(1)[:, None]
        scale = (n / (n - 1).clamp_min(1) / client.n).sqrt()
        return (z - mean[client.y]) * scale[client.y, None]

    def loss(self, client: Client, z: Tensor, perturbed: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        """Return the loss over the classes in the batch, plus lambda inheritance of the others, less their entropy."""
        owned = torch.zeros(z.shape[1], dtype=torch.bool, device=z.device).index_fill(0, y, True)
        loss = client.loss(perturbed.masked_fill(~owned, -torch.inf), y)
        log_p, log_q = F.log_softmax(z[:, owned], 1), F.log_softmax(z[:, ~owned] / self.temperature, 1)
        inherited = -(F.softmax(teacher[:, ~owned] / self.temperature, 1) * log_q).sum(1).mean()
        entropy = -(log_p.exp() * log_p).sum()
        return loss + self.inherit_weight * inherited - self.entropy_weight * entropy
