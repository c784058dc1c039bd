"""How the server combines what clients send to be added up: as it is, robustly, or privately.

A method knows nothing of it: it sends a Sum and gets one back, `total.w / total.n` being the combined w. What counts
for an aggregation is each client's own value of a term (a weighted term without its weight) and how far it lies from
what the client was sent: a model from the model under the same names, anything else from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms.base import Sum, knob
from algorithms.params import Params


@dataclass(frozen=True)
class Aggregation:
    """Add up."""

    each: ClassVar[bool] = False  #: whether it compares single uploads, so that nothing may be added up before
    private: ClassVar[bool] = False  #: whether it promises to hide each client

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Return what a client hands over of its upload; `sent`: all tensors of models that it was sent."""
        return upload

    def combined(self, uploads: Sequence[Sum]) -> Sum:
        """Combine single uploads, or sums of them."""
        return reduce(add, uploads)

    def released(self, total: Sum, rng: torch.Generator) -> Sum:
        """Return what the method gets to see of the total."""
        return total


@dataclass(frozen=True)
class Clip(Aggregation):
    """Norm clipping (Sun et al., 2019): no client's term lies farther than `norm` from what it was sent."""

    norm: float = knob(1.0, gt=0)  #: largest distance

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Shorten what is too long; weights stay."""
        n = upload.weights()
        return _with(upload, lambda name, value: _times(_clipped(_own(value, n[name]), sent, self.norm), n[name]))


class _Robust(Aggregation):
    each: ClassVar[bool] = True

    def combined(self, uploads: Sequence[Sum]) -> Sum:
        """Combine the clients' own values coordinate by coordinate, each client counting once; weights add up."""
        total = reduce(add, uploads)
        counted = [u for u in uploads if all(n > 0 for n in u.weights().values())]
        if not counted:
            return total

        def middle(name: str, value: Any) -> Any:
            own = [_own(u.terms()[name], u.weights()[name]) for u in counted]
            return _times(_coordinatewise(self.middle, own), total.weights()[name])

        return _with(total, middle)

    def middle(self, values: Tensor) -> Tensor:
        """Return one value of those of all clients, [clients, ...]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Median(_Robust):
    """Coordinate-wise median (Yin et al., ICML 2018)."""

    def middle(self, values: Tensor) -> Tensor:
        """Return the median, of an even number the mean of the two in the middle."""
        ordered: Tensor = values.sort(dim=0).values
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


@dataclass(frozen=True)
class TrimmedMean(_Robust):
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018)."""

    share: float = knob(0.1, ge=0, lt=0.5)  #: beta, share of the clients left out at either end of each coordinate

    def middle(self, values: Tensor) -> Tensor:
        """Return the mean of what is left."""
        cut = int(self.share * len(values))
        return values.sort(dim=0).values[cut : len(values) - cut].mean(0)


@dataclass(frozen=True)
class Private(Aggregation):
    """User-level differential privacy (McMahan et al., ICLR 2018): clipped terms, equal weights, Gaussian noise."""

    private: ClassVar[bool] = True
    clip: float = knob(1.0, gt=0)  #: largest distance of each term of a client's upload from what it was sent
    noise: float = knob(1.0, gt=0)  #: z, standard deviation of the noise in units of the whole upload's bound
    delta: float = knob(1e-5, gt=0, lt=1)  #: of (epsilon, delta)

    def limited(self, upload: Sum, sent: Mapping[str, Tensor]) -> Sum:
        """Clip every term; each client counts once, whatever its size."""
        terms, n = upload.terms(), upload.weights()
        for name, value in terms.items():
            if isinstance(value, dict):
                raise TypeError(f"'{name}' has a part for each of the client's {list(value)}, which noise cannot hide")
        loose = {k: _clipped(v, sent, self.clip) for k, v in terms.items() if k not in n and not (n and k == "n")}
        own = {k: _own(v, n[k]) if n[k] else _start(v, sent) for k, v in terms.items() if k in n}
        tied = {k: _clipped(v, sent, self.clip) for k, v in own.items()}
        return (Sum.weighted(1, **tied) if n else Sum()) | Sum(**loose)

    def released(self, total: Sum, rng: torch.Generator) -> Sum:
        """Add noise to every coordinate of every term but the number of clients, which is no secret."""
        hidden = [name for name in total.terms() if not (total.weights() and name == "n")]
        scale = self.noise * self.clip * len(hidden) ** 0.5  # all terms together lie within clip * sqrt(terms)

        def noisy(tensor: Tensor) -> Tensor:
            drawn = torch.randn(tensor.shape, generator=rng, dtype=torch.float64).to(tensor.device)
            return torch.add(tensor, drawn, alpha=scale)

        return _with(total, lambda name, value: _each(noisy, value), hidden)


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "mean": Aggregation,
    "clip": Clip,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "dp": Private,
}


# Terms: numbers, tensors, Params, and dicts of these ----------------------------------------------------------------


def _with(upload: Sum, change: Callable[[str, Any], Any], names: Sequence[str] | None = None) -> Sum:
    """Return a Sum with some terms changed, by default those that are weighted."""
    changed = upload.weights() if names is None else names
    terms = {k: change(k, v) if k in changed else v for k, v in upload.terms().items()}
    return Sum.weighing(upload.weights(), **terms)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield what a value is made of."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, Params):
        yield from (value.flat, value.buffers)
    else:
        yield torch.as_tensor(value, dtype=torch.float64)


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with every tensor in it changed."""
    if isinstance(value, dict):
        return {k: _each(change, part) for k, part in value.items()}
    if isinstance(value, Params):
        return Params(value.layout, change(value.flat), change(value.buffers))
    return change(value) if isinstance(value, Tensor) else float(change(torch.tensor(value, dtype=torch.float64)))


def _times(value: Any, n: float) -> Any:
    return _each(lambda tensor: n * tensor, value)


def _own(value: Any, n: float) -> Any:
    """Return the client's own value of a term that counts n times; of one that does not count, the nothing it adds."""
    return _times(value, 1 / n if n else 0.0)


def _coordinatewise(middle: Callable[[Tensor], Tensor], values: Sequence[Any]) -> Any:
    """Combine the same coordinate of all values; of a dict each entry over those who have it."""
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _coordinatewise(middle, [value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, Params):
        flats, buffers = (torch.stack(parts).double() for parts in zip(*map(_tensors, values), strict=True))
        return Params(first.layout, middle(flats), middle(buffers))
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
    return middle(stacked) if isinstance(first, Tensor) else float(middle(stacked))


def _clipped(value: Any, sent: Mapping[str, Tensor], most: float) -> Any:
    """Return the value at most so far from what the client was sent."""
    start = _start(value, sent)
    distances = [(a - b).double().norm() for a, b in zip(_tensors(value), _tensors(start), strict=True)]
    far = float(torch.stack(distances).norm()) if distances else 0.0
    if far <= most:
        return value
    return _toward(start, value, most / far)


def _toward(start: Any, end: Any, share: float) -> Any:
    if isinstance(end, dict):
        return {k: _toward(start[k], end[k], share) for k in end}
    return start + (end - start) * share


def _start(value: Any, sent: Mapping[str, Tensor]) -> Any:
    """Return what the client was sent under the names of a model's tensors, and zero for all else."""
    if isinstance(value, dict):
        return {k: _start(part, sent) for k, part in value.items()}
    if isinstance(value, Params):
        known = {name: sent[name] for name in value if name in sent and sent[name].shape == value[name].shape}
        return value.zeros().replace(known)
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
