"""FED-RoD: on bridging generic and personalized federated learning (Chen and Chao, ICLR 2022, Algorithm 1; linear)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from algorithms.base import Card, Client, Model, Predictor, Sum, knob
from algorithms.fedavg import FedAvg
from algorithms.losses import BalancedSoftmax
from algorithms.params import Params


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedAvg with a balanced risk; a private classifier on the same features learns what is left to the client."""

    card: ClassVar[Card] = Card("personalized", keeps="a second classifier")
    per_image: ClassVar[str] = "its balanced risk is written for one label an image"
    count_power: float = knob(1.0, ge=0)  #: gamma, exponent of the local class counts in the balanced risk; 0: CE

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """The personal classifier starts as the generic one."""
        return {"psi": model.head}

    def local(self, client: Client, w: Params) -> Sum:
        """Train (theta, psi_G) and, beside it, the client's own psi_P; send the former."""
        fit = client.fit(self.decoupled, w=w, psi=client.state.psi)
        client.state.psi = fit.psi
        return Sum.weighted(client.n, w=fit.w)

    def decoupled(self, client: Client, x: Tensor, y: Tensor, w: Model, psi: Model) -> Tensor:
        """BSM(z_G, y; n_k^c) for the generic model, plus the loss of z_G + z_P, which moves nothing but psi_P."""
        h = client.features(w, x)
        z_G = client.classify(w, h)
        share = client.counts / client.n  # of a class without samples 0: it drops out
        generic = BalancedSoftmax()(z_G, y, share**self.count_power)
        return generic + client.loss(z_G.detach() + client.classify(psi, h.detach()), y)

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Predict with z_G + z_P."""
        w, psi = view[0], client.state.psi

        def predict(x: Tensor) -> Tensor:
            h = client.features(w, x)
            return client.classify(w, h) + client.classify(psi, h)

        return predict
