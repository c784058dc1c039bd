"""LDAE: label-distribution-agnostic ensemble learning on federated long-tailed data (anonymous authors, section 3.3).

Each group of similar clients trains the shared trunk theta and an expert E_i of its own. The proxies that tell who is
similar come from the round before, gpi; eq. 8 is the loss `balanced_softmax` with the prior `gpi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Card, Client, Cohort, Model, State, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params


@dataclass(frozen=True)
class LDAE(FedAvg):
    """Experts that differ because different clients train them; they predict by the mean of their logits."""

    card: ClassVar[Card] = Card("class imbalance", uploads="model; class proxies once")
    after: ClassVar[str | None] = "gpi"
    inherits: ClassVar[tuple[str, ...]] = ("prior", "proxies")
    per_image: ClassVar[str] = "no network for pixels has several experts"
    num_experts: int = knob(3, ge=1)  #: M; one expert is FedAvg with the experiment's loss and prior
    group_fraction: float = knob(0.5, ge=0, le=1)  #: alpha, the share of an expert's clients from its own group
    clients_per_expert: int | None = knob(None, ge=1)  #: S, for each expert; None: the experiment's clients per round
    total_budget: bool = False  #: S is for all experts together: floor(S/M), but at least one client, for each
    grouping: Literal["proxy", "label_distribution", "random"] = "proxy"  #: what the clients are ranked by (Table 4)
    schedule: Literal["parallel", "sequential"] = "parallel"  #: sequential: E_{i+1} trains on the theta E_i left
    specialise_from: float = knob(0.0, ge=0, le=1)  #: share of the rounds in which everybody trains all experts first
    loss_logits: Literal["mean", "own"] = "mean"  #: own: an expert's loss is that of its own logits v_i, not eq. 8

    @property
    def experts(self) -> int | None:
        """M."""
        return self.num_experts

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the model, Omega and all Omega^k of the round before, and the groups P_i once they are made."""
        return {"model": model, "prior": None, "proxies": {}, "groups": []}

    def train(self, server: State, clients: Cohort) -> None:
        """Average theta over all uploads, and E_i over the uploads of those who trained it, by sample counts."""
        experts = range(self.num_experts)
        if len(experts) == 1 or clients.progress < self.specialise_from:
            super().train(server, clients)
            return
        server.groups = server.groups or self.group(server, clients)
        for together in [experts] if self.schedule == "parallel" else [[i] for i in experts]:
            drawn = {i: self.select(i, server.groups, len(clients.ids), clients.rng) for i in together}
            total = reduce(add, (clients.only(ids).sum(self.specialise, server.model, i) for i, ids in drawn.items()))
            server.model = server.model.replace(total.theta / total.n)
            for i in together:
                server.model = server.model.replace(total.E[i] / total.n_of[i])

    def group(self, server: State, clients: Cohort) -> list[list[int]]:
        """Rank the clients by cos(Omega^k, Omega), and cut the ranking into M groups of one size."""
        ids = sorted(server.proxies)
        if not ids:
            raise ValueError("ldae ranks clients by the proxies that gpi finds: let gpi run right before it")
        if len(ids) < self.num_experts:
            raise ValueError(f"ldae.num_experts is {self.num_experts}, but there are only {len(ids)} clients to group")
        if self.grouping == "random":
            ranking = clients.rng.permutation(ids).tolist()
        else:
            Omega_k, Omega = server.proxies, server.prior
            if self.grouping == "label_distribution":
                Omega_k = clients.only(ids).map(self.label_counts)
                ids = sorted(Omega_k)
                Omega = torch.stack([Omega_k[k] for k in ids]).sum(0)
            ranking = sorted(ids, key=lambda k: -float(F.cosine_similarity(Omega_k[k], Omega, dim=0)))
        return [part.tolist() for part in np.array_split(ranking, self.num_experts)]

    def label_counts(self, client: Client) -> Tensor:
        """Tell the server what it must not know: the paper groups by it only to see what proxies lose."""
        return client.counts

    def select(self, i: int, groups: Sequence[Sequence[int]], per_round: int, rng: np.random.Generator) -> list[int]:
        """Draw alpha S clients of P_i, and (1 - alpha) S of all others plus as many as P_i lacks."""
        alpha, S = self.group_fraction, self.clients_per_expert or per_round
        if self.total_budget:
            S = max(1, S // self.num_experts)
        own = rng.choice(groups[i], min(int(alpha * S + 0.5), len(groups[i])), replace=False).tolist()
        others = sorted({k for group in groups for k in group} - set(own))
        missing = 0 if alpha == 1 else S - len(own)  # alpha = 1: "no interaction", however small the group is
        return [*own, *rng.choice(others, min(missing, len(others)), replace=False).tolist()]

    def specialise(self, client: Client, model: Params, i: int) -> Sum:
        """Train theta and E_i; the other experts are frozen, but present in the forward pass."""

        def objective(client: Client, x: Tensor, y: Tensor, theta: Params, E: Params) -> Tensor:
            return self.objective(client, x, y, {**model, **theta, **E}, i)

        theta = model.where(lambda name: not name.startswith(("body.experts.", "head.experts.")))
        fit = client.fit(objective, theta=theta, E=model.under(f"body.experts.{i}.", f"head.experts.{i}."))
        return Sum.weighted(client.n, theta=fit.theta, E={i: fit.E}) | Sum(n_of={i: client.n})

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model, i: int | None = None) -> Tensor:
        """Eq. 8; of own logits the losses of all experts, or while only E_i is trained M times that of v_i."""
        if self.loss_logits == "mean":
            return super().objective(client, x, y, w)
        v = client.classify(w, client.features(w, x), each=True)
        losses = [client.loss(v_i, y) for v_i in (v if i is None else v[i : i + 1])]
        return torch.stack(losses).sum() * (len(v) / len(losses))
