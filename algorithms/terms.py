"""Terms of a Sum as vectors: numbers, tensors, Params, and dicts of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Sum
from algorithms.params import Params


def with_terms(upload: Sum, change: Callable[[str, Any], Any], names: Sequence[str] | None = None) -> Sum:
    """Return a Sum with some terms changed, by default those that are weighted."""
    changed = upload.weights() if names is None else names
    terms = {k: change(k, v) if k in changed else v for k, v in upload.terms().items()}
    return Sum.weighing(upload.weights(), **terms)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield what a value is made of."""
    if isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Params):
        yield from (value.flat, value.buffers)
    else:
        yield torch.as_tensor(value, dtype=torch.float64)


def each_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with every tensor in it changed."""
    if isinstance(value, dict):
        return {k: each_tensor(change, part) for k, part in value.items()}
    if isinstance(value, Params):
        return Params(value.layout, change(value.flat), change(value.buffers))
    return change(value) if isinstance(value, Tensor) else float(change(torch.tensor(value, dtype=torch.float64)))


def times(value: Any, n: float) -> Any:
    """Return a value n times."""
    return each_tensor(lambda tensor: n * tensor, value)


def own(value: Any, n: float) -> Any:
    """Return the client's own value of a term that counts n times; of one that does not count, the nothing it adds."""
    return times(value, 1 / n if n else 0.0)


def coordinatewise(middle: Callable[[Tensor], Tensor], values: Sequence[Any]) -> Any:
    """Combine the same coordinate of all values; of a dict each entry over those who have it."""
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: coordinatewise(middle, [value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, Params):
        flats, buffers = (torch.stack(parts).double() for parts in zip(*map(tensors_in, values), strict=True))
        return Params(first.layout, middle(flats), middle(buffers))
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
    return middle(stacked) if isinstance(first, Tensor) else float(middle(stacked))


def clipped(value: Any, sent: Mapping[str, Tensor], most: float) -> Any:
    """Return the value at most so far from what the client was sent."""
    start = started_from(value, sent)
    distances = [(a - b).double().norm() for a, b in zip(tensors_in(value), tensors_in(start), strict=True)]
    far = float(torch.stack(distances).norm()) if distances else 0.0
    if far <= most:
        return value
    return toward(start, value, most / far)


def toward(start: Any, end: Any, share: float) -> Any:
    """Return the point that lies this share of the way from start to end."""
    if isinstance(end, dict):
        return {k: toward(start[k], end[k], share) for k in end}
    return start + (end - start) * share


def started_from(value: Any, sent: Mapping[str, Tensor]) -> Any:
    """Return what the client was sent under the names of a model's tensors, and zero for all else."""
    if isinstance(value, dict):
        return {k: started_from(part, sent) for k, part in value.items()}
    if isinstance(value, Params):
        known = {name: sent[name] for name in value if name in sent and sent[name].shape == value[name].shape}
        return value.zeros().replace(known)
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
