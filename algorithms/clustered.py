"""Clustered FedAvg: updates are averaged within clusters first (Zhang et al., IEEE TMC 2024, Table 1).

It is the interface of their MuPFL (eqs. 7-15) alone, with a fixed number of clusters. All clients start from one model,
and for its successor clustering only changes client j's weight: from n_j / n to (samples of j's cluster) / (n x clients
of j's cluster).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from algorithms import federated_features as ff
from algorithms.base import Card, Client, Cohort, Predictor, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params


@dataclass(frozen=True)
class ClusteredFedAvg(FedAvg):
    """Clients whose updates point the same way share one update."""

    card: ClassVar[Card] = Card("personalized", keeps="its cluster's model", singles="upload")
    num_clusters: int = knob(4, ge=1)  #: kappa; with as many as there are clients in a round this is FedAvg
    eval_model: Literal["cluster", "global"] = "cluster"  #: w~_i as it was when the client was last drawn, or w_glo

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep w~_i; a client that was never drawn has none, and is tested with w_glo."""
        return {"w": None} if self.eval_model == "cluster" else {}

    def train(self, server: State, clients: Cohort) -> None:
        """w~_i = w + mean update of i's cluster (eq. 14), w <- sum_i n_i w~_i / sum_i n_i (eq. 15)."""
        sent = clients.map(self.update, server.model)
        delta = [d for _, d in sent.values()]
        cluster = self.cluster(delta, seed=int(clients.rng.integers(2**31)))
        means = ff.cluster_means(cluster, delta)
        w_tilde = {i: server.model + mean for i, mean in zip(sent, means, strict=True)}
        if self.eval_model == "cluster":
            clients.only(list(sent)).map(self.receive, each=w_tilde)
        total = ff.fold(Sum.weighted(n, w=w_tilde[i]) for i, (n, _) in sent.items())
        server.model = total.w / total.n

    def update(self, client: Client, w: Params) -> tuple[int, Params]:
        """Send n_i and Delta_i = w_i - w (eq. 7)."""
        return client.n, client.fit(self.objective, w=w).w - w

    def cluster(self, delta: list[Params], seed: int) -> list[int]:
        """Return each client's cluster, by k-means on cos(Delta_i, Delta_j)."""
        if self.num_clusters >= len(delta):
            return list(range(len(delta)))
        return ff.clusters(ff.cosines([d.flat for d in delta]), self.num_clusters, self.num_clusters, seed)

    def receive(self, client: Client, w_tilde: Params) -> None:
        """Keep the cluster's model."""
        client.state.w = w_tilde

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the cluster's model where there is one."""
        w = client.state.fields().get("w") or view[0]
        return lambda x: client.logits(w, x)
