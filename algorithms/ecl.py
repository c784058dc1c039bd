"""ECL: Expert Collaborative Learning (Lv, Shang, Zhou, Zhang, Li, Lu, arXiv:2408.02019, 2024), phase II of Algorithm 1.

On every client, after federated training: the shared classifier is retrained for the local class counts (eq. 3), the
classes are grouped by size and each group gets an expert (eq. 4), and the two are mixed class by class (eqs. 5 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, knob
from algorithms.losses import BalancedSoftmax
from algorithms.maths import balanced, fresh
from algorithms.params import Params


def grouping(counts: Tensor, M: int) -> Tensor:
    """Return each class's group, from 0 for the largest classes to M - 1, and -1 for classes without samples."""
    # Ties are ordered by class; where the groups cannot be equal, the first ones have one class more.
    ordered = counts.argsort(descending=True, stable=True)[: counts.count_nonzero()]
    owner = torch.full_like(counts, -1, dtype=torch.int64)
    for m, group in enumerate(ordered.tensor_split(min(M, len(ordered)))):
        owner[group] = m
    return owner


def classifier(v: Params) -> Tensor:
    """Return the weights U of a model's classifier without its bias, a row per class."""
    return torch.cat([t for t in v.head.values() if t.dim() == 2], dim=1)


@dataclass(frozen=True)
class ECL(Algorithm):
    """Experts for groups of classes of similar size, each speaking only for its own; the global model stays."""

    card: ClassVar[Card] = Card("personalized", uploads="nothing", keeps="classifier and experts")
    later: ClassVar[dict[str, str]] = {"predict": "expert_logit_weight norm_ratio norm_power scaling mask_unowned"}
    after: ClassVar[str | None] = "fedavg"
    per_image: ClassVar[str] = "its experts divide images by their class"
    num_experts: int = knob(2, ge=1)  #: M, experts per client, but no more than it has classes
    expert_logit_weight: float = knob(0.5, ge=0, le=1)  #: lambda, weight of the expert beside the global model (eq. 6)
    norm_ratio: Literal["expert_over_global", "global_over_expert"] = "expert_over_global"  #: |u|/|u_0| of eq. 5
    norm_power: Literal[1, 2] = 2  #: exponent of that ratio, the 2 printed in eq. 5
    scaling: Literal["scalar", "per_class", "none"] = "scalar"  #: norms of whole classifiers, or row by row (Table 3)
    expert_head_init: Literal["reinit", "global"] = "reinit"  #: how the classifier of v_k^m begins
    finetune_part: Literal["last_stage", "last_block"] = "last_stage"  #: "last residual block" that experts m < M train
    mask_unowned: bool = True  #: never predict a class of which the client has no sample
    epochs: int = knob(10, ge=0)  #: passes of each expert over its samples, and of the global head over all
    lr: float = knob(0.01, gt=0)  #: learning rate of phase II
    momentum: float = knob(0.9, ge=0, lt=1)  #: momentum of phase II
    weight_decay: float = knob(5e-4, ge=0)  #: weight decay of phase II
    batch: int = knob(64, ge=1)  #: batch size of phase II

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Before it is visited, a client has no experts and leaves every class to the global model."""
        return {"head": model.head, "experts": [], "owner": torch.zeros_like(client.counts, dtype=torch.int64)}

    def phases(self) -> list[Phase]:
        """One visit to everyone."""
        return [Phase(self.specialise, rounds=1, everyone=True)]

    def specialise(self, server: State, clients: Cohort) -> None:
        """Send the global model w^T once; nothing comes back."""
        clients.map(self.local, server.model)

    def local(self, client: Client, w: Params) -> None:
        """Train the client's own classifier and its experts (Algorithm 1, lines 15 to 20)."""
        owner, y = grouping(client.counts, self.num_experts), client.y
        tail = int(owner.max())
        sgd: dict[str, Any] = {k: getattr(self, k) for k in ("epochs", "lr", "momentum", "weight_decay", "batch")}
        # What trains only a classifier sees the features of the images as they are, computed once, not augmented.
        h = client.embed(w)

        def deep(client: Client, x: Tensor, y: Tensor, v: Model) -> Tensor:
            return self.ce(client, client.features(w | v, x), y, v)

        def expert(m: int) -> Params:
            v, rows = self.newborn(client, w), (owner[y] == m).nonzero().flatten()
            if m < tail and len(rows) > 1:  # batch norm cannot learn from a single image
                return client.fit(deep, rows=rows, v=v, **sgd).v
            return client.fit(self.ce, data=(h[rows], y[rows]), rows=balanced(y[rows]), v=v.head, **sgd).v

        client.state.owner = owner
        client.state.head = client.fit(self.bsce, data=(h, y), v=w.head, **sgd).v
        client.state.experts = [expert(m) for m in range(tail + 1)]

    def newborn(self, client: Client, w: Params) -> Params:
        """Return what an expert may train, as it is before: the last stage of w^T and a classifier."""
        v = w.under(getattr(client, self.finetune_part), "head.")
        return v if self.expert_head_init == "global" else v.replace(fresh(v.head, client.rng))

    def bsce(self, client: Client, h: Tensor, y: Tensor, v: Model) -> Tensor:
        """Balanced softmax with the local counts n_k^c (eq. 3); a class without samples drops out."""
        return BalancedSoftmax()(client.classify(v, h), y, client.counts)

    def ce(self, client: Client, h: Tensor, y: Tensor, v: Model) -> Tensor:
        """Cross entropy over all classes, not only the expert's own (eq. 4)."""
        return F.cross_entropy(client.classify(v, h), y)

    def scale(self, u: Tensor, u_0: Tensor) -> Tensor:
        """Return the factor on an expert's logits, one number or one per class, from the classifiers' norms (eq. 5)."""
        if self.scaling == "none":
            return torch.ones(())
        rows = 1 if self.scaling == "per_class" else None
        norm, norm_0 = (torch.linalg.vector_norm(t, dim=rows).clamp_min(1e-12) for t in (u, u_0))
        ratio: Tensor = norm / norm_0 if self.norm_ratio == "expert_over_global" else norm_0 / norm
        return ratio.pow(self.norm_power)

    def aggregate(self, z_0: Tensor, zbar: Iterable[Tensor], owner: Tensor) -> Tensor:
        """Mix the scaled logit of a class's one expert with the global model's, alone where there is none (eq. 6)."""
        lam, o = self.expert_logit_weight, z_0
        for m, zbar_m in enumerate(zbar):
            o = torch.where(owner == m, lam * zbar_m + (1 - lam) * z_0, o)
        return o.masked_fill(owner < 0, -math.inf) if self.mask_unowned else o

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the retrained global model and the experts together."""
        w, own = view[0], client.state
        retrained, experts = w | own.head, [w | v for v in own.experts]
        scales = [self.scale(classifier(v), classifier(own.head)) for v in own.experts]

        def predict(x: Tensor) -> Tensor:
            zbar = (s * client.logits(v, x) for s, v in zip(scales, experts, strict=True))
            return self.aggregate(client.logits(retrained, x), zbar, own.owner)

        return predict
