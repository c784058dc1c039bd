"""FedLoGe: joint local and generic federated learning under long-tailed data (Xiao et al., ICLR 2024, Algorithm 1).

The body learns against a classifier that is fixed from the start (SSE-C, eq. 2-5); two auxiliary heads learn beside it
on its features. Afterwards their norms, which follow the classes' sizes, realign the classifiers: eq. 6 makes the
generic one (GA-FR), eq. 7 the personal ones (LA-FR), to whose logits those of a client's own head are added: the text
does not say so, but the authors' code does. Tables 3 and 7 to 9 are the ablations that the fields can say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms import heads
from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, Sum, knob
from algorithms.maths import fresh
from algorithms.params import Params

W, B, P = "head.weight", "head.bias", "projection"


@dataclass(frozen=True)
class FedLoGe(Algorithm):
    """The server keeps theta, psi and the fixed head; a client keeps phi_k, which never leaves it.

    `server.model` is always the generic model: (theta, Psi*) while training, (theta, psi') from GA-FR on.
    """

    card: ClassVar[Card] = Card("personalized", uploads="model with two classifiers", keeps="a classifier")
    later: ClassVar[dict[str, str]] = {
        "realign_generic": "ga_fr",
        "realign_personal": "la_fr lafr_base lafr_scale pm_logits finetune_epochs finetune_lr",
    }
    linear_head: ClassVar[bool] = True
    per_image: ClassVar[str] = "its classifiers are of one feature vector an image"
    fixed_head: heads.Kind = "sse_c"  #: Psi*, the fixed classifier; rows of Tables 3, 8, 9
    sparsity: float = knob(0.6, ge=0, lt=1)  #: beta, the share of zeros in a sparse Psi*
    target_norm: float = knob(0.1, gt=0)  #: gamma, the norm of the class vectors of a sparse Psi*
    ssec_steps: int = knob(10_000, ge=0)  #: steps of eq. 5 that realign a sparse Psi*; 0: it is only masked
    ssec_lr: float = knob(1e-4, gt=0)  #: their size
    ssec_optimizer: heads.Optimizer = "adam"  #: adam as the authors' code, sgd as the text; sgd does not get there
    ssec_seed: int = knob(0, ge=0)  #: randomness of Psi*
    projection: bool = False  #: a trainable d x d layer between features and Psi* (Table 8)
    dot_regression: bool = False  #: train theta by dot regression instead of the experiment's loss (Table 8)
    ga_fr: bool = True  #: whether psi' replaces Psi* as the generic classifier (eq. 6)
    la_fr: bool = True  #: whether phi'_k replaces phi_k (eq. 7)
    lafr_base: Literal["raw", "unit"] = "raw"  #: eq. 7 scales psi as trained, or psi' as in Algorithm 1
    lafr_scale: Literal["norm", "counts"] = "norm"  #: by ||phi_{k,c}||, or by the class's share of D_k (Table 7)
    pm_logits: Literal["realigned", "realigned_plus_local"] = "realigned_plus_local"  #: of phi'_k, or of phi'_k + phi_k
    finetune_epochs: int = knob(0, ge=0)  #: epochs on phi'_k, or without LA-FR on phi_k, theta frozen
    finetune_lr: float | None = knob(None, gt=0)  #: eta of the fine-tuning; None: the experiment's
    heads_bias: bool = False  #: whether heads have biases: random in Psi*, trained in psi and phi, never realigned

    def server_state(self, model: Params) -> dict[str, Any]:
        """Build Psi*; psi starts as the model's own head, a projection beside it as the identity."""
        classes, dim = model[W].shape
        psi_star = heads.fixed_head(
            self.fixed_head,
            classes,
            dim,
            sparsity=self.sparsity,
            norm=self.target_norm,
            steps=self.ssec_steps,
            lr=self.ssec_lr,
            optimizer=self.ssec_optimizer,
            seed=self.ssec_seed,
        )
        fixed = {W: psi_star, B: model[B] if self.heads_bias else torch.zeros(classes)}
        psi = Params.pack(self._head(model) | ({P: torch.eye(dim)} if self.projection else {}))
        return {"model": model.replace(fixed), "psi": psi, "fixed": fixed}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """phi_k is random at birth, as torch initialises a linear layer."""
        return {"phi": fresh(self._head(model), client.rng)}

    def _head(self, model: Params) -> Params:
        return model.head if self.heads_bias else model.under(W)

    def phases(self) -> list[Phase]:
        """Stages 1 to 3 of Algorithm 1; an ablation leaves out the stage that it does without."""
        stages = [Phase(self.train)]
        if self.ga_fr:
            stages.append(Phase(self.realign_generic, rounds=1))
        if self.la_fr or self.finetune_epochs:
            stages.append(Phase(self.realign_personal, rounds=1, everyone=True))
        return stages

    def train(self, server: State, clients: Cohort) -> None:
        """theta, psi <- sum_k n_k (theta_k, psi_k) / sum_k n_k."""
        total = clients.sum(self.local, server.model.body, server.psi, server.fixed)
        server.model = server.model.replace(total.theta / total.n)
        server.psi = total.psi / total.n
        if self.projection:  # to project and then classify is to classify by the product
            server.model = server.model.replace({W: server.fixed[W].double() @ server.psi[P]})

    def local(self, client: Client, theta: Params, psi: Params, fixed: Model) -> Sum:
        """Train theta_k with Psi*, and psi_k and phi_k on the same features; phi_k stays here."""

        def objective(client: Client, x: Tensor, y: Tensor, theta: Model, psi: Model, phi: Model) -> Tensor:
            h = client.features(theta, x)
            loss = self.alignment(client, h @ psi[P].T if self.projection else h, y, fixed)
            h = h.detach()  # each head follows its own loss alone, and theta neither, as with three optimizers
            return loss + client.loss(_logits(psi, h), y) + client.loss(_logits(phi, h), y)

        fit = client.fit(objective, theta=theta, psi=psi, phi=client.state.phi)
        client.state.phi = fit.phi
        return Sum.weighted(client.n, theta=fit.theta, psi=fit.psi)

    def alignment(self, client: Client, h: Tensor, y: Tensor, fixed: Model) -> Tensor:
        """CE(Psi* h, y), or the dot regression 1/2 (m_y . h/|h| - |m_y|)^2 (Yang et al., NeurIPS 2022)."""
        if not self.dot_regression:
            return client.loss(_logits(fixed, h), y)
        m = fixed[W][y]
        return F.mse_loss((m * F.normalize(h)).sum(1), m.norm(dim=1)) / 2

    def realign_generic(self, server: State, clients: Cohort) -> None:
        """GA-FR on the server: psi'_c = psi_c / ||psi_c|| (eq. 6); psi itself is kept for LA-FR."""
        server.model = server.model.replace(server.psi | {W: F.normalize(server.psi[W])})

    def realign_personal(self, server: State, clients: Cohort) -> None:
        """LA-FR on every client; nothing comes back."""
        clients.map(self.localise, server.model.body, server.psi)

    def localise(self, client: Client, theta: Params, psi: Params) -> None:
        """phi'_{k,c} = psi_c ||phi_{k,c}|| (eq. 7), then fine-tuning of phi'_k on features of the frozen theta."""
        phi = aligned = client.state.phi
        if self.la_fr:
            base = F.normalize(psi[W]) if self.lafr_base == "unit" else psi[W]
            scale = phi[W].norm(dim=1) if self.lafr_scale == "norm" else client.counts / client.n
            aligned = phi.replace({W: base * scale[:, None]})

        def objective(client: Client, x: Tensor, y: Tensor, phi: Model) -> Tensor:
            return client.loss(_logits(phi, client.features(theta, x)), y)

        tuned = client.fit(objective, epochs=self.finetune_epochs, lr=self.finetune_lr, phi=aligned).phi
        both = self.la_fr and self.pm_logits == "realigned_plus_local"
        client.state.phi = tuned + phi if both else tuned  # heads are linear: logits add as heads do

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with (theta, phi_k): while training the private head, after LA-FR the realigned one."""
        w, phi = view[0], client.state.phi
        return lambda x: _logits(phi, client.features(w, x))


def _logits(head: Model, h: Tensor) -> Tensor:
    return F.linear(h, head[W], head.get(B))
