"""Pictures of what the methods have learnt: portraits/NAME.py belongs to NAME.py, which knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from torch import Tensor

from algorithms.base import Algorithm, Model, State
from algorithms.params import Params
from algorithms.pictures import Picture


@dataclass(frozen=True)
class Sitting:
    """What there is to see when a method is done: what everybody remembers, and what the clients' data are like."""

    server: State
    clients: Mapping[int, State]
    origin: Params  #: the model that the method began with
    counts: Tensor  #: n_k^c [clients, classes]
    moments: Callable[
        [Model], tuple[Tensor, Tensor]
    ]  #: body -> mean and variance of each class's features [classes, d]

    @property
    def classes(self) -> range:
        """The classes' numbers."""
        return range(self.counts.shape[1])


def portraits(algorithm: Algorithm, sitting: Sitting) -> dict[str, Picture]:
    """Return the pictures that belong to a method, by name; most have none of their own."""
    if not Path(__file__).with_name(f"{algorithm.name}.py").exists():
        return {}
    found: dict[str, Picture] = import_module(f"{__name__}.{algorithm.name}").portraits(algorithm, sitting)
    return found
