"""MuPFL: multi-level personalized federated learning on heterogeneous and long-tailed data.

Zhang, Chen, Wu, Wang, Li; IEEE Transactions on Mobile Computing 2024, Algorithm 1. Clients train with BAVD (eq. 6), an
interface clusters their updates (ACMU, eqs. 7-14), the server averages (eq. 15) and makes features on which each client
tunes a classifier of its own (PKCF, eqs. 16-21). A model is w = (u, v): the extractor u and the classifier v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms import federated_features as ff
from algorithms.base import Card, Client, Cohort, Model, Phase, Predictor, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params


@dataclass(frozen=True)
class MuPFL(FedAvg):
    """Three modules, each with a switch; with all of them off this is FedAvg."""

    card: ClassVar[Card] = Card("personalized", "model, maps, class gradients", "model", singles="upload")
    linear_head: ClassVar[bool] = True
    bavd: bool = True  #: BAVD: zero what the activation maps M_i hold to be of little use
    psi_sign: Literal["text", "formula"] = "text"  #: psi = l_{q-1} - l_q as the text explains it, or the negative
    map_shape: Literal["chw", "hw"] = "chw"  #: M_i of a layer: one map per channel, or one for all
    bavd_mode: Literal["value", "mean", "topk"] = "value"  #: keep h >= mu_i, or where M_i^norm >= mu_i, or K largest
    topk_share: float = knob(0.5, gt=0, le=1)  #: K of mode topk, as a share of a map's H x W positions
    map_life: Literal["call", "epoch", "persistent"] = "call"  #: M_i accumulates over a visit, an epoch, or all visits
    acmu: bool = True  #: ACMU: average updates within clusters before all models are averaged
    update_similarity_weight: float = knob(0.5, ge=0, le=1)  #: alpha, updates against maps; without BAVD updates alone
    kappa_min: int = knob(2, ge=2)  #: fewest clusters
    kappa_max: int = knob(6, ge=2)  #: most clusters; never more than one less than there are clients in the round
    pkcf: bool = True  #: PKCF: own classifiers v_i, tuned on federated features h_glo
    features_per_class: int = knob(100, ge=0)  #: m; 0: no PKCF
    classifier_epochs: int = knob(30, ge=0)  #: tau, passes over h_glo before each local training
    match_steps: int = knob(100, ge=0)  #: SGD steps on h_glo in a round
    match_lr: float = knob(0.1, gt=0)  #: their learning rate
    grad_batch: int = knob(32, ge=1)  #: images of a class drawn for z_i^k
    grad_repeats: int = knob(10, ge=1)  #: draws that are averaged
    grad_at: Literal["global", "local"] = "global"  #: z_i^k at the received w_glo, or at the trained w_i
    eval_model: Literal["local", "cluster", "head_only"] = "local"  #: w_i of a last visit, w~_i, or (u_glo, tuned v_i)

    def __post_init__(self) -> None:
        if self.kappa_min > self.kappa_max:
            raise ValueError(f"kappa_min {self.kappa_min} is above kappa_max {self.kappa_max}")
        if self.eval_model == "cluster" and not self.acmu:
            raise ValueError("eval_model 'cluster' is made by ACMU; set acmu: true or choose another eval_model")

    @property
    def heads(self) -> bool:
        """Whether PKCF is on, and so every client has a classifier of its own."""
        return self.pkcf and self.features_per_class > 0

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep w_glo and, once there are any, h_glo [C, m, d]."""
        return {"model": model} | ({"h": None} if self.heads and ff.linear(model) else {})

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep v_i and a model to be tested with (while None, the server's), and maps that last."""
        return {"v": None, "w": None, "maps": {}} if self.bavd or self.acmu or self.heads else {}

    def phases(self) -> list[Phase]:
        """List the experiment's rounds, and a visit to everyone where that makes the model to be tested."""
        visit = {"local": self.bavd or self.acmu or self.heads, "cluster": False, "head_only": self.heads}
        return [Phase(self.train), Phase(self.personalize, rounds=1, everyone=True)][: 1 + visit[self.eval_model]]

    def train(self, server: State, clients: Cohort) -> None:
        """Run one round (MUPFL and PKCF of Algorithm 1)."""
        w, h = server.model, server.fields().get("h")
        if self.acmu:
            sent = clients.map(self.update, w, h)
            w_tilde = self.interface(w, sent, seed=int(clients.rng.integers(2**31)))
            if self.eval_model == "cluster":
                clients.only(list(sent)).map(self.receive, each=w_tilde)
            total = ff.fold(ff.weighted(up["n"], w_tilde[i], up["z"]) for i, up in sent.items())
        else:
            total = clients.sum(self.summed, w, h)
        server.model = total.w / total.n  # eq. 15
        if self.heads:
            z_glo = {k: z / total.senders[k] for k, z in total.z.items()}  # eq. 17
            v = w if self.grad_at == "global" else server.model
            h = ff.noise(v, self.features_per_class, clients.rng) if h is None else h
            server.h = ff.match(h, v, z_glo, self.match_steps, self.match_lr)  # eqs. 19-20

    def update(self, client: Client, w: Params, h: Tensor | None) -> dict[str, Any]:
        """Tune v_i, train from there, and send w_i, maps and class gradients (CLIENTUPDATE of Algorithm 1)."""
        start = self.tune(client, w, h)
        w_i, maps = self.descend(client, start)
        up = {"n": client.n, "w": w_i, "maps": maps, "v": {}, "z": {}}
        if self.heads:
            client.state.v = w_i.head
            at = w if self.grad_at == "global" else w_i
            up |= {"v": start.head, "z": ff.class_gradients(client, at, self.grad_batch, self.grad_repeats)}  # eq. 16
        return up

    def summed(self, client: Client, w: Params, h: Tensor | None) -> Sum:
        """Update where nobody has to see a single client's model."""
        up = self.update(client, w, h)
        return ff.weighted(up["n"], up["w"], up["z"])

    def tune(self, client: Client, w: Params, h: Tensor | None) -> Params:
        """Return (u_glo, v_i): v_i, at first v_glo, tuned for tau epochs on h_glo once there is one (eq. 21)."""
        if not self.heads:
            return w
        v = client.state.v or w.head
        return w.replace(v if h is None else ff.tuned(client, v, h, self.classifier_epochs))

    def descend(self, client: Client, w: Params) -> tuple[Params, Tensor]:
        """Train w on the client's data, with BAVD (eq. 6); return it and the activation maps M_i as one vector."""
        if not self.bavd:
            return client.fit(self.objective, w=w).w, torch.zeros(0)
        M = client.state.maps if self.map_life == "persistent" else {}
        maps = ff.ActivationMaps(M, self.psi_sign, self.map_shape, self.bavd_mode, self.topk_share)
        rows = (lambda rng: maps.forget(torch.arange(client.n), rng)) if self.map_life == "epoch" else None
        return client.fit(maps.objective, rows=rows, w=w).w, maps.vector()

    def interface(self, w: Params, sent: dict[int, Any], seed: int) -> dict[int, Params]:
        """Return w~_i: where a client started plus the mean update of its cluster (ACMU of Algorithm 1)."""
        start = [w.replace(up["v"]) for up in sent.values()]
        delta = [up["w"] - w_0 for up, w_0 in zip(sent.values(), start, strict=True)]  # eq. 7
        alpha = self.update_similarity_weight if self.bavd else 1.0
        maps = ff.cosines([up["maps"] for up in sent.values()])
        similarity = alpha * ff.cosines([d.flat for d in delta]) + (1 - alpha) * maps  # eq. 8
        mean = ff.cluster_means(ff.clusters(similarity, self.kappa_min, self.kappa_max, seed), delta)
        return {i: w_0 + d for i, w_0, d in zip(sent, start, mean, strict=True)}  # eq. 14

    def receive(self, client: Client, w_tilde: Params) -> None:
        """Keep the cluster's model."""
        client.state.w = w_tilde

    def personalize(self, server: State, clients: Cohort) -> None:
        """Let everyone tune and train once more; nothing comes back."""
        clients.map(self.settle, server.model, server.fields().get("h"))

    def settle(self, client: Client, w: Params, h: Tensor | None) -> None:
        """Keep the tuned classifier and, unless that alone is to be tested, the model trained from there."""
        client.state.v = (w := self.tune(client, w, h)).head
        if self.eval_model == "local":
            client.state.w, _ = self.descend(client, w)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the client's own model where it has one, else with (u_glo, v_i)."""
        own = client.state.fields()
        w: Model = own.get("w") or view[0] | (own.get("v") or {})
        return lambda x: client.logits(w, x)
