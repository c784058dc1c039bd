"""Ratio Loss: addressing class imbalance in federated learning (Wang, Xu, Wang, Zhu; AAAI 2021).

The server watches how a few images of each class, which it owns, would change the classifier: the less a class has been
learnt, the harder its images pull at its row of weights, compared with those of other classes. By these ratios clients
weigh their losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms import federated_features as ff
from algorithms.base import Card, Client, Cohort, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params


@dataclass(frozen=True)
class RatioLoss(FedAvg):
    """FedAvg with class weights alpha + beta R_p, which the server finds anew in every round."""

    card: ClassVar[Card] = Card("class imbalance", needs="a few images of every class on the server")
    per_image: ClassVar[str] = "its server owns images of each class"
    alpha: float = knob(1.0, ge=0)  #: alpha, the weight that every class has
    beta: float = knob(0.1, ge=0)  #: beta, what a ratio adds to it; 0 with alpha 1: FedAvg
    images_per_class: int = knob(5, ge=1)  #: auxiliary images on the server
    ratio_max: float = knob(5000.0, gt=0)  #: largest R_p
    normalise: bool = True  #: divide by the batch's weights; False: by its size, as the authors do, which can diverge
    outlier: float | None = knob(None, gt=0, le=1)  #: use only weights where no other class's pull exceeds this share

    def __post_init__(self) -> None:
        if self.alpha == self.beta == 0:
            raise ValueError("alpha and beta are both 0, so no class has any weight; set one of them above 0")

    @property
    def server_images(self) -> int:
        """The auxiliary set."""
        return self.images_per_class

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the model."""
        ff.linear(model)
        return {"model": model}

    def train(self, server: State, clients: Cohort) -> None:
        """Broadcast the model and the class weights; average by sample counts."""
        R = clients.server(self.ratios, server.model)
        total = clients.sum(self.weighted, server.model, self.alpha + self.beta * R)
        server.model = total.w / total.n

    def ratios(self, server: Client, w: Params) -> Tensor:
        """R_p = |mean_j (C - 1) Delta_p[p, j] / sum_{q != p} Delta_q[p, j]|, Delta_q the gradient on class q.

        A class without images counts in no mean, and has ratio 0.
        """
        Delta = w["head.weight"].new_zeros(len(w["head.bias"]), *w["head.weight"].shape)
        present = ff.class_gradients(server, w, batch=max(1, server.n), repeats=1)
        for q, z in present.items():
            Delta[q] = z[:, :-1]
        own = Delta.diagonal().T
        others = Delta * ~torch.eye(len(Delta), dtype=torch.bool, device=Delta.device)[..., None]
        use = others.sum(0) != 0
        if self.outlier is not None:
            clear = use & (others.abs().amax(0) <= self.outlier * own.abs())
            use = torch.where(clear.any(1, keepdim=True), clear, use)
        ratio = torch.where(use, (len(present) - 1) * own / others.sum(0), 0).sum(1) / use.sum(1).clamp_min(1)
        return ratio.abs().clamp_max(self.ratio_max)

    def weighted(self, client: Client, w: Params, weight: Tensor) -> Sum:
        """Train on the experiment's loss, each sample's weighted by its class."""

        def objective(client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:
            losses = torch.vmap(lambda z, y: client.loss(z[None], y[None]))(client.logits(w, x), y)
            total = weight[y].sum().clamp_min(torch.finfo(weight.dtype).tiny) if self.normalise else len(y)
            return (weight[y] * losses).sum() / total

        w = client.fit(objective, w=w).w
        return Sum.weighted(client.n, w=w)
