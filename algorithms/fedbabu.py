"""FedBABU: toward enhanced representation for federated image classification (Oh, Kim, Yun, ICLR 2022, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from algorithms.base import Card, Client, Cohort, Phase, Predictor, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import alone

_PREFIXES = {"full": ("body.", "head."), "head": ("head.",), "body": ("body.",)}


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """Body aggregation, body update: the classifier stays as it was drawn until clients fine-tune, after training."""

    card: ClassVar[Card] = Card("personalized", uploads="body", keeps="model")
    later: ClassVar[dict[str, str]] = {"personalize": "finetune_epochs finetune_part finetune_lr"}
    finetune_epochs: int = knob(5, ge=0)  #: epochs of the fine-tuning; 0: none
    finetune_part: Literal["full", "head", "body"] = "full"  #: what is fine-tuned, the rest being frozen
    finetune_lr: float | None = knob(None, gt=0)  #: its learning rate; None: the experiment's

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep the part that was fine-tuned; before, a client's model is the global one."""
        return {"own": None}

    def phases(self) -> list[Phase]:
        """List the experiment's rounds, then a visit to everyone."""
        visit = [Phase(self.personalize, rounds=1, everyone=True)] if self.finetune_epochs else []
        return [Phase(self.train), *visit]

    def train(self, server: State, clients: Cohort) -> None:
        """theta <- sum_k n_k theta_k / sum_k n_k."""
        total = clients.sum(self.local, server.model)
        server.model = server.model.replace(total.w / total.n)

    def local(self, client: Client, w: Params) -> Sum:
        """Train theta under the common classifier and send it."""
        return Sum.weighted(client.n, w=alone(client, self.objective, w.head, w.body))

    def personalize(self, server: State, clients: Cohort) -> None:
        """Send the global model once more; nothing comes back."""
        clients.map(self.tune, server.model)

    def tune(self, client: Client, w: Params) -> None:
        """Fine-tune on the client's data."""
        part = w.under(*_PREFIXES[self.finetune_part])
        client.state.own = alone(client, self.objective, w, part, self.finetune_epochs, self.finetune_lr)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the fine-tuned model."""
        w = view[0] | (client.state.own or {})
        return lambda x: client.logits(w, x)
