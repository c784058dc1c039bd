"""FedNova: tackling the objective inconsistency problem in heterogeneous federated optimization.

Wang, Liu, Liang, Joshi, Poor; NeurIPS 2020, Section 5, with the a_k of SGD with momentum (Section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from algorithms.base import Card, Client, Cohort, State, Sum
from algorithms.fedavg import FedAvg
from algorithms.maths import effective_steps
from algorithms.params import Params


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg of updates per step, so that who takes many steps does not pull harder; with equal steps it is FedAvg."""

    card: ClassVar[Card] = Card("optimisation", uploads="model update, number of steps")

    def train(self, server: State, clients: Cohort) -> None:
        """w <- w - eta tau_eff sum_k p_k d_k, tau_eff = sum_k p_k a_k; batch-norm buffers are averaged by p_k."""
        total, w = clients.sum(self.local, server.model), server.model
        tau_eff = total.a / total.n
        server.model = Params(w.layout, w.flat - tau_eff * total.d / total.n, total.buffers / total.n)

    def local(self, client: Client, w: Params) -> Sum:
        """Send a_k and eta d_k = (w - w_k) / a_k; eta is the same for all in a round."""
        fit, n = client.fit(self.objective, w=w), client.n
        a = effective_steps(fit.steps, client.momentum)
        d = (w.flat - fit.w.flat) / (a or 1)  # who could take no step sends zeros
        return Sum.weighted(n, a=a, d=d, buffers=fit.w.buffers)
