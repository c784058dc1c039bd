"""cRT: classifier re-training (Kang et al., ICLR 2020, Section 4), federated as LDAE's baselines CRT-IB and CRT-CB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, State, Sum, knob
from algorithms.maths import balanced, fresh
from algorithms.params import Params


@dataclass(frozen=True)
class CRT(Algorithm):
    """The classifier is drawn anew and learned again by everyone together, on a body that no longer changes."""

    card: ClassVar[Card] = Card("classifier", uploads="classifier")
    after: ClassVar[str | None] = "fedavg"
    per_image: ClassVar[str] = "it draws images by their class"
    sampling: Literal["instance", "class_balanced"] = "class_balanced"  #: IB: images as they come; CB: classes alike
    rounds: int = knob(200, ge=1)  #: rounds of re-training
    lr: float | None = knob(None, gt=0)  #: learning rate of the re-training; None: the experiment's

    def phases(self) -> list[Phase]:
        """One phase of its own number of rounds."""
        return [Phase(self.retrain, rounds=self.rounds)]

    def retrain(self, server: State, clients: Cohort) -> None:
        """v <- sum_k n_k v_k / sum_k n_k, from a random v in the first round."""
        if clients.progress == 0:
            rng = torch.Generator().manual_seed(int(clients.rng.integers(2**63)))
            server.model = server.model.replace(fresh(server.model.head, rng))
        total = clients.sum(self.local, server.model)
        server.model = server.model.replace(total.v / total.n)

    def local(self, client: Client, w: Params) -> Sum:
        """Train the classifier and send it, weighted by n_k."""

        def objective(client: Client, x: Tensor, y: Tensor, v: Model) -> Tensor:
            return client.loss(client.classify(v, client.features(w, x)), y)

        rows = balanced(client.y) if self.sampling == "class_balanced" else None
        v = client.fit(objective, rows=rows, lr=self.lr, v=w.head).v
        return Sum.weighted(client.n, v=v)
