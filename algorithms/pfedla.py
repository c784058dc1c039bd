"""pFedLA: layer-wised model aggregation for personalized federated learning (Ma et al., CVPR 2022, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Card, Client, Cohort, Predictor, State, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from algorithms.parts import layers


@dataclass(frozen=True)
class PFedLA(FedAvg):
    """On the server each client has a hypernetwork, which says layer by layer how to mix all clients' models for it."""

    card: ClassVar[Card] = Card("personalized", keeps="model", needs="server keeps every model", singles="upload")
    shares_head: ClassVar[bool] = False
    embedding_dim: int = knob(100, ge=1)  #: length of v_k, the input of HN_k, which is learnt too
    hidden_dim: int = knob(100, ge=1)  #: width of its hidden layers
    hidden_layers: int = knob(3, ge=0)  #: their number
    hn_lr: float = knob(5e-3, ge=0)  #: learning rate of v_k and HN_k

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep theta_k and HN_k of the clients that have taken part; the theta of all others is the first model's."""
        return {"model": model, "theta": {}, "HN": {}}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep theta_k here too, for its buffers and to predict with."""
        return {"w": model}

    def train(self, server: State, clients: Cohort) -> None:
        """Send every client its mixture, take the change that training makes, and learn from it how to mix."""
        model = server.model
        sizes = [sum(model[name].numel() for name in layer) for layer in layers(model)]
        theta = torch.stack([server.theta.get(j, model.flat) for j in clients.everyone]).split(sizes, dim=1)
        HN = {k: server.HN.get(k) or self.newborn(theta, clients.rng) for k in clients.ids}
        start = {k: self.mixed(HN[k], theta) for k in clients.ids}
        for k, change in clients.map(self.update, each=start).items():
            server.theta[k] = start[k] + change
            server.HN[k] = self.descended(HN[k], theta, -change)

    def newborn(self, theta: Sequence[Tensor], rng: np.random.Generator) -> Params:
        """Draw v_k normal, hidden layers as torch does, and the output so that no block's weights are all zero."""
        blocks, population = len(theta), len(theta[0])
        dims = [self.embedding_dim] + [self.hidden_dim] * self.hidden_layers
        drawn = {"v": rng.standard_normal(dims[0])}
        for i, (d, width) in enumerate(pairwise(dims)):
            drawn[f"hidden.{i}.weight"] = rng.uniform(-1, 1, (width, d)) / d**0.5
            drawn[f"hidden.{i}.bias"] = rng.uniform(-1, 1, width) / d**0.5
        drawn["out.weight"] = rng.uniform(0, 1, (blocks, population, dims[-1]))
        drawn["out.bias"] = np.zeros((blocks, population))
        return Params.pack({name: torch.from_numpy(value).to(theta[0]) for name, value in drawn.items()})

    def alpha(self, HN: Params) -> Tensor:
        """Return alpha_k [blocks, clients]: what HN_k gives for v_k, each block's weights adding up to one."""
        e = HN["v"]
        for i in range(self.hidden_layers):
            e = F.relu(F.linear(e, HN[f"hidden.{i}.weight"], HN[f"hidden.{i}.bias"]))
        out = F.relu(HN["out.weight"] @ e + HN["out.bias"])
        out = torch.where(out.any(1, keepdim=True), out, torch.ones_like(out))  # nothing preferred: all alike
        return out / out.sum(1, keepdim=True)

    def mixed(self, HN: Params, theta: Sequence[Tensor]) -> Tensor:
        """theta_k^l = sum_j alpha_{k,j}^l theta_j^l; theta is given as a matrix of a row per client for each block."""
        return torch.cat([a @ block for a, block in zip(self.alpha(HN), theta, strict=True)])

    def descended(self, HN: Params, theta: Sequence[Tensor], gradient: Tensor) -> Params:
        """Take a step down the loss by the chain rule through the mixture, start - end standing for its gradient."""
        flat = HN.flat.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.mixed(Params(HN.layout, flat, HN.buffers), theta), flat, gradient)
        return Params(HN.layout, HN.flat - self.hn_lr * slope, HN.buffers)

    def update(self, client: Client, start: Tensor) -> Tensor:
        """Train the mixture, with the client's own batch-norm statistics, and send the change."""
        own: Params = client.state.w
        client.state.w = w = client.fit(self.objective, w=Params(own.layout, start, own.buffers)).w
        return w.flat - start

    def view(self, server: State) -> tuple[Any, ...]:
        """Clients have what they need."""
        return ()

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with theta_k."""
        w = client.state.w
        return lambda x: client.logits(w, x)
