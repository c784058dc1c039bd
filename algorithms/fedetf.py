"""FedETF: no fear of classifier biases, a synthetic and fixed classifier (Li, Shang, He, Lin, Wu, ICCV 2023).

The network's own linear layer is the projection p: R^d -> R^C; what it gives is brought to unit length and compared
with the rows of a simplex ETF that nobody trains. FedLoGe's version of it (Table 8 there) is without projection and
with dot regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, Sum, knob
from algorithms.heads import fixed_head
from algorithms.losses import BalancedSoftmax
from algorithms.params import Params
from algorithms.parts import joined

W, B, BETA, MEAN, VAR = "head.weight", "head.bias", "temperature", "norm.mean", "norm.var"


@dataclass(frozen=True)
class FedETF(Algorithm):
    """Features are trained towards a fixed frame; clients adapt frame and projection to themselves at the end.

    `server.p` is what is trained besides the body; `server.model` has it, the frame and the temperature folded into one
    linear classifier, which ranks the classes alike.
    """

    card: ClassVar[Card] = Card("personalized", uploads="body, projection and temperature", keeps="model")
    later: ClassVar[dict[str, str]] = {
        "personalize": "personal_epochs alternations etf_epochs etf_lr projection_epochs projection_lr"
    }
    per_image: ClassVar[str] = "its classifier is of one feature vector an image"
    projection: bool = True  #: p; False: the frame V lies in the feature space itself
    temperature: float = knob(1.0, gt=0)  #: beta as it starts to be learnt; with dot_regression it stays
    dot_regression: bool = False  #: 1/2 (v_y . h - |v_y|)^2 on batch-normalised h instead of the balanced loss
    personal_epochs: int | None = knob(None, ge=0)  #: epochs on the whole model as clients adapt; None: experiment's
    alternations: int = knob(20, ge=0)  #: turns of frame and projection after that
    etf_epochs: int = knob(3, ge=0)  #: epochs on the frame in each turn
    etf_lr: float = knob(0.1, gt=0)  #: their learning rate, without momentum and weight decay
    projection_epochs: int = knob(3, ge=0)  #: epochs on the projection in each turn
    projection_lr: float = knob(0.05, gt=0)  #: their learning rate
    etf_seed: int = knob(0, ge=0)  #: randomness of V

    def server_state(self, model: Params) -> dict[str, Any]:
        """Make V [C, C], or [C, d] without projection."""
        if set(model.head) != {W, B}:
            raise ValueError(f"FedETF projects by one linear layer, but this network has {', '.join(model.head)}")
        dim = model[W].shape[0 if self.projection else 1]
        V = fixed_head("etf", len(model[W]), dim, seed=self.etf_seed)
        trained = dict(model.head) if self.projection else {}
        norm = {MEAN: torch.zeros(dim), VAR: torch.ones(dim)} if self.dot_regression else {}
        p = Params.pack(trained if self.dot_regression else trained | {BETA: torch.tensor(self.temperature)}, norm)
        return {"model": model.replace(self.folded(p, V)), "p": p, "V": V}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Before it adapts, a client's model is the global one."""
        return {"w": None}

    def phases(self) -> list[Phase]:
        """List the experiment's rounds, then a visit to everyone."""
        return [Phase(self.train), Phase(self.personalize, rounds=1, everyone=True)]

    def train(self, server: State, clients: Cohort) -> None:
        """Average body, projection and temperature by sample counts."""
        total = clients.sum(self.local, server.model.body, server.p, server.V)
        w = total.w / total.n
        server.p = w.where(server.p.__contains__)
        server.model = server.model.replace(w.body | self.folded(server.p, server.V.double()))

    def local(self, client: Client, theta: Params, p: Params, V: Tensor) -> Sum:
        """Send the trained model."""
        return Sum.weighted(client.n, w=self.aligned(client, joined(theta, p), V))

    def aligned(self, client: Client, w: Params, V: Tensor, epochs: int | None = None) -> Params:
        """Minimise BSM(beta V h, y; n_k^c), or the dot regression (Yang et al., NeurIPS 2022)."""

        def objective(client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
            h = self.unit(client, w, client.features(w, x), learning=len(y) > 1)
            if self.dot_regression:
                return F.mse_loss((V[y] * h).sum(1), V[y].norm(dim=1)) / 2
            return BalancedSoftmax()(w[BETA] * h @ V.T, y, client.counts)

        return client.fit(objective, epochs=epochs, w=w).w

    def unit(self, client: Client, w: Model, h: Tensor, learning: bool = False) -> Tensor:
        """Return p(h) / |p(h)|."""
        h = client.classify(w, h) if self.projection else h
        if self.dot_regression:  # by the batch's statistics while learning, which become part of the running ones
            h = F.batch_norm(h, w[MEAN], w[VAR], training=learning)
        return F.normalize(h)

    def folded(self, p: Model, V: Tensor) -> dict[str, Tensor]:
        """Return the linear classifier whose logits are those of beta V h but for the length of p(h)."""
        offset: Tensor | float = p[B] if self.projection else 0.0
        V = p.get(BETA, self.temperature) * V
        if self.dot_regression:
            offset, V = offset - p[MEAN], V * (p[VAR] + 1e-5).rsqrt()
        return {W: V @ p[W] if self.projection else V, B: (V * offset).sum(1)}

    def personalize(self, server: State, clients: Cohort) -> None:
        """Send everything once more; nothing comes back."""
        clients.map(self.adapt, server.model.body, server.p, server.V)

    def adapt(self, client: Client, theta: Params, p: Params, V: Tensor) -> None:
        """Train the whole model, then V and the projection in turn, on features of the body as it is then."""
        w = self.aligned(client, joined(theta, p), V, self.personal_epochs)
        h, own = client.embed(w), {"V": Params.pack({"V": V}), "p": w.head}

        def objective(client: Client, h: Tensor, y: Tensor, **moving: Params) -> Tensor:
            now = own | moving
            z = self.unit(client, w | now["p"], h) @ now["V"]["V"].T
            return client.loss(w.get(BETA, self.temperature) * z, y)

        for _ in range(self.alternations):
            sgd: dict[str, Any] = {"epochs": self.etf_epochs, "lr": self.etf_lr, "momentum": 0.0, "weight_decay": 0.0}
            own["V"] = client.fit(objective, data=(h, client.y), V=own["V"], **sgd).V
            if self.projection:
                sgd = {"epochs": self.projection_epochs, "lr": self.projection_lr}
                own["p"] = client.fit(objective, data=(h, client.y), p=own["p"], **sgd).p
        classifier = self.folded(w | own["p"], own["V"]["V"])
        client.state.w = joined(w.body, Params.pack(classifier))

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the client's own model once it has one."""
        w = client.state.w or view[0]
        return lambda x: client.logits(w, x)
