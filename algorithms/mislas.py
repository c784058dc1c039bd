"""MiSLAS: improving calibration for long-tailed recognition (Zhong et al., CVPR 2021), stage 2, by each client alone.

The classifier goes on from where stage 1 left it, with a scale per class (cRT and LWS at once), on classes drawn alike
and with labels that are the smoother the larger their class is on the client (Section 3.2); batch norm may shift
(Section 3.3). The mixup of stage 1 belongs to whatever runs before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, Predictor, State, knob
from algorithms.maths import balanced, smoothed
from algorithms.params import Params


@dataclass(frozen=True)
class MiSLAS(Algorithm):
    """A personal classifier on the global body, trained with label-aware smoothing; the global model stays."""

    card: ClassVar[Card] = Card("classifier", uploads="nothing", keeps="classifier")
    after: ClassVar[str | None] = "fedavg"
    per_image: ClassVar[str] = "it draws images by their class"
    smooth_head: float = knob(0.3, ge=0, le=1)  #: eps_1, smoothing of the client's largest class
    smooth_tail: float = knob(0.0, ge=0, le=1)  #: eps_K, smoothing of its smallest class
    shift_bn: bool = False  #: shift learning: batch norm adopts the statistics of the classes drawn alike
    epochs: int = knob(10, ge=0)  #: passes over the client's data
    lr: float = knob(0.1, gt=0)  #: learning rate of stage 2

    def __post_init__(self) -> None:
        if self.smooth_tail > self.smooth_head:
            raise ValueError(f"smooth_tail {self.smooth_tail} is above smooth_head {self.smooth_head}; exchange them")

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Keep what stage 2 changes, as it is before."""
        return {"v": self.begin(client, model)}

    def begin(self, client: Client, w: Params) -> Params:
        """Return the classifier with a scale s of 1 for each class and, if they are to shift, the statistics."""
        statistics = {name: w[name] for name, _ in w.layout.buffers if self.shift_bn}
        return Params.pack({**w.head, "s": torch.ones_like(client.counts)}, statistics)

    def phases(self) -> list[Phase]:
        """One visit to everyone."""
        return [Phase(self.retrain, rounds=1, everyone=True)]

    def retrain(self, server: State, clients: Cohort) -> None:
        """Send the global model once; nothing comes back."""
        clients.map(self.local, server.model)

    def local(self, client: Client, w: Params) -> None:
        """Train classifier and scales on the features of a frozen body."""
        q = self.soft_labels(client.counts)
        # Batch norm learns where its weights could, though nothing trains them here.
        w = Params(w.layout, w.flat.detach().requires_grad_(self.shift_bn), w.buffers)

        def objective(client: Client, x: Tensor, y: Tensor, v: Params) -> Tensor:
            model = w | v
            with torch.no_grad():
                h = client.features(model, x)
            return F.cross_entropy(self.logits(client, v, h), q[y])

        rows = balanced(client.y)
        v = self.begin(client, w)
        client.state.v = client.fit(objective, rows=rows, epochs=self.epochs, lr=self.lr, v=v).v

    def soft_labels(self, n: Tensor) -> Tensor:
        """eps_y = eps_K + (eps_1 - eps_K) sin(pi (n_y - n_K) / (2 (n_1 - n_K))), shared by all classes, also by y."""
        n_1, n_K = n.max(), n[n > 0].min()
        share = (n.clamp_min(n_K) - n_K) / (n_1 - n_K).clamp_min(1)  # of classes all alike, none is the head
        eps = self.smooth_tail + (self.smooth_head - self.smooth_tail) * torch.sin(math.pi / 2 * share)
        return smoothed(eps, torch.ones(len(n), len(n), device=n.device))

    def logits(self, client: Client, v: Model, h: Tensor) -> Tensor:
        """s * (V h + b)."""
        return v["s"] * client.classify(v, h)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with the global body and the client's classifier."""
        v = client.state.v
        return lambda x: self.logits(client, v, client.features(view[0] | v, x))
