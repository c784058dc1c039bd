"""PaCo: parametric contrastive learning (Cui, Zhong, Liu, Yu, Jia; ICCV 2021).

Each image is told apart from the classes (their centres are the rows of the classifier, rebalanced by the prior) and
from other images at once: those of its batch, their second views as a momentum encoder sees them, and a queue of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Card, Client, Cohort, Model, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.losses import BalancedSoftmax, CrossEntropy, Loss
from algorithms.maths import fresh
from algorithms.params import Params


def project(P: Model, h: Tensor) -> Tensor:
    """Return unit vectors: the features after a hidden layer and a linear one."""
    hidden = F.linear(h, P["hidden.weight"], P["hidden.bias"]).relu()
    return F.normalize(F.linear(hidden, P["out.weight"], P["out.bias"]))


@dataclass(frozen=True)
class PaCo(FedAvg):
    """FedAvg of a model and a projection; the queue and the momentum encoder last for one visit to a client."""

    card: ClassVar[Card] = Card("class imbalance", uploads="model and projection")
    per_image: ClassVar[str] = "it contrasts whole images"
    pair_weight: float = knob(0.01, ge=0)  #: alpha, weight of a pair of images of one class
    centre_weight: float = knob(1.0, gt=0)  #: beta, weight of an image and the centre of its class
    feature_weight: float = knob(1.0, ge=0)  #: gamma, weight of images among what an image is told apart from
    temperature: float = knob(0.05, gt=0)  #: tau, of the similarities of images; more where views hardly differ
    queue: int = knob(1024, ge=0)  #: length of the queue
    key_momentum: float = knob(0.999, ge=0, le=1)  #: m, of the momentum encoder
    projection_dim: int = knob(32, ge=1)  #: dimension in which images are compared

    def refuses(self, loss: Loss) -> str | None:
        """Its loss is a cross entropy with more candidates than classes, so no other can take its place."""
        if isinstance(loss, BalancedSoftmax | CrossEntropy):
            return None
        return "paco extends balanced_softmax: choose that and a prior, or ce where every class counts alike"

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the model and, from the first round on, the projection."""
        return {"model": model, "projection": None}

    def train(self, server: State, clients: Cohort) -> None:
        """Average model and projection by sample counts."""
        P = server.projection
        if P is None:
            P = self.newborn(server.model, torch.Generator().manual_seed(int(clients.rng.integers(2**63))))
        total = clients.sum(self.contrasted, server.model, P)
        server.model, server.projection = total.w / total.n, total.P / total.n

    def newborn(self, model: Params, rng: torch.Generator) -> Params:
        """Draw a projection of the model's features, d -> d -> projection_dim, as torch begins linear layers."""
        d = sum(t.shape[1] for t in model.head.values() if t.dim() == 2)
        shapes = {"hidden.weight": (d, d), "hidden.bias": (d,)}
        shapes |= {"out.weight": (self.projection_dim, d), "out.bias": (self.projection_dim,)}
        return fresh(Params.pack({name: model.flat.new_zeros(shape) for name, shape in shapes.items()}), rng)

    def contrasted(self, client: Client, w: Params, P: Params) -> Sum:
        """Train both on two views of each image; the momentum encoder starts as what was received."""
        m, w_k, P_k = self.key_momentum, w, P
        keys, labels = torch.zeros(0, self.projection_dim, device=client.y.device), client.y[:0]

        def objective(client: Client, x: Tensor, y: Tensor, w: Params, P: Params) -> Tensor:
            nonlocal w_k, P_k, keys, labels
            w_k, P_k = m * w_k + (1 - m) * w.detach(), m * P_k + (1 - m) * P.detach()
            with torch.no_grad():
                k = project(P_k, client.features(w_k, x[1]))
            h = client.features(w, x[0])
            keys, labels = torch.cat([k, keys]), torch.cat([y, labels])
            loss = self.contrast(client.classify(w, h) + client.prior.log(), y, project(P, h), keys, labels)
            keys, labels = keys[: self.queue], labels[: self.queue]
            return loss

        fit = client.fit(objective, views=2, w=w, P=P)
        return Sum.weighted(client.n, w=fit.w, P=fit.P)

    def contrast(self, z: Tensor, y: Tensor, q: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
        """Return - sum_+ w_+ log p_+ / sum_+ w_+ over an image's own centre and the images of its class.

        p is a softmax over all centres, whose logits are z, and all images but itself, with q . other / tau.
        """
        others, classes = torch.cat([q, keys]), torch.cat([y, labels])
        itself = torch.eye(len(q), len(others), dtype=torch.bool, device=q.device)
        s = q @ others.T / self.temperature
        among = (s + torch.tensor(self.feature_weight).log()).masked_fill(itself, -torch.inf)
        partition = torch.cat([z, among], dim=1).logsumexp(1)
        same = (y[:, None] == classes) & ~itself
        positive = self.centre_weight * z.gather(1, y[:, None])[:, 0] + self.pair_weight * (s * same).sum(1)
        return (partition - positive / (self.centre_weight + self.pair_weight * same.sum(1))).mean()
