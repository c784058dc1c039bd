"""Params: all tensors of a model as one flat vector (and one of batch-norm buffers), with named views and + - * /."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Weights arrive as read-only memory shared between processes; whoever trains them clones first.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Layout(NamedTuple):
    """Names and shapes of the tensors in the flat vectors, in their order."""

    weights: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[tuple[str, tuple[int, ...]], ...]


class Params(Mapping[str, Tensor]):
    """A model's weights as one vector: a mapping from names to views, and an element of a vector space."""

    __slots__ = ("_views", "buffers", "flat", "layout")

    def __init__(self, layout: Layout, flat: Tensor, buffers: Tensor) -> None:
        self.layout, self.flat, self.buffers = layout, flat, buffers
        self._views: dict[str, Tensor] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Params:
        """Copy the parameters and floating-point buffers of a module."""
        return cls.pack(dict(module.named_parameters()), dict(module.named_buffers()))

    @classmethod
    def pack(cls, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> Params:
        """Lay named tensors out in one vector each, in the order given."""
        parts = weights, {k: v for k, v in (buffers or {}).items() if v.is_floating_point()}
        layout = Layout(*(tuple((k, tuple(v.shape)) for k, v in part.items()) for part in parts))
        empty = next(iter(weights.values())).detach().new_zeros(0) if weights else torch.zeros(0)
        return cls(layout, *(torch.cat([empty, *(v.detach().reshape(-1) for v in part.values())]) for part in parts))

    # A mapping from names to views of the vectors -------------------------------------------------------------

    def _named(self) -> dict[str, Tensor]:
        if self._views is None:
            self._views = {}
            for entries, flat in zip(self.layout, (self.flat, self.buffers), strict=True):
                # One split is one node of the autograd graph: its backward is a single concatenation.
                pieces = flat.split([math.prod(shape) for _, shape in entries])
                self._views |= {n: v.view(s) for (n, s), v in zip(entries, pieces, strict=True)}
        return self._views

    def __getitem__(self, name: str) -> Tensor:
        return self._named()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self.layout.weights) + len(self.layout.buffers)

    def __or__(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this model with some tensors taken from another, ready to predict with; nothing is copied."""
        return {**self._named(), **(other._named() if isinstance(other, Params) else other)}

    def replace(self, other: Mapping[str, Tensor]) -> Params:
        """Return a copy in which the tensors that `other` names are taken from it."""
        return Params.pack(*({n: other.get(n, self[n]) for n, _ in part} for part in self.layout))

    def where(self, keep: Callable[[str], bool]) -> Params:
        """Return the part whose names satisfy the predicate; a view when they lie side by side."""
        kept, flats = [], []
        for entries, flat in zip(self.layout, (self.flat, self.buffers), strict=True):
            sizes = [math.prod(shape) for _, shape in entries]
            kept.append(tuple(e for e in entries if keep(e[0])))
            chosen = [i for i, (name, _) in enumerate(entries) if keep(name)]
            if chosen == list(range(chosen[0], chosen[-1] + 1)) if chosen else True:
                start = sum(sizes[: chosen[0]]) if chosen else 0
                flats.append(flat.narrow(0, start, sum(sizes[i] for i in chosen)))
            else:
                pieces = flat.split(sizes)
                flats.append(torch.cat([pieces[i] for i in chosen]))
        return Params(Layout(*kept), *flats)

    def under(self, *prefixes: str) -> Params:
        """Return the part whose names start with one of the prefixes."""
        return self.where(lambda name: name.startswith(prefixes))

    @property
    def body(self) -> Params:
        """The feature extractor's part."""
        return self.under("body.")

    @property
    def head(self) -> Params:
        """The classifier's part."""
        return self.under("head.")

    # A vector space; buffers are averaged like weights, but have no inner product ------------------------------

    def _apply(self, op: Callable[..., Tensor], *others: Any) -> Params:
        for other in others:
            if isinstance(other, Params) and other.layout != self.layout:
                raise ValueError("these two Params hold different tensors; take the common part of both first")
        flats = [o.flat if isinstance(o, Params) else o for o in others]
        buffers = [o.buffers if isinstance(o, Params) else o for o in others]
        return Params(self.layout, op(self.flat, *flats), op(self.buffers, *buffers))

    def __add__(self, other: Any) -> Params:
        return self._apply(operator.add, other)

    def __sub__(self, other: Any) -> Params:
        return self._apply(operator.sub, other)

    def __mul__(self, scale: Any) -> Params:
        return self._apply(operator.mul, scale)

    __rmul__ = __mul__

    def __truediv__(self, scale: Any) -> Params:
        return self._apply(operator.truediv, scale)

    def __neg__(self) -> Params:
        return self._apply(operator.neg)

    def dot(self, other: Params) -> Tensor:
        """Inner product of the weights."""
        return torch.dot(self.flat, other.flat)

    def norm(self) -> Tensor:
        """Euclidean norm of the weights."""
        norm: Tensor = torch.linalg.vector_norm(self.flat)
        return norm

    def zeros(self) -> Params:
        """Return the zero vector of the same layout."""
        return self._apply(torch.zeros_like)

    def clone(self) -> Params:
        """Return a copy that shares nothing."""
        return self._apply(torch.clone)

    def detach(self) -> Params:
        """Return the same values outside of any gradient."""
        return self._apply(torch.detach)

    def to(self, *args: Any) -> Params:
        """Move to a device or a floating-point type, as `Tensor.to`."""
        return self._apply(lambda t: t.to(*args))

    # What crosses a process boundary is plain memory on the CPU -------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.layout, *(t.detach().cpu().numpy() for t in (self.flat, self.buffers)))

    def __repr__(self) -> str:
        return f"Params({len(self.layout.weights)} tensors, {self.flat.numel():,} weights)"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Params)
            and self.layout == other.layout
            and all(torch.equal(a, b) for a, b in ((self.flat, other.flat), (self.buffers, other.buffers)))
        )


def _rebuild(layout: Layout, flat: np.ndarray[Any, Any], buffers: np.ndarray[Any, Any]) -> Params:
    return Params(Layout(*layout), torch.from_numpy(flat), torch.from_numpy(buffers))
