"""FedAFA: adversarial feature augmentation (Lu, Qian, Huang, Wang; ICASSP 2023), the personal phase after FedAvg.

Features of the smaller classes are made of others by moving them, as adversarial examples are made, until the global
model g takes them for that class; the client's last stage and classifier are trained on real and made features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Phase, Predictor, State, knob
from algorithms.maths import balanced
from algorithms.params import Params


@dataclass(frozen=True)
class FedAFA(Algorithm):
    """The student starts as the global model, its layers before the last stage frozen; the teacher g stays."""

    card: ClassVar[Card] = Card("class imbalance", uploads="nothing", keeps="last stage and classifier")
    after: ClassVar[str | None] = "fedavg"
    per_image: ClassVar[str] = "it draws images by their class"
    synthetic_weight: float = knob(0.6, ge=0, le=1)  #: c, weight of the batch that has made features in it
    threshold: float = knob(0.5, ge=0, le=1)  #: p, g's probability of the target from which a feature is accepted
    steps: int = knob(10, ge=0)  #: normalised gradient steps
    step_size: float = knob(0.5, gt=0)  #: their length
    noise: float = knob(0.5, ge=0)  #: length of the noise at the start
    epochs: int = knob(10, ge=0)  #: passes over the client's data, its classes drawn alike
    lr: float = knob(0.01, gt=0)  #: learning rate of the personal phase
    momentum: float = knob(0.9, ge=0, lt=1)  #: its momentum
    weight_decay: float = knob(5e-4, ge=0)  #: its weight decay
    batch: int = knob(64, ge=1)  #: its batch size

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Before it is visited, a client's student is the global model."""
        return {"v": model.under(client.last_stage, "head.")}

    def phases(self) -> list[Phase]:
        """One visit to everyone."""
        return [Phase(self.personalise, rounds=1, everyone=True)]

    def personalise(self, server: State, clients: Cohort) -> None:
        """Send the global model g once; nothing comes back."""
        clients.map(self.local, server.model)

    def local(self, client: Client, g: Params) -> None:
        """Minimise c CE(student on made and real features) + (1 - c) CE(student on real ones)."""

        def objective(client: Client, x: Tensor, y: Tensor, v: Params) -> Tensor:
            f = client.stem(g, x)
            made = F.cross_entropy(logits(client, v, self.augment(client, g, f, y)), y)
            return self.synthetic_weight * made + (1 - self.synthetic_weight) * F.cross_entropy(logits(client, v, f), y)

        sgd: dict[str, Any] = {k: getattr(self, k) for k in ("epochs", "lr", "momentum", "weight_decay", "batch")}
        v = g.under(client.last_stage, "head.")
        client.state.v = client.fit(objective, rows=balanced(client.y), v=v, **sgd).v

    def augment(self, client: Client, g: Params, f: Tensor, y: Tensor) -> Tensor:
        """Replace features of smaller classes by made ones, as far as these are accepted."""
        n, n_max = client.counts[y], client.counts.max()
        chosen = (torch.rand(len(y), generator=client.rng).to(n) < replacing(n, n_max)).nonzero().flatten()
        if not len(chosen):
            return f
        t, odds = y[chosen], seeding(n, n[chosen], n_max)
        seeds = torch.multinomial(odds.cpu(), 1, generator=client.rng).flatten().to(y.device)
        made = self.attack(client, g, f[seeds], t)
        accepted = logits(client, g, made).softmax(1).gather(1, t[:, None])[:, 0] >= self.threshold
        return f.index_copy(0, chosen[accepted], made[accepted])

    def attack(self, client: Client, g: Params, f: Tensor, t: Tensor) -> Tensor:
        """Move features by normalised gradients towards where g sees the targets t, never below what f can be."""
        lowest = f.min().clamp_max(0)  # 0 after a ReLU
        f = (f + self.noise * unit(torch.randn(f.shape, generator=client.rng).to(f))).clamp_min(lowest)
        for _ in range(self.steps):
            f.requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(logits(client, g, f), t, reduction="sum"), f)
            f = (f.detach() - self.step_size * unit(grad)).clamp_min(lowest)
        return f

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the student."""
        v = client.state.v
        return lambda x: logits(client, v, client.stem(view[0], x))


def replacing(n: Tensor, n_max: Tensor) -> Tensor:
    """Return with what probability a sample of a class of this size is replaced: 1 - n^y / n_max."""
    return 1 - n / n_max


def seeding(n: Tensor, n_t: Tensor, n_max: Tensor) -> Tensor:
    """Return [targets, samples] in what proportion a sample is the seed: 1 - relu(n_seed - n_t) / n_max."""
    return 1 - F.relu(n - n_t[:, None]) / n_max


def unit(t: Tensor) -> Tensor:
    """Return each sample's direction."""
    return F.normalize(t.flatten(1)).view_as(t)


def logits(client: Client, v: Params, f: Tensor) -> Tensor:
    """Return the logits from the input of the last stage."""
    return client.classify(v, client.stage(v, f))
