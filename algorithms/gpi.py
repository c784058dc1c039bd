"""GPI: global proxy information, a class prior read off classifier updates (LDAE's first round; Def. 2-3, eq. 5-7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Card, Client, Cohort, Model, Phase, State, knob
from algorithms.params import Params


@dataclass(frozen=True)
class GPI(Algorithm):
    """All clients train once from the initial model; the rows of the classifier grow with the classes' sizes."""

    card: ClassVar[Card] = Card("preparation", uploads="class proxies", singles="upload")
    per_image: ClassVar[str] = "it reads class sizes off a classifier of whole images"
    epochs: int = knob(1, ge=1)  #: local epochs of the proxy round
    normalise: bool = True  #: each client's proxy counts by its samples; False: raw, as eq. 7 is printed
    floor: float = knob(5.0, gt=0)  #: smallest pseudo count of a class (normalised form)

    def server_state(self, model: Params) -> dict[str, Any]:
        """Keep the untouched model, the prior and every client's proxy."""
        return {"model": model, "prior": None, "proxies": {}}

    def phases(self) -> list[Phase]:
        """One round of everyone, which yields no model."""
        return [Phase(self.proxy, rounds=1, everyone=True, scored=False)]

    def proxy(self, server: State, clients: Cohort) -> None:
        """Collect Omega^k and n_k of every client, and make the prior of them."""
        received = clients.map(self.local, server.model)
        server.proxies = {k: omega for k, (_, omega) in received.items()}
        total = torch.stack([self.weigh(n, omega) for n, omega in received.values()]).sum(0)
        smallest = self.floor if self.normalise else max(1e-3 * float(total.max()), 1e-12)
        pi = total.clamp_min(smallest)  # a class that nobody's update shows keeps a finite logarithm
        server.prior = pi / pi.sum()

    def weigh(self, n: int, omega: Tensor) -> Tensor:
        """n_k [Omega_c^k > 0] Omega_c^k, eq. 7 but for the factor 1/n; normalised: n_k samples shared out by it."""
        if not self.normalise:
            return n * omega.clamp_min(0)
        share = omega.clamp_min(1e-5)  # raw proxies grow with the number of steps, so big clients would count twice
        return (n * share / share.sum()).round()

    def local(self, client: Client, w: Params) -> tuple[int, Tensor]:
        """Omega_c^k: the row sums of the classifier's change, averaged over experts where there are several."""
        change = client.fit(self.objective, epochs=self.epochs, w=w).w - w
        rows = [t.sum(1) for name, t in change.head.items() if name.endswith("weight")]
        return client.n, torch.stack(rows).mean(0)

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return plain cross entropy, whatever loss the experiment uses later."""
        return F.cross_entropy(client.logits(w, x), y)
