"""Classifiers that are never trained: the simplex ETF, its sparse form SSE-C, and plain random matrices.

SSE-C is from FedLoGe (Xiao et al., ICLR 2024, Section 3.2, eq. 2-5). Every head is a matrix [C, d]: a row per class.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

#: A dense head, and the sparse one that is made of it; SSE-C is the sparse ETF.
Kind = Literal[
    "etf", "xavier", "gaussian", "uniform", "orthogonal", "kaiming",
    "sse_c", "sparse_xavier", "sparse_gaussian", "sparse_uniform", "sparse_orthogonal", "sparse_kaiming",
]  # fmt: skip
Optimizer = Literal["adam", "sgd"]

FORMAT = 1  #: part of a stored head's name: to be raised when the same recipe comes to mean another matrix


class Recipe(NamedTuple):
    """All that a head depends on."""

    kind: Kind
    classes: int  #: C
    dim: int  #: d
    sparsity: float  #: beta, the share of zeros of a sparse head
    norm: float  #: gamma, the length of its rows
    steps: int  #: how long it is realigned
    lr: float
    optimizer: Optimizer
    seed: int


def fixed_head(
    kind: Kind,
    classes: int,
    dim: int,
    *,
    sparsity: float = 0.6,
    norm: float = 0.1,
    steps: int = 10_000,
    lr: float = 1e-4,
    optimizer: Optimizer = "adam",
    seed: int = 0,
) -> Tensor:
    """Return the head [C, d] of this kind, made once and then remembered in memory and on disk."""
    return _remembered(Recipe(kind, classes, dim, sparsity, norm, steps, lr, optimizer, seed)).clone()


@lru_cache
def _remembered(recipe: Recipe) -> Tensor:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fedtail", "heads")
    path = folder / ("-".join(map(str, (*recipe, FORMAT))) + ".safetensors")
    stored = _read(path)
    if stored is not None:
        return stored
    # One thread: how a sum is cut into threads decides its last bits, and so where ten thousand steps lead.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = _make(recipe)
    finally:
        torch.set_num_threads(threads)
    _write(path, made)
    return made


def _make(recipe: Recipe) -> Tensor:
    """Make a head: a dense one as it is, a sparse one from the dense one's directions by mask and realignment."""
    kind, classes, dim, sparsity, gamma, steps, lr, by, seed = recipe
    rng = torch.Generator().manual_seed(seed)
    start = "etf" if kind == "sse_c" else kind.removeprefix("sparse_")
    dense = _dense(start, classes, dim, rng)
    if start != kind:
        return realigned(F.normalize(dense), mask(classes, dim, sparsity, rng), gamma, steps, lr, by)
    if kind == "etf" and dim < classes - 1:  # there is no such frame: spread the random rows as far as they go
        return realigned(dense, torch.ones(classes, dim), 1.0, steps, lr, by)
    return dense


def _dense(kind: str, classes: int, dim: int, rng: torch.Generator) -> Tensor:
    """Return an ETF, or a matrix as torch initialises one by default under this name."""
    if kind == "etf":
        return etf(classes, dim, rng)
    fill: dict[str, Callable[..., Tensor]] = {
        "xavier": nn.init.xavier_uniform_,
        "gaussian": nn.init.normal_,
        "uniform": nn.init.uniform_,
        "orthogonal": nn.init.orthogonal_,
        "kaiming": nn.init.kaiming_uniform_,
    }
    return fill[kind](torch.empty(classes, dim), generator=rng)


def etf(classes: int, dim: int, rng: torch.Generator) -> Tensor:
    """Psi = sqrt(C/(C-1)) U (I - 11^T/C), eq. 2, transposed; random unit rows where d < C-1 leaves no room for it."""
    if dim < classes - 1:
        return F.normalize(torch.randn(classes, dim, generator=rng))
    # I - 11^T/C = V V^T has rank C-1, and U V is any orthonormal frame of C-1 vectors: so d = C-1 is enough.
    V = torch.linalg.qr(torch.cat([torch.ones(classes, 1), torch.eye(classes)[:, 1:]], 1).double()).Q[:, 1:]
    UV = torch.linalg.qr(torch.randn(dim, classes - 1, generator=rng, dtype=torch.float64)).Q
    Psi: Tensor = math.sqrt(classes / (classes - 1)) * V @ UV.T
    return Psi.float()


def mask(classes: int, dim: int, sparsity: float, rng: torch.Generator) -> Tensor:
    """Return S with exactly floor(beta d C) zeros anywhere, but where it can be two ones in every class's row."""
    order = torch.rand(classes, dim, generator=rng, dtype=torch.float64)
    first = order.topk(min(2, dim), largest=False).indices  # a row's first two are in anyway, unless S is very sparse
    order.scatter_add_(1, first, torch.tensor([-2.0, -1.0]).to(order)[: first.shape[1]].expand(classes, -1))
    zeros = math.floor(round(sparsity * dim * classes, 6))
    S = torch.zeros(classes * dim)
    S[order.flatten().argsort()[: classes * dim - zeros]] = 1
    return S.view(classes, dim)


@torch.no_grad()
def realigned(start: Tensor, S: Tensor, gamma: float, steps: int, lr: float, by: Optimizer) -> Tensor:
    """Minimise l_norm + l_angle, eq. 3-5, over the entries that S leaves free."""
    psi = start * S
    free = S.flatten().nonzero().flatten()
    x = psi.flatten()[free]
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, steps + 1):
        gram = psi @ psi.T
        norm = gram.diagonal().sqrt().clamp_min_(1e-12)
        cosine = gram.div_(norm).div_(norm[:, None]).fill_diagonal_(-2)
        closest, j = cosine.max(1, keepdim=True)
        closest.clamp_(-0.99999, 0.99999)
        # d l_angle / d cos(psi_c, psi_j) = 1 / (C sin), for each c and its closest j; then by the chain rule through
        # cos = <psi_c, psi_j> / (|psi_c| |psi_j|), and with d l_norm / d psi_c = 2 (|psi_c| - gamma) psi_c / |psi_c|.
        slope = torch.zeros_like(cosine).scatter_(1, j, (1 - closest * closest).rsqrt_().div_(len(psi)))
        slope = slope + slope.T
        radial = 2 * (norm - gamma) - (slope * cosine).sum(1) / norm
        slope.div_(norm).div_(norm[:, None]).diagonal().copy_(radial / norm)
        grad = (slope @ psi).flatten().index_select(0, free)
        # Written out: importing torch.optim takes longer than a small head.
        if by == "adam":
            m.lerp_(grad, 0.1)
            v.lerp_(grad * grad, 0.001)
            unbias = math.sqrt(1 - 0.999**t)
            x.addcdiv_(m, v.sqrt().add_(1e-8 * unbias), value=-lr * unbias / (1 - 0.9**t))
        else:
            x.add_(grad, alpha=-lr)
        psi.view(-1).index_copy_(0, free, x)
    return psi


def _read(path: Path) -> Tensor | None:
    """Return a stored head, or None where there is none that can be trusted."""
    try:
        stored = load(path.read_bytes())
        head: Tensor = stored["head"]
        return head if int(stored["crc"]) == _crc(head) else None
    except (OSError, SafetensorError, KeyError):
        return None


def _write(path: Path, head: Tensor) -> None:
    """Store a head if the directory can be written to, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(save({"head": head, "crc": torch.tensor(_crc(head))}))
        os.replace(file.name, path)
    except OSError:
        pass


def _crc(head: Tensor) -> int:
    return zlib.crc32(head.numpy().tobytes())
