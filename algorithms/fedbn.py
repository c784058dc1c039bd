"""FedBN: federated learning on non-IID features via local batch normalization (Li et al., ICLR 2021, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Cohort, Predictor, State, Sum
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import batch_norms, together


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of all but the batch norms, whose weights and running statistics stay with the clients.

    They are uploaded for the generic model alone, which has this round's average of them; no client ever receives that
    average. On a network without batch norm this is FedAvg.
    """

    card: ClassVar[Card] = Card("personalized", uploads="model; batch norm for evaluation only", keeps="batch norm")

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """All batch norms start alike."""
        return {"own": model.under(*batch_norms(model))}

    def train(self, server: State, clients: Cohort) -> None:
        """Average the model by sample counts, but send it without batch norms."""
        own = batch_norms(server.model)
        total = clients.sum(self.local, server.model.where(lambda name: not name.startswith(own)))
        server.model = server.model.replace(total.w / total.n)

    def local(self, client: Client, shared: Params) -> Sum:
        """Train the received layers together with the client's own batch norms."""
        return Sum.weighted(client.n, w=together(client, self.objective, shared))

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the shared layers and the client's own batch norms."""
        w = view[0] | client.state.own
        return lambda x: client.logits(w, x)
