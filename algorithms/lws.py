"""LWS: learnable weight scaling (Kang et al., ICLR 2020, Section 4), by each client for itself as in FedAvg+LWS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, knob
from algorithms.maths import balanced
from algorithms.params import Params


@dataclass(frozen=True)
class LWS(Algorithm):
    """A client learns one factor per class for the logits of the global model, which stays as it was."""

    card: ClassVar[Card] = Card("classifier", uploads="nothing", keeps="a scale per class")
    after: ClassVar[str | None] = "fedavg"
    per_image: ClassVar[str] = "it draws images by their class"
    epochs: int = knob(10, ge=0)  #: passes over the client's data, its classes drawn alike
    lr: float = knob(0.01, gt=0)  #: learning rate of the scales

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Before they are learned, all scales are 1."""
        return {"s": torch.ones_like(client.counts)}

    def phases(self) -> list[Phase]:
        """One visit to everyone."""
        return [Phase(self.rescale, rounds=1, everyone=True)]

    def rescale(self, server: State, clients: Cohort) -> None:
        """Send the global model once; nothing comes back."""
        clients.map(self.local, server.model)

    def local(self, client: Client, w: Params) -> None:
        """Minimise CE(s * (W h + b), y) over s alone: what it scales are numbers computed once."""
        z = client.classify(w, client.embed(w))
        fit = client.fit(
            self.objective, data=(z, client.y), rows=balanced(client.y), epochs=self.epochs, lr=self.lr,
            v=Params.pack(client.state.fields()),
        )  # fmt: skip
        client.state.s = fit.v["s"]

    def objective(self, client: Client, z: Tensor, y: Tensor, v: Model) -> Tensor:
        """Return cross entropy of the scaled logits."""
        return F.cross_entropy(v["s"] * z, y)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the scaled logits."""
        s = client.state.s
        return lambda x: s * client.logits(view[0], x)
