"""The science: one file per algorithm, found by its file's name; imports torch and itself, nothing of the engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from algorithms.base import Algorithm, Chain
from algorithms.priors import ESTIMATED

#: What runs when an experiment names no algorithm.
DEFAULT = "fedavg"

#: Files that are no algorithm.
SHARED = {
    "__init__",
    "aggregations",
    "base",
    "params",
    "losses",
    "priors",
    "maths",
    "heads",
    "federated_features",
    "parts",
    "pictures",
    "terms",
}


@cache
def names() -> list[str]:
    """List the algorithms there are."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in SHARED)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, as the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


@cache
def find(name: str) -> type[Algorithm]:
    """Return the algorithm class of the file with this name."""
    if name not in names():
        raise ValueError(f"there is no algorithm '{name}'; {nearest(name, names())}")
    module = import_module(f"algorithms.{name}")
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Algorithm)]
    (found,) = (c for c in own if c.__module__ == module.__name__)
    return found


def build(spec: Iterable[Mapping[str, Mapping[str, Any]]], prior: str = "none") -> Chain:
    """Build the chain that a list of {name: hyperparameters} describes, with whatever must run before it."""
    parts: list[Algorithm] = []
    for entry in spec:
        ((name, fields),) = entry.items()
        kind = find(name)
        if kind.after and not parts:
            parts.append(find(kind.after)())
        parts.append(kind(**fields))
    estimator = ESTIMATED.get(prior)
    if estimator is not None:
        private = [part.name for part in parts if not part.shares_head]
        if private:
            raise ValueError(f"prior '{prior}' is read off a shared classifier, which {private[0]} does not train")
        if parts[0].name != estimator:
            parts.insert(0, find(estimator)())
    return Chain(tuple(parts))
