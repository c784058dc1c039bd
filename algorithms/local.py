"""Local: every client trains a model of its own and nothing is exchanged; the lower bound of personalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State
from algorithms.params import Params


@dataclass(frozen=True)
class Local(Algorithm):
    """A client trains its own model whenever it is drawn, so its budget is that of a federated client."""

    card: ClassVar[Card] = Card("personalized", uploads="nothing", keeps="model")
    shares_head: ClassVar[bool] = False

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Every client starts from the same initial model."""
        return {"w": model}

    def phases(self) -> list[Phase]:
        """One phase of the experiment's rounds."""
        return [Phase(self.train)]

    def train(self, server: State, clients: Cohort) -> None:
        """Let each client train alone."""
        clients.map(self.local)

    def local(self, client: Client) -> None:
        """Continue with the client's own model."""
        client.state.w = client.fit(self.objective, w=client.state.w).w

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return the experiment's loss on a batch."""
        return client.loss(client.logits(w, x), y)

    def view(self, server: State) -> tuple[Any, ...]:
        """Clients need nothing from the server."""
        return ()

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the client's own model."""
        w = client.state.w
        return lambda x: client.logits(w, x)
