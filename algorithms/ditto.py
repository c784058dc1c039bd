"""Ditto: fair and robust federated learning through personalization (Li et al., ICML 2021, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Predictor, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.maths import proximal
from algorithms.params import Params


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a model of each client's own that is held near the global one."""

    card: ClassVar[Card] = Card("personalized", keeps="model")
    prox_weight: float = knob(1.0, ge=0)  #: lambda, pull of the received model on v_k; 0: v_k is trained locally
    personal_epochs: int | None = knob(None, ge=0)  #: epochs on v_k in each participation; None: the experiment's

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """v_k starts as the first global model."""
        return {"v": model}

    def local(self, client: Client, w: Params) -> Sum:
        """Send w_k as FedAvg does, and minimise F_k(v) + lambda/2 ||v - w||^2, where w is the model received."""
        sent = super().local(client, w)
        held = proximal(self.objective, self.prox_weight, anchor=w)
        client.state.v = client.fit(held, epochs=self.personal_epochs, w=client.state.v).w
        return sent

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with v_k."""
        v = client.state.v
        return lambda x: client.logits(v, x)
