"""CLIMB: an agnostic approach to federated learning with class imbalance (Shen et al., ICLR 2022, Algorithm 1).

Minimise the mean of the clients' losses, subject to: nobody's loss exceeds the mean by more than eps. The multipliers
of these constraints weigh the clients, so that rare classes gain weight without anybody telling who holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Cohort, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params

LABELS = 1 << 21  #: whose logits are held at a time


@dataclass(frozen=True)
class CLIMB(FedAvg):
    """FedAvg with a weight omega_k on each client's loss, which every few rounds follows the client's excess loss."""

    card: ClassVar[Card] = Card(
        "class imbalance", "model; loss at times", needs="losses of all clients", singles="loss"
    )
    dual_lr: float = knob(1.0, ge=0)  #: eta_d, step size of the multipliers; 0: FedAvg
    dual_max: float = knob(100.0, gt=0)  #: largest lambda_k
    tolerance: float = knob(1.0, ge=0)  #: eps, how far a client's loss may exceed the mean
    primal_rounds: int = knob(5, ge=1)  #: n_p, rounds of FedAvg from one step of the multipliers to the next

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the model, the multipliers lambda_k that are not 0, and the rounds since they moved."""
        return {"model": model, "lam": {}, "rounds": 0}

    def train(self, server: State, clients: Cohort) -> None:
        """w <- sum_k n_k omega_k w_k / sum_k n_k omega_k, omega_k = 1 + lambda_k - mean(lambda)."""
        mean = sum(server.lam.values()) / len(clients.everyone)
        # A weight below 0 would push away from a client's model: it counts as 0.
        omega = {k: max(0.0, 1 + server.lam.get(k, 0.0) - mean) for k in clients.ids}
        total = clients.sum(self.weighted, server.model, omega)
        if total.n > 0:
            server.model = total.w / total.n
        server.rounds += 1
        if server.rounds == self.primal_rounds:
            server.lam, server.rounds = self.dual(server, clients), 0

    def weighted(self, client: Client, w: Params, omega: Mapping[int, float]) -> Sum:
        """Train the received model and send it back, weighted by n_k omega_k."""
        n = client.n * omega[client.id]
        return Sum.weighted(n, w=client.fit(self.objective, w=w).w)

    def dual(self, server: State, clients: Cohort) -> dict[int, float]:
        """lambda_k <- clip(lambda_k + eta_d (l_k - mean(l) - eps) / K, 0, dual_max), for all K clients."""
        losses = clients.only(clients.everyone).map(self.risk, server.model)
        mean, K = sum(losses.values()) / len(losses), len(clients.everyone)
        excess = {k: loss - mean - self.tolerance for k, loss in losses.items()}
        lam = {k: server.lam.get(k, 0.0) + self.dual_lr * over / K for k, over in excess.items()}
        return {k: min(value, self.dual_max) for k, value in lam.items() if value > 0}

    def risk(self, client: Client, w: Params) -> float:
        """l_k, the experiment's loss of the model on all of the client's samples."""
        size = max(1, LABELS // client.y.shape[1:].numel())  # all images at once, unless every pixel has a label
        labels = client.y.split(size)
        known = [int((y < len(client.counts)).sum()) for y in labels]  # a void pixel is none
        losses = (
            float(client.loss(client.classify(w, h), y))
            for h, y in zip(client.embed(w).split(size), labels, strict=True)
        )
        return sum(loss * (n / sum(known)) for loss, n in zip(losses, known, strict=True))
