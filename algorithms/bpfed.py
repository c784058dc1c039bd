"""BPFed: Balanced Personalized Federated Learning (Wu et al., Computer Science 52(9), 2025, eqs. 7-20)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Phase, Predictor, State, Sum, knob
from algorithms.maths import fresh, linear, smoothed
from algorithms.params import Params


@dataclass(frozen=True)
class BPFed(Algorithm):
    """FedPer on mixed-up images; then each private classifier is retrained on features balanced by perturbed copies."""

    card: ClassVar[Card] = Card("personalized", uploads="body; feature covariance once", keeps="classifier")
    later: ClassVar[dict[str, str]] = {
        "retrain": "feature_augmentation singleton redraw_each_epoch smoothing smooth_max smooth_power softmax_support "
        "head_init stage2_epochs stage2_lr stage2_momentum stage2_weight_decay stage2_batch"
    }
    shares_head: ClassVar[bool] = False
    linear_head: ClassVar[bool] = True
    per_image: ClassVar[str] = "it mixes images and fills up classes of them"
    mixup_alpha: float = knob(1.0, ge=0)  #: alpha: lambda ~ Beta(alpha, alpha); 0: no mixup
    mixup: Literal["batch", "sample"] = "batch"  #: what has a lambda of its own
    feature_augmentation: bool = True  #: FA: fill up the smaller classes; False: retrain on the features as they are
    singleton: Literal["skip", "zero"] = "skip"  #: M_k^c where n_k^c = 1: not counted in eq. 15, or a zero matrix
    redraw_each_epoch: bool = False  #: the perturbations anew in every epoch; False: one set
    smoothing: Literal["none", "all", "owned"] = "owned"  #: LS: the classes that share g(n_k^c); none: CE
    smooth_max: float = knob(0.5, ge=0, le=1)  #: delta, the smoothing of the largest class
    smooth_power: float = knob(0.4, ge=0)  #: gamma, how smoothing grows with n_k^c
    softmax_support: Literal["all", "owned"] = "all"  #: the classes over which stage 2 normalises p
    head_init: Literal["stage1", "reinit"] = "stage1"  #: V_k as stage 2 begins: that of stage 1, or drawn anew
    stage2_epochs: int = knob(5, ge=0)  #: E; 0: no stage 2, which with mixup_alpha 0 is FedPer
    stage2_lr: float = knob(0.01, gt=0)  #: learning rate of stage 2
    stage2_momentum: float = knob(0.9, ge=0, lt=1)  #: momentum of stage 2
    stage2_weight_decay: float = knob(5e-4, ge=0)  #: weight decay of stage 2
    stage2_batch: int = knob(32, ge=1)  #: batch size of stage 2

    def __post_init__(self) -> None:
        if self.smoothing == "all" and self.softmax_support == "owned":
            raise ValueError("smoothing: all labels classes that softmax_support: owned leaves out; change one of them")

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep U_glo, in a model whose classifier nobody trains, and M_glo."""
        return {"model": model.replace(linear(model, "BPFed")), "M": None}  # refused where that is no linear layer

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Give every client a classifier of its own, drawn as torch.nn.Linear does."""
        return {"V": fresh(model.head, client.rng)}

    def phases(self) -> list[Phase]:
        """List the experiment's rounds of representation learning, then one visit to everyone."""
        return [Phase(self.train), Phase(self.retrain, rounds=1, everyone=True)][: 2 if self.stage2_epochs else 1]

    def train(self, server: State, clients: Cohort) -> None:
        """U_glo <- sum_k n_k U_k / sum_k n_k (Algorithm 1, eq. 11)."""
        total = clients.sum(self.local, server.model.body)
        server.model = server.model.replace(total.U / total.n)

    def local(self, client: Client, U: Params) -> Sum:
        """Train {U, V_k}, keep V_k, send U_k (eq. 9)."""
        fit = client.fit(self.mixed, U=U, V=client.state.V)
        client.state.V = fit.V
        return Sum.weighted(client.n, U=fit.U)

    def mixed(self, client: Client, x: Tensor, y: Tensor, U: Params, V: Params) -> Tensor:
        """Return the loss on lambda (x_i, y_i) + (1 - lambda) (x_j, y_j), the j being shuffled i (eqs. 7, 8, 10)."""
        if self.mixup_alpha == 0:
            return client.loss(client.logits(U | V, x), y)
        lam = self.beta(client, 1 if self.mixup == "batch" else len(y)).to(x.device)
        j = torch.randperm(len(y), generator=client.rng).to(x.device)
        p = client.logits(U | V, torch.lerp(x[j], x, lam.view(-1, 1, 1, 1)))
        loss = client.loss if self.mixup == "batch" else torch.vmap(lambda p, y: client.loss(p[None], y[None]))
        return (lam * loss(p, y) + (1 - lam) * loss(p, y[j])).mean()

    def beta(self, client: Client, size: int) -> Tensor:
        """Draw lambda by the polar method (Devroye, WSC 1996): t is Student's, with 2 alpha degrees of freedom."""
        u = torch.rand(2, size, generator=client.rng)
        t = (u[0] ** (-1 / self.mixup_alpha) - 1).sqrt() * torch.cos(2 * torch.pi * u[1])
        return (1 + t.atan().sin()) / 2

    def retrain(self, server: State, clients: Cohort) -> None:
        """M_glo = sum_k n_k M_k / sum_k n_k (Algorithm 2, eq. 16); its square root makes N(0, M_glo) of N(0, I)."""
        root = None
        if self.feature_augmentation:
            total = clients.sum(self.covariance, server.model.body)
            server.M = (total.M + total.M.T) / 2 / max(1, total.n)
            values, vectors = torch.linalg.eigh(server.M)
            root = vectors * values.clamp_min(0).sqrt() @ vectors.T
        clients.map(self.rebalance, server.model.body, root)

    def covariance(self, client: Client, U: Params) -> Sum:
        """Send n_k M_k, where M_k = sum_c n_k^c M_k^c / sum_c n_k^c (eqs. 12-15)."""
        z = client.embed(U)
        several = [z_c for z_c in (z[client.y == c] for c in client.owned) if len(z_c) > 1]
        M = sum((len(z_c) * torch.cov(z_c.T) for z_c in several), torch.zeros(z.shape[1], z.shape[1], device=z.device))
        counted = client.n if self.singleton == "zero" else sum(map(len, several))
        return Sum.weighted(client.n if counted else 0, M=M / max(1, counted))

    def rebalance(self, client: Client, U: Params, root: Tensor | None) -> None:
        """Retrain V_k and a scale s per class (cRT with LWS) on balanced features (eq. 18), then fold s into V_k."""
        z = client.embed(U)
        rows = self.balanced(client) if self.feature_augmentation else torch.arange(client.n, device=z.device)
        places = torch.arange(len(rows), device=z.device)
        support = client.owned if self.softmax_support == "owned" else torch.arange(len(client.counts), device=z.device)
        q = self.soft_labels(client)[:, support]
        fixed = None if self.redraw_each_epoch else self.perturbed(client, z, rows, root, places)

        def objective(client: Client, i: Tensor, y: Tensor, w: Params) -> Tensor:
            h = self.perturbed(client, z, rows, root, i) if fixed is None else fixed[i]
            return -(q[y] * (w["s"] * client.classify(w, h))[:, support].log_softmax(1)).sum(1).mean()

        V = client.state.V if self.head_init == "stage1" else fresh(client.state.V, client.rng)
        w = client.fit(
            objective, data=(places, client.y[rows]), epochs=self.stage2_epochs, lr=self.stage2_lr,
            batch=self.stage2_batch, momentum=self.stage2_momentum, weight_decay=self.stage2_weight_decay,
            w=Params.pack({**V, "s": V.flat.new_ones(len(q))}),
        ).w  # fmt: skip
        client.state.V = Params.pack({name: torch.einsum("c,c...->c...", w["s"], t) for name, t in w.head.items()})

    def balanced(self, client: Client) -> Tensor:
        """Return all rows, then of each class n_k^max - n_k^c copies, spread evenly over its rows (eq. 17)."""
        y, order = client.y.cpu(), torch.randperm(client.n, generator=client.rng)
        classes = [order[y[order] == c] for c in client.owned.cpu()]
        copies = [own[torch.arange(max(map(len, classes)) - len(own)) % len(own)] for own in classes]
        return torch.cat([torch.arange(client.n), *copies]).to(client.y.device)

    def perturbed(self, client: Client, z: Tensor, rows: Tensor, root: Tensor | None, i: Tensor) -> Tensor:
        """Return the features at places i of the balanced set: originals, and copies plus e ~ N(0, M_glo)."""
        e = 0 if root is None else torch.randn(len(i), len(root), generator=client.rng).to(z.device) @ root
        return z[rows[i]] + (i >= client.n)[:, None] * e

    def soft_labels(self, client: Client) -> Tensor:
        """Return q of each class as a row, by the counts before augmentation (eqs. 19, 20)."""
        n, delta = client.counts, 0.0 if self.smoothing == "none" else self.smooth_max
        others = (n >= 0 if self.smoothing == "all" else n > 0) * (1 - torch.eye(len(n), device=n.device))
        return smoothed(delta * (n / n.max()) ** self.smooth_power * others.any(1), others)

    def view(self, server: State) -> tuple[Any, ...]:
        """Clients predict with the shared extractor."""
        return (server.model.body,)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with {U_glo, V_k}."""
        return lambda x: client.logits(view[0] | client.state.V, x)
