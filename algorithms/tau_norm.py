"""tau-norm: tau-normalised classifier (Kang et al., ICLR 2020, Section 4); nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from algorithms.base import Algorithm, Card, Cohort, Phase, State, knob
from algorithms.maths import linear
from algorithms.params import Params


@dataclass(frozen=True)
class TauNorm(Algorithm):
    """The classes' weights, long for large classes, are brought nearer to one length; the server does it alone."""

    card: ClassVar[Card] = Card("classifier", uploads="nothing")
    after: ClassVar[str | None] = "fedavg"
    tau: float = knob(1.0, ge=0)  #: tau; 0: the weights as they are, 1: of length 1

    def server_state(self, model: Params) -> dict[str, Any]:
        """Refuse a classifier whose weights have no length of their own."""
        linear(model, "tau-norm")
        return {"model": model}

    def phases(self) -> list[Phase]:
        """One step."""
        return [Phase(self.normalise, rounds=1)]

    def normalise(self, server: State, clients: Cohort) -> None:
        """W_c <- W_c / ||W_c||^tau, without bias."""
        W, b = server.model["head.weight"], server.model["head.bias"]
        length = W.norm(dim=1, keepdim=True).clamp_min(1e-12)
        server.model = server.model.replace({"head.weight": W / length**self.tau, "head.bias": torch.zeros_like(b)})
