"""FedProx: federated optimization in heterogeneous networks (Li et al., MLSys 2020, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from algorithms.base import Client, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are held near the received model."""

    mu: float = knob(0.01, ge=0)  #: mu, weight of the proximal term

    def local(self, client: Client, w: Params) -> Sum:
        """Minimise F_k(w) + mu/2 ||w - w_glo||^2."""
        received = w

        def proximal(client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:
            drift = w - received
            return self.objective(client, x, y, w) + self.mu / 2 * drift.dot(drift)

        w = client.fit(proximal, w=w).w
        return Sum(n=client.n, w=client.n * w)
