"""The gate before every aggregation: what a client sends must be finite, of the form of the others', and count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Sum
from algorithms.params import Layout, Params
from orchestrator.values import tensors

LARGEST = 1e15  #: of a number in an upload: beyond, sums of squares overflow, and nobody's weights are there

EMPTY = "empty"  #: what a client sends that has nothing to say; it fits everywhere

Form = tuple[tuple[str, str], ...]  # names of the tensors of an upload and what they are; a dict's entries go by '*'


def fault(upload: Any, memory: Any, origin: Params) -> str | None:
    """Say what makes a client's upload or memory unusable whatever the others send; None where nothing does."""
    for name, tensor in (*tensors(upload), *tensors(memory, "memory")):
        if tensor.numel() and tensor.is_floating_point():
            largest = max(abs(float(end)) for end in torch.aminmax(tensor.detach()))
            if not math.isfinite(largest):
                return f"'{name}' is not finite"
            if largest > LARGEST:
                return f"'{name}' holds {largest:.0e}, which is too large to go on with"
        elif tensor.is_complex():
            return f"'{name}' holds complex numbers"
    if isinstance(upload, Sum):
        for name, weight in upload.weights().items():
            if not (math.isfinite(weight) and weight >= 0):
                return f"'{name}' counts {weight:g} times"
    expected = _forms(origin.layout, _kind(origin.flat))
    for name, what in form(upload):
        own = next((name[i + 1 :] for i, c in enumerate(name) if c == "." and name[i + 1 :] in expected), None)
        if own is not None and expected[own] != what:
            return f"'{name}' is {what}, but the model's is {expected[own]}"
    return None


def form(value: Any, name: str = "") -> Form:
    """Return what an upload is made of."""
    return tuple(_form(value, name))


def _form(value: Any, name: str) -> Iterator[tuple[str, str]]:
    dot = f"{name}." if name else ""
    if isinstance(value, Sum):
        for term, part in value.terms().items():
            yield from _form(part, f"{dot}{term}")
    elif isinstance(value, Params):
        kind = _kind(value.flat)
        yield from ((f"{dot}{tensor}", what) for tensor, what in _forms(value.layout, kind).items())
    elif isinstance(value, Mapping):
        # Which entries a client has is its own affair; what they are is not.
        named = all(isinstance(key, str) for key in value)
        inside = [_form(part, f"{dot}{key if named else '*'}") for key, part in value.items()]
        yield from dict.fromkeys(each for part in inside for each in part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _form(part, f"{dot}{i}")
    elif isinstance(value, Tensor):
        yield name, f"{_kind(value)} {tuple(value.shape)}" if value.numel() else EMPTY
    elif value is not None:
        yield name, "a number" if isinstance(value, int | float) else type(value).__name__


@cache
def _forms(layout: Layout, kind: str) -> dict[str, str]:
    return {tensor: f"{kind} {shape}" for part in layout for tensor, shape in part}


def _kind(tensor: Tensor) -> str:
    """Return the tensor's type; single and double precision are the same to us."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    return "float" if wide else str(tensor.dtype).removeprefix("torch.")


def strangers(sent: Sequence[tuple[Form, Sequence[int]]]) -> dict[int, str]:
    """Return the clients whose uploads have not the form that most have, and in what they differ."""
    if len({form for form, _ in sent}) < 2:
        return {}
    votes: dict[str, Counter[str | None]] = {}
    for form, ids in sent:
        for name, what in form:
            votes.setdefault(name, Counter())[what] += len(ids) if what != EMPTY else 0
    usual: dict[str, str | None] = {}
    for name, counts in votes.items():
        if "*" not in name:
            counts[None] += sum(len(ids) for form, ids in sent if name not in dict(form))
        usual[name] = counts.most_common(1)[0][0]
    found: dict[int, str] = {}
    for form, ids in sent:
        have = dict(form)
        for name, wanted in usual.items():
            if have.get(name) not in (wanted, EMPTY) and not ("*" in name and name not in have):
                wrong = "is missing" if name not in have else f"is {have[name]}"
                others = "the others send none" if wanted is None else f"the others' is {wanted}"
                found |= dict.fromkeys(ids, f"'{name}' {wrong}, but {others}")
                break
    return found
