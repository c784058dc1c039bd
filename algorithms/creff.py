"""CReFF: classifier re-training with federated features (Shang, Lu, Huang, Wang; IJCAI 2022, Algorithm 1).

FedAvg trains w = (theta, v). Beside it the server makes features whose class gradients resemble those of the clients'
images, and trains a classifier u on these; what is tested is (theta, u). Nothing of u ever goes back into w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from algorithms import federated_features as ff
from algorithms.base import Card, Client, Cohort, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.maths import fresh
from algorithms.params import Params


@dataclass(frozen=True)
class CReFF(FedAvg):
    """FedAvg whose classifier is replaced by one that has seen as many (federated) features of every class."""

    card: ClassVar[Card] = Card("class imbalance", uploads="model, class gradients", singles="classes")
    features_per_class: int = knob(100, ge=1)  #: m
    match_steps: int = knob(100, ge=0)  #: SGD steps on the features in a round
    match_lr: float = knob(0.1, gt=0)  #: their learning rate
    grad_batch: int = knob(32, ge=1)  #: images of a class drawn for its gradient
    grad_repeats: int = knob(10, ge=1)  #: draws that are averaged
    head_epochs: int = knob(300, ge=0)  #: passes over the features that train u
    head_lr: float = knob(0.01, gt=0)  #: their learning rate
    head_batch: int = knob(32, ge=1)  #: their batch size

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep (theta, u) as the model, v, and once there are any the features h [C, m, d]; u starts as v."""
        ff.linear(model)
        return {"model": model, "v": model.head, "h": None}

    def train(self, server: State, clients: Cohort) -> None:
        """Average w, match the features at (theta, u), and train u anew on them."""
        u, w = server.model.head, server.model.replace(server.v)
        total = clients.sum(self.update, w, u)
        w = total.w / total.n
        z = {k: z / total.senders[k] for k, z in total.z.items()}
        h = ff.noise(u, self.features_per_class, clients.rng) if server.h is None else server.h
        server.h = ff.match(h, u, z, self.match_steps, self.match_lr)
        server.v, server.model = w.head, w.replace(clients.server(self.retrain, server.h, u))

    def update(self, client: Client, w: Params, u: Params) -> Sum:
        """Send w_k, and the class gradients at what was received, (theta, u)."""
        w_k = client.fit(self.objective, w=w).w
        return ff.weighted(client.n, w_k, ff.class_gradients(client, w | u, self.grad_batch, self.grad_repeats))

    def retrain(self, server: Client, h: Tensor, u: Params) -> Params:
        """Return a classifier that begins anew and is trained on the features alone, by plain SGD."""
        u = fresh(u, server.rng)
        return ff.tuned(server, u, h, self.head_epochs, lr=self.head_lr, batch=self.head_batch, plain=True)
