"""Federated features: synthetic features whose class gradients resemble those of the clients' images.

From CReFF (Shang, Lu, Huang, Wang; IJCAI 2022, Algorithm 1); MuPFL's PKCF (eqs. 16-20) is built of the same parts. The
second half is what else MuPFL computes: activation maps (eq. 6) and clusters of clients (eqs. 8-14).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from algorithms.base import Client, Model, Sum
from algorithms.params import Params

EPS = 1e-6  #: keeps the cosine with a vanishing gradient finite, as in CReFF's code


def linear(w: Model) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a model's classifier, which must be one linear layer."""
    if not {"head.weight", "head.bias"} <= set(w):
        head = ", ".join(name for name in w if name.startswith("head.")) or "none"
        raise ValueError(f"class gradients need a classifier of head.weight and head.bias; this one has: {head}")
    return w["head.weight"], w["head.bias"]


def gradient(h: Tensor, k: Tensor, v: tuple[Tensor, Tensor], share: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j share_j grad_v CE(g_v(h_j), k) of features [..., m, d] of classes k [...], as weight and bias."""
    weight, bias = v
    p = F.softmax(h @ weight.mT + bias, dim=-1)
    error = (p - F.one_hot(k, len(bias)).unsqueeze(-2)) * share[..., None]
    return error.transpose(-1, -2) @ h, error.sum(-2)


@torch.no_grad()
def class_gradients(client: Client, w: Model, batch: int = 32, repeats: int = 10) -> dict[int, Tensor]:
    """Return z^k of each owned class: the mean gradient [C, d + 1] over repeated draws of its images (MuPFL eq. 16).

    The body is frozen, so an image's features are computed once however often it is drawn. Where pixels have labels,
    what is drawn are the cells of feature maps.
    """
    v, y = linear(w), client.labels.cpu()
    rows: dict[int, Tensor] = {}
    shares: dict[int, Tensor] = {}
    for k in client.owned.tolist():
        of_k = (y == k).nonzero().flatten()
        if not len(of_k):  # a class of pixels too few for a cell
            continue
        drawn = torch.cat([torch.randperm(len(of_k), generator=client.rng)[:batch] for _ in range(repeats)])
        times = torch.bincount(drawn, minlength=len(of_k))
        rows[k], shares[k] = of_k[times > 0], times[times > 0] / len(drawn)
    if not rows:
        return {}
    h = client.vectors(w, torch.cat(list(rows.values())))
    z = {}
    for (k, share), h_k in zip(shares.items(), torch.split(h, [len(r) for r in rows.values()]), strict=True):
        weight, bias = gradient(h_k, torch.tensor(k, device=h.device), v, share.to(h))
        z[k] = torch.cat([weight, bias[:, None]], dim=1)
    return z


def weighted(n: int, w: Params, z: dict[int, Tensor]) -> Sum:
    """Return what is added up over clients: n_i w_i, and of each class the gradients and how many sent one."""
    return Sum.weighted(n, w=w) | Sum(z=z, senders=dict.fromkeys(z, 1))


def fold(sums: Iterable[Sum]) -> Sum:
    """Add up in float64 what single clients sent."""
    return reduce(operator.add, sums).widen()


def mismatch(zhat: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
    """Return 1 - cos of each class's gradients, summed over the rows of the weight and the bias as one more row."""
    weight, bias = zhat
    return (1 - _cos(weight, z[..., :-1])).sum(-1) + 1 - _cos(bias, z[..., -1])


def _cos(a: Tensor, b: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(-1) / (norms + EPS)


def noise(v: Model, m: int, rng: np.random.Generator) -> Tensor:
    """Return m features of each class of the classifier v as they are before they are first matched, N(0, 1)."""
    classes, d = linear(v)[0].shape
    return torch.from_numpy(rng.standard_normal((classes, m, d), np.float32))


def match(h: Tensor, v: Model, z: Mapping[int, Tensor], steps: int, lr: float) -> Tensor:
    """Move the features h [C, m, d] by SGD towards those whose gradients at v are z; a class without z stays."""
    k = torch.tensor(sorted(z), device=h.device)
    wanted = torch.stack([z[c] for c in sorted(z)]).to(h)
    weight, bias = (t.to(h) for t in linear(v))
    share = h.new_full((h.shape[1],), 1 / h.shape[1])
    # No step leaves the span of features, gradients and classifier: where that is smaller, turn everything into it.
    span = torch.cat([h[k], wanted[..., :-1], weight.expand(len(k), -1, -1)], dim=1)
    turn = torch.linalg.qr(span.mT).Q if span.shape[1] < span.shape[2] else None
    if turn is not None:
        weight, wanted = weight @ turn, torch.cat([wanted[..., :-1] @ turn, wanted[..., -1:]], dim=-1)
    start = h[k] if turn is None else h[k] @ turn
    moving = start.clone().requires_grad_()
    for _ in range(steps):
        loss = mismatch(gradient(moving, k, (weight, bias), share), wanted).sum()
        (slope,) = torch.autograd.grad(loss, moving)
        with torch.no_grad():
            moving -= lr * slope
    moved = moving.detach() - start
    return h.index_add(0, k, moved if turn is None else moved @ turn.mT)


def tuned(
    client: Client,
    v: Params,
    h: Tensor,
    epochs: int,
    *,
    lr: float | None = None,
    batch: int | None = None,
    plain: bool = False,
) -> Params:
    """Return the classifier v trained with cross entropy on the features h [C, m, d] (MuPFL eq. 21).

    As in the experiment's `local` where nothing is given; plain: without momentum and weight decay.
    """
    k = torch.arange(len(h), device=h.device).repeat_interleave(h.shape[1])

    def objective(client: Client, h: Tensor, k: Tensor, v: Model) -> Tensor:
        return F.cross_entropy(client.classify(v, h), k)

    none = 0.0 if plain else None
    data = h.flatten(0, 1), k
    return client.fit(objective, data=data, epochs=epochs, lr=lr, batch=batch, momentum=none, weight_decay=none, v=v).v


# MuPFL's activation maps ---------------------------------------------------------------------------------------------


class ActivationMaps:
    """One map per layer, which grows where activations came with a falling loss, and drops the others (BAVD)."""

    def __init__(self, M: dict[str, Tensor], psi_sign: str, map_shape: str, mode: str, share: float) -> None:
        """Go on with the maps M, in place; the other arguments are MuPFL's fields."""
        self.M, self.mode, self.share = M, mode, share
        self.sign = {"text": 1, "formula": -1}[psi_sign]
        self.mean_over = {"chw": (0,), "hw": (0, 1)}[map_shape]
        self._h: dict[str, Tensor] = {}
        self._loss: Tensor | None = None

    def objective(self, client: Client, x: Tensor, y: Tensor, w: Model) -> Tensor:
        """Return the experiment's loss on a batch of which little-used activations are dropped, and learn from it."""
        loss = client.loss(client.logits(w, x, tap=self.drop), y)
        self.learn(loss.detach())
        return loss

    def drop(self, layer: str, h: Tensor) -> Tensor:
        """Zero what is low by the map known before this batch; the first batch is its own map."""
        self._h[layer] = h_mean = h.detach().mean(self.mean_over).view(-1, *h.shape[2:])
        M = self.M.get(layer, h_mean).flatten(1)
        low, high = M.aminmax(dim=1, keepdim=True)
        M_norm = (M - low) / (high - low).clamp_min(torch.finfo(M.dtype).tiny)
        K = math.ceil(self.share * M.shape[1])
        mu = M_norm.topk(K, dim=1).values[:, -1:] if self.mode == "topk" else M_norm.mean(1, keepdim=True)
        if self.mode == "value":
            # Where a ReLU is 0, a Hardswish is between -3/8 and 0: below every mu, and so it is off there as well.
            return h * (h >= mu.view(-1, *[1] * (h.dim() - 2)))
        return h * (M_norm >= mu).view(h_mean.shape)

    def learn(self, loss: Tensor) -> None:
        """M <- M + psi h, at first M <- h (eq. 6); psi is 0 where there is no earlier loss to compare with."""
        psi = 0.0 if self._loss is None else self.sign * (self._loss - loss)
        self.M |= {layer: self.M[layer] + psi * h if layer in self.M else h for layer, h in self._h.items()}
        self._loss = loss

    def forget(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """Begin anew when `fit` asks for the rows of an epoch."""
        self.M.clear()
        self._loss = None
        return rows

    def vector(self) -> Tensor:
        """Return all maps as one vector, empty where nothing was seen."""
        return torch.cat([torch.zeros(0), *(self.M[layer].flatten().cpu() for layer in sorted(self.M))])


# MuPFL's clusters ----------------------------------------------------------------------------------------------------


def cosines(vectors: Sequence[Tensor]) -> Tensor:
    """Return cos of every two vectors; an empty one is like zero, which resembles nothing but itself."""
    unit = F.normalize(pad_sequence(list(vectors), batch_first=True))
    similarity: Tensor = (unit @ unit.T).double().clamp(-1, 1)
    return similarity.fill_diagonal_(1)


def embed(similarity: Tensor) -> Tensor:
    """Return points x_i whose inner products are the similarities, so that |x_i - x_j|^2 = 2 (1 - sim_ij)."""
    values, vectors = torch.linalg.eigh(similarity)
    x: Tensor = vectors * values.clamp_min(0).sqrt()
    return x


def clusters(similarity: Tensor, kappa_min: int, kappa_max: int, seed: int) -> list[int]:
    """Return each client's cluster, by k-means with the kappa whose mean silhouette is largest (eqs. 9-13)."""
    tried = groupings(similarity, kappa_min, kappa_max, seed)
    return max(tried, key=lambda found: found[0])[1] if tried else [0] * len(similarity)


def groupings(similarity: Tensor, kappa_min: int, kappa_max: int, seed: int) -> list[tuple[float, list[int]]]:
    """Return the mean silhouette and the clusters for each kappa that is possible."""
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.metrics import silhouette_score

    most = len(similarity) - 1
    x, d = embed(similarity).numpy(), (1 - similarity).numpy()
    tried = []
    for kappa in range(min(kappa_min, most), min(kappa_max, most) + 1) if most > 1 else ():
        found = KMeans(kappa, n_init=10, random_state=seed).fit_predict(x).tolist()
        score = silhouette_score(d, found, metric="precomputed") if len(set(found)) > 1 else -1.0
        tried.append((float(score), found))
    return tried


def cluster_means(cluster: Sequence[int], delta: Sequence[Params]) -> list[Params]:
    """Return for each client the mean update of its cluster, in float64 (eq. 14)."""
    members = {c: [d for d, own in zip(delta, cluster, strict=True) if own == c] for c in set(cluster)}
    total = {c: fold(Sum(d=d) for d in own) for c, own in members.items()}
    return [total[c].d / len(members[c]) for c in cluster]
