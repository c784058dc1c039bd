"""FedAvg-FT: each client fine-tunes the whole global model on its own data, once, after federated training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, knob
from algorithms.params import Params


@dataclass(frozen=True)
class FineTune(Algorithm):
    """A post-hoc phase on every client; the global model stays as it was."""

    card: ClassVar[Card] = Card("personalized", uploads="nothing", keeps="model")
    after: ClassVar[str | None] = "fedavg"
    epochs: int = knob(10, ge=0)  #: passes over the client's data
    lr: float = knob(0.01, gt=0)  #: learning rate of the fine-tuning

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Before it is tuned, a client's model is the global one."""
        return {"w": model}

    def phases(self) -> list[Phase]:
        """One visit to everyone."""
        return [Phase(self.tune, rounds=1, everyone=True)]

    def tune(self, server: State, clients: Cohort) -> None:
        """Send the global model once; nothing comes back."""
        clients.map(self.local, server.model)

    def local(self, client: Client, w: Params) -> None:
        """Train all weights on the client's data."""
        client.state.w = client.fit(self.objective, epochs=self.epochs, lr=self.lr, w=w).w

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return the experiment's loss on a batch."""
        return client.loss(client.logits(w, x), y)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the tuned model."""
        w = client.state.w
        return lambda x: client.logits(w, x)
