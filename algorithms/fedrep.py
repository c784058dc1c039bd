"""FedRep: exploiting shared representations for personalized federated learning (Collins et al., ICML 2021, Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Cohort, Phase, Predictor, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import alone, classifier, joined


@dataclass(frozen=True)
class FedRep(FedAvg):
    """First the client's own classifier h_k is fitted to the received representation phi, then phi to the classifier.

    Classifiers are uploaded for the generic model alone, which is phi and the average of this round's h_k; no client
    ever receives that average.
    """

    card: ClassVar[Card] = Card("personalized", uploads="body; classifier for evaluation only", keeps="classifier")
    later: ClassVar[dict[str, str]] = {"visit": "final_epochs"}
    shares_head: ClassVar[bool] = False
    head_epochs: int = knob(10, ge=0)  #: epochs on h_k while phi is frozen, tau_h
    body_epochs: int | None = knob(None, ge=0)  #: epochs on phi while h_k is frozen; None: the experiment's
    final_epochs: int = knob(0, ge=0)  #: epochs on h_k alone in a last visit to everyone; 0: none

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """All classifiers start alike."""
        return {"own": model.head}

    def phases(self) -> list[Phase]:
        """List the experiment's rounds, then the last visit."""
        last = [Phase(self.visit, rounds=1, everyone=True)] if self.final_epochs else []
        return [Phase(self.train), *last]

    def train(self, server: State, clients: Cohort) -> None:
        """Average phi by sample counts, and beside it the classifiers."""
        total = clients.sum(self.local, server.model.body)
        server.model = server.model.replace(total.w / total.n)

    def local(self, client: Client, phi: Params) -> Sum:
        """Train h_k, then phi."""
        h = client.state.own = classifier(client, phi, client.state.own, self.head_epochs)
        phi = alone(client, self.objective, h, phi, self.body_epochs)
        return Sum.weighted(client.n, w=joined(phi, h))

    def visit(self, server: State, clients: Cohort) -> None:
        """Send the representation to everyone once more; nothing comes back."""
        clients.map(self.last, server.model.body)

    def last(self, client: Client, phi: Params) -> None:
        """Fit h_k to the final phi, which who was not lately selected has not seen."""
        client.state.own = classifier(client, phi, client.state.own, self.final_epochs)

    def generic(self, client: Client, *view: Any) -> Predictor | None:
        """Predict with the representation and the average of the classifiers."""
        return lambda x: client.logits(view[0], x)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the representation and the client's own classifier."""
        w = view[0] | client.state.own
        return lambda x: client.logits(w, x)
