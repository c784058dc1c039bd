"""What states and messages are made of: tensors, Params, numbers, text, lists and dicts; where they lie, their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Sum
from algorithms.params import Params

CPU = torch.device("cpu")


def place(value: Any, device: torch.device) -> Any:
    """Move a value to a device in the form in which states and messages are kept: float32, outside of gradients."""
    if isinstance(value, Params | Tensor):
        value = value.detach()
        wide = (value.flat if isinstance(value, Params) else value).dtype == torch.float64
        return value.to(device, torch.float32) if wide else value.to(device)
    if isinstance(value, Mapping):
        return {k: place(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(place(v, device) for v in value)
    if isinstance(value, float):
        return float(value)  # also what is a subclass of it, as numpy's is
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"a state or message may hold tensors, Params, numbers, text, lists and dicts, not {type(value)}")


def own(value: Any) -> Any:
    """Return a copy that shares no memory with whoever sent the value."""
    if isinstance(value, Params | Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {k: own(v) for k, v in value.items()}
    return type(value)(own(v) for v in value) if isinstance(value, list | tuple) else value


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside a value with its dotted name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Params):
        yield from ((f"{name}.{kind}", t) for kind, t in (("weights", value.flat), ("buffers", value.buffers)))
    elif isinstance(value, Sum):
        yield from tensors(value.terms(), name)
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from tensors(v, f"{name}.{k}".lstrip("."))
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from tensors(v, f"{name}.{i}".lstrip("."))
    elif isinstance(value, float):
        yield name, torch.tensor(value)


def size(value: Any) -> int:
    """Return the bytes of all tensors in a value."""
    return sum(t.numel() * t.element_size() for _, t in tensors(value))


def extra(value: Any, model: Params) -> int:
    """Return the bytes of an upload beyond one model: control variates, gradients, maps, statistics."""
    shapes = {model.flat.numel(), model.buffers.numel()}
    like_models = sum(size(part) for part in parts(value) if isinstance(part, Params) or part.numel() in shapes)
    return size(value) - min(size(model), like_models)


def parts(value: Any) -> Iterator[Params | Tensor]:
    """Yield all models and tensors inside a value."""
    value = value.terms() if isinstance(value, Sum) else value
    if isinstance(value, Params | Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from parts(part)


def models_in(value: Any) -> dict[str, Tensor]:
    """Return the tensors of all models inside a value by their names."""
    return {name: tensor for part in parts(value) if isinstance(part, Params) for name, tensor in part.items()}
