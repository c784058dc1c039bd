"""FedAlign: local learning matters (Mendieta et al., CVPR 2022, Fig. 2): distil the last stage into a slimmed one.

Beside the whole network, its last stage is run at a part of its width, and the Lipschitz constants of both, as far as a
batch shows them, are aligned. The slim stage has the first channels of every layer; it is never built nor tested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Client, Model, knob
from algorithms.fedavg import FedAvg
from algorithms.params import Params

POWER = 10  #: iterations to the largest eigenvalue
EPS = 1e-12  #: keeps roots and ratios of what has died out finite


@dataclass(frozen=True)
class FedAlign(FedAvg):
    """FedAvg whose clients regularise their last stage: one stage, with batch norm, its convolutions not grouped."""

    per_image: ClassVar[str] = "no network for pixels has a last stage with a slim form"
    mu: float = knob(0.45, ge=0)  #: mu, weight of the distillation
    width: float = knob(0.25, gt=0, le=1)  #: omega_S, share of the channels in the slim stage
    clip: float | None = knob(10.0, gt=0)  #: largest norm of a gradient; None: any

    def server_state(self, model: Params) -> dict[str, Any]:
        """Refuse a network whose last stage has no slim form."""
        remedy = "choose one of the models resnet8 to resnet50"
        if not len(model.body.buffers):
            raise ValueError(f"without batch norm, aligning the slim stage makes it grow without end; {remedy}")
        if any(name.startswith("body.experts.") for name in model):
            raise ValueError(f"FedAlign slims one last stage, but here each expert has its own; {remedy}")
        layers = [t for t in model.body.values() if t.dim() == 4]
        widths = {len(t) for t in layers}
        if any(t.shape[1] not in widths for t in layers[1:]):  # the first one reads the image
            raise ValueError(f"the first channels of a grouped convolution are no network of their own; {remedy}")
        return super().server_state(model)

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Params) -> Tensor:  # type: ignore[override]
        """CE + mu sg(CE / L_lip) L_lip, where L_lip = MSE(s(slim), sg(s(full)))."""
        F_in = client.stem(w, x)
        h, F_out = through(client, w, F_in)
        ce = client.loss(client.classify(w, h), y)
        F_in = F_in.detach()
        _, F_slim = through(client, slim(w.under(client.last_stage), F_in.shape[1], self.width), F_in)
        lip = F.mse_loss(spectral(F_in, F_slim), spectral(F_in, F_out).detach())
        loss = ce + self.mu * (ce / lip.clamp_min(EPS)).detach() * lip
        return loss if self.clip is None else clipped(loss, w, self.clip)


def through(client: Client, w: Model, F_in: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last stage's features and its last map; where it leaves none, the features are its only pixel."""
    maps: list[Tensor] = []
    h = client.stage(w, F_in, lambda layer, a: maps.append(a) or a)  # type: ignore[func-returns-value]
    return h, maps[-1] if maps else h


def slim(stage: Params, inputs: int, width: float) -> Model:
    """Return the first channels of every tensor of a stage, in copies; the stage's own input stays whole."""

    def first(size: int) -> int:
        return math.ceil(width * size)

    def cut(t: Tensor) -> Tensor:
        t = t[: first(len(t))]
        return (t if t.dim() == 1 or t.shape[1] == inputs else t[:, : first(t.shape[1])]).clone()

    return {name: cut(t) for name, t in stage.items()}


def spectral(A: Tensor, B: Tensor) -> Tensor:
    """s: the largest singular value of T = A B^T / HW of each sample, from maps [C, H, W] or vectors [C]."""
    A, B = (t.reshape(*t.shape[:2], *(t.shape[2:] or (1, 1))) for t in (A, B))
    A = F.adaptive_avg_pool2d(A, (B.shape[2], B.shape[3])).flatten(2)
    T = A @ B.flatten(2).mT / A.shape[2]
    v, top = T.new_ones(len(T), T.shape[1], 1), T.new_zeros(())
    for _ in range(POWER):
        v = T @ (T.mT @ v)
        top = v.norm(dim=1, keepdim=True).clamp_min(EPS)
        v = v / top
    return top.sqrt()


def clipped(loss: Tensor, w: Params, limit: float) -> Tensor:
    """Return a loss of the same value at w, whose gradient there is that of the loss, cut down to a norm."""
    (g,) = torch.autograd.grad(loss, w.flat)
    g = g * (limit / g.norm()).clamp_max(1)
    return loss.detach() + torch.dot(g, w.flat - w.flat.detach())
