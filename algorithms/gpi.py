"""GPI: global proxy information, a class prior read off classifier updates (LDAE's round 0: Definition 2, eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Client, Cohort, Model, Phase, State, knob
from algorithms.params import Params


@dataclass(frozen=True)
class GPI(Algorithm):
    """All clients train once from the initial model; the rows of the classifier grow with the classes' sizes."""

    inherits: ClassVar[tuple[str, ...]] = ("model",)
    epochs: int = knob(1, ge=1)  #: local epochs of the proxy round
    normalise: bool = True  #: each client's proxy counts by its samples; False: raw, as eq. 7 is printed
    floor: float = knob(5.0, ge=0)  #: smallest pseudo count of a class (normalised form)

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the untouched model, the prior and every client's proxy."""
        return {"model": model, "prior": None, "proxies": {}}

    def phases(self) -> list[Phase]:
        """One round of everyone, which yields no model."""
        return [Phase(self.proxy, rounds=1, everyone=True, scored=False)]

    def proxy(self, server: State, clients: Cohort) -> None:
        """pi_c ~ sum_k n_k/n [Omega_c^k > 0] Omega_c^k."""
        received = clients.map(self.local, server.model)
        sizes = {k: n for k, (n, _) in received.items()}
        server.proxies = {k: omega for k, (_, omega) in received.items()}
        if self.normalise:
            shares = {k: o.clamp_min(1e-5) / o.clamp_min(1e-5).sum() for k, o in server.proxies.items()}
            pseudo = sum((sizes[k] * share).round() for k, share in shares.items())
            total = torch.as_tensor(pseudo).clamp_min(self.floor)
        else:
            n = sum(sizes.values())
            total = torch.as_tensor(sum(sizes[k] / n * o.clamp_min(0) for k, o in server.proxies.items()))
            total = total.clamp_min(1e-3 * float(total.max()))
        server.prior = total / total.sum()

    def local(self, client: Client, w: Params) -> tuple[int, Tensor]:
        """Omega_c^k: the row sums of the classifier's change, averaged over experts where there are several."""
        change = client.fit(self.objective, epochs=self.epochs, w=w).w - w
        rows = [t.sum(1) for name, t in change.head.items() if name.endswith("weight")]
        return client.n, torch.stack(rows).mean(0)

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return plain cross entropy, whatever loss the experiment uses later."""
        return F.cross_entropy(client.logits(w, x), y)
