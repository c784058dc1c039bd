"""SCAFFOLD: stochastic controlled averaging for federated learning (Karimireddy et al., ICML 2020, Algorithm 1).

Control variates are those of option II. Clients use the experiment's optimizer: momentum m puts the gradient of step s
of J into the weights (1 - m^(J-s+1)) / (1 - m) times, so their change is divided by the sum of these, and c_k is an
average of the client's gradients whatever m is. Weight decay is part of the gradients, averaged and controlled alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms.base import Card, Client, Cohort, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.maths import effective_steps
from algorithms.params import Params


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """FedAvg whose clients exchange the direction of their own gradients for that of everybody's."""

    card: ClassVar[Card] = Card("optimisation", uploads="model, control variate", keeps="control variate")
    global_lr: float = knob(1.0, gt=0)  #: eta_g, the server's step; batch-norm buffers are averaged whatever it is

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the model and c."""
        return {"model": model, "c": torch.zeros_like(model.flat)}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep c_k."""
        return {"c": torch.zeros_like(model.flat)}

    def train(self, server: State, clients: Cohort) -> None:
        """w <- w + eta_g mean_k dw_k, c <- c + |S|/K mean_k dc_k; clients count alike, whatever their size."""
        total, w = clients.sum(self.controlled, server.model, server.c), server.model
        server.model = Params(w.layout, w.flat + self.global_lr * total.dw / total.n, total.buffers / total.n)
        server.c = server.c + total.dc / len(clients.everyone)

    def controlled(self, client: Client, w: Params, c: Tensor) -> Sum:
        """Step along g - c_k + c; then c_k <- c_k - c + (w - w_k) / (J eta)."""
        c_k, start = client.state.c, w

        def corrected(client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:
            return self.objective(client, x, y, w) + torch.dot(c - c_k, w.flat)

        fit = client.fit(corrected, w=w)
        dw = fit.w.flat - start.flat
        if fit.steps:  # where batch norm cannot train on a client's only image, there is no gradient
            client.state.c = c_k - c - dw / (effective_steps(fit.steps, client.momentum) * client.lr)
        return Sum.weighted(1, dw=dw, dc=client.state.c - c_k, buffers=fit.w.buffers)
