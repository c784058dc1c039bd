"""FedProx: federated optimization in heterogeneous networks (Li et al., MLSys 2020, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.base import Client, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.maths import proximal
from algorithms.params import Params


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are held near the received model."""

    mu: float = knob(0.01, ge=0)  #: mu, weight of the proximal term

    def local(self, client: Client, w: Params) -> Sum:
        """Minimise F_k(w) + mu/2 ||w - w_glo||^2."""
        w = client.fit(proximal(self.objective, self.mu, anchor=w), w=w).w
        return Sum.weighted(client.n, w=w)
