"""FedAvg: federated averaging (McMahan et al., AISTATS 2017, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from algorithms.base import Algorithm, Client, Cohort, Model, Phase, State, Sum
from algorithms.params import Params


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Clients train the global model on their data; the server averages by sample counts."""

    def phases(self) -> list[Phase]:
        """One phase of the experiment's rounds."""
        return [Phase(self.train)]

    def train(self, server: State, clients: Cohort) -> None:
        """w <- sum_k n_k w_k / sum_k n_k."""
        total = clients.sum(self.local, server.model)
        server.model = total.w / total.n

    def local(self, client: Client, w: Params) -> Sum:
        """Train the received model and send it back, weighted by n_k."""
        w = client.fit(self.objective, w=w).w
        return Sum.weighted(client.n, w=w)

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return the experiment's loss on a batch."""
        return client.loss(client.logits(w, x), y)
