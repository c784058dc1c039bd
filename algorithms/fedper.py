"""FedPer: federated learning with personalization layers (Arivazhagan et al., arXiv:1912.00818, Algorithms 1-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Cohort, Predictor, State, Sum
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import together


@dataclass(frozen=True)
class FedPer(FedAvg):
    """The body W_B is averaged; every client keeps a classifier W_P of its own and trains both together."""

    card: ClassVar[Card] = Card("personalized", uploads="body", keeps="classifier")
    shares_head: ClassVar[bool] = False

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """All classifiers start alike."""
        return {"own": model.head}

    def train(self, server: State, clients: Cohort) -> None:
        """W_B <- sum_k n_k W_B,k / sum_k n_k."""
        total = clients.sum(self.local, server.model.body)
        server.model = server.model.replace(total.w / total.n)

    def local(self, client: Client, body: Params) -> Sum:
        """Train (W_B, W_P,k) and send W_B."""
        return Sum.weighted(client.n, w=together(client, self.objective, body).body)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the shared body and the client's own classifier."""
        w = view[0] | client.state.own
        return lambda x: client.logits(w, x)
