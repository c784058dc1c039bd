"""LG-FedAvg: think locally, act globally (Liang et al., NeurIPS 2019 workshop, arXiv:2001.01523, Algorithm 1).

The authors' code starts from a model that FedAvg has trained: that is the chain [fedavg, lg_fedavg].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Card, Client, Cohort, Predictor, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import layers, modules, together


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """Every client keeps a feature extractor of its own; the last layers, trained together with it, are averaged."""

    card: ClassVar[Card] = Card("personalized", uploads="classifier", keeps="body")
    num_layers_keep: int = knob(1, ge=1)  #: how many last layers are shared, the classifier among them; all: FedAvg

    def shared(self, model: Params) -> tuple[str, ...]:
        """Return the prefixes of what is exchanged."""
        last = layers(model.body)[::-1][: self.num_layers_keep - 1]
        return "head.", *modules([name for layer in last for name in layer])

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the shared layers, in a model whose others nobody trains."""
        depth = 1 + len(layers(model.body))
        if self.num_layers_keep > depth:
            raise ValueError(f"num_layers_keep is {self.num_layers_keep}, but this network has only {depth} layers")
        return {"model": model}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """All extractors start alike."""
        shared = self.shared(model)
        return {"own": model.where(lambda name: not name.startswith(shared))}

    def train(self, server: State, clients: Cohort) -> None:
        """Average the shared layers by sample counts."""
        total = clients.sum(self.local, server.model.under(*self.shared(server.model)))
        server.model = server.model.replace(total.w / total.n)

    def local(self, client: Client, shared: Params) -> Sum:
        """Train the whole network and send its shared layers."""
        w = together(client, self.objective, shared)
        return Sum.weighted(client.n, w=w.where(shared.__contains__))

    def generic(self, client: Client, *view: Any) -> Predictor | None:
        """Nobody shares the extractor, so there is no generic model."""
        return None

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the client's own extractor and the shared layers."""
        w = view[0] | client.state.own
        return lambda x: client.logits(w, x)
