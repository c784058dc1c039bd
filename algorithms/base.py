"""What an algorithm is made of: a frozen Algorithm, its Phases, two sealed States, and the Sum a client returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from algorithms.params import Params

if TYPE_CHECKING:
    from algorithms.losses import Loss

BLOCK = 1 << 16  #: so many numbers are added at once: they stay in the cache while they are widened

Model = Mapping[str, Tensor]  # what predicts: a Params, or parts of several joined with `|`
Predictor = Callable[[Tensor], Tensor]  # images -> logits
Tap = Callable[[str, Tensor], Tensor]  # (layer, activation map) -> what goes on instead, at each instrumented layer
Objective = Callable[..., Tensor]  # (client, x, y, **trees) -> the loss to descend


def knob(
    default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> Any:
    """Declare a hyperparameter with its default and the bounds that a value must respect."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


class State:
    """Memory: fields given at birth, assignable, no new ones."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(self._undeclared(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise AttributeError(self._undeclared(name))
        self._fields[name] = value

    def _undeclared(self, name: str) -> str:
        return f"no field '{name}' was declared; declared: {', '.join(self._fields) or 'none'}"

    def fields(self) -> dict[str, Any]:
        """Return name and value of every field."""
        return dict(self._fields)


class Sum:
    """Named terms that are added over clients, in float64: numbers, tensors, Params, or dicts of these."""

    def __init__(self, **terms: Any) -> None:
        self._terms, self._weights = terms, dict[str, float]()

    @classmethod
    def weighted(cls, n: float, **terms: Any) -> Sum:
        """Return terms that count n times each, and n; `total.w / total.n` is then the weighted mean of w."""
        return cls.weighing(dict.fromkeys(terms, n), n=n, **{k: _times(v, n) for k, v in terms.items()})

    @classmethod
    def weighing(cls, weights: Mapping[str, float], /, **terms: Any) -> Sum:
        """Return terms of which some are known to hold a weight already."""
        made = cls(**terms)
        made._weights = dict(weights)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._terms:
            raise AttributeError(f"the clients sent no term '{name}'; they sent: {', '.join(self._terms)}")
        return self._terms[name]

    def terms(self) -> dict[str, Any]:
        """Return name and value of every term."""
        return self._terms

    def weights(self) -> dict[str, float]:
        """Return how often each weighted term counts."""
        return self._weights

    def __or__(self, other: Sum) -> Sum:
        """Return the terms of both."""
        return Sum.weighing(self._weights | other._weights, **self._terms, **other._terms)

    def __add__(self, other: Sum) -> Sum:
        total = Sum.weighing(self._weights, **{k: _wide(v, copy=True) for k, v in self._terms.items()})
        total += other
        return total

    def __iadd__(self, other: Sum) -> Sum:
        """Add to what `+` has made, in its place."""
        if self._terms.keys() != other._terms.keys():
            raise ValueError(f"clients sent different terms: {sorted(self._terms)} and {sorted(other._terms)}")
        self._weights = {k: w + other._weights.get(k, 0) for k, w in self._weights.items()}
        self._terms = {k: _plus(v, other._terms[k]) for k, v in self._terms.items()}
        return self

    def to(self, device: torch.device) -> Sum:
        """Move every term to a device."""
        return Sum.weighing(self._weights, **{k: _moved(v, device) for k, v in self._terms.items()})

    def widen(self) -> Sum:
        """Return the same terms in the precision in which they are added."""
        return Sum.weighing(self._weights, **{k: _wide(v) for k, v in self._terms.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return _sum, (self._weights, self._terms)


def _sum(weights: dict[str, float], terms: dict[str, Any]) -> Sum:
    return Sum.weighing(weights, **terms)


def _times(value: Any, n: float) -> Any:
    return {k: _times(v, n) for k, v in value.items()} if isinstance(value, dict) else n * value


def _wide(value: Any, copy: bool = False) -> Any:
    if isinstance(value, dict):
        return {k: _wide(v, copy) for k, v in value.items()}
    if isinstance(value, Params) or (isinstance(value, Tensor) and value.is_floating_point()):
        return value.to(torch.float64, False, copy)
    return value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _moved(v, device) for k, v in value.items()}
    return value.to(device) if isinstance(value, Params | Tensor) else value


def _plus(a: Any, b: Any) -> Any:
    """Add b to a, in place where a is one of the wide tensors that models are made of."""
    if isinstance(a, dict):
        return {k: _plus(a[k], b[k]) if k in a and k in b else _wide(a.get(k, b.get(k)), copy=True) for k in a | b}
    if isinstance(a, Params):
        if a.layout != b.layout:
            raise ValueError("clients sent models of different tensors")
        return Params(a.layout, _plus(a.flat, b.flat), _plus(a.buffers, b.buffers))
    if not isinstance(a, Tensor) or a.dtype != torch.float64:
        return a + b
    for some, more in zip(a.view(-1).split(BLOCK), b.reshape(-1).split(BLOCK), strict=True):
        some.add_(more)
    return a


class Fit:
    """What `client.fit` returns: every tree under its name, the steps taken and the mean loss."""

    def __init__(self, steps: int, loss: float, **trees: Params) -> None:
        self.steps, self.loss, self.trees = steps, loss, trees

    def __getattr__(self, name: str) -> Params:
        try:
            trees: dict[str, Params] = self.__dict__["trees"]
            return trees[name]
        except KeyError:
            raise AttributeError(f"no tree '{name}' was trained") from None


class Client(Protocol):
    """One client's side of a call: its data, its memory, and the means to learn from them."""

    id: int
    n: int  #: number of training samples, n_k
    counts: Tensor  #: samples per class, n_k^c
    prior: Tensor  #: class prior chosen by the experiment, pi
    lr: float  #: learning rate of this round
    momentum: float  #: momentum of the experiment's SGD
    state: State  #: what this client remembers
    rng: torch.Generator  #: randomness of this call, a function of (seed, round, call, client)
    last_stage: str  #: prefix of the names of the body's last stage
    last_block: str  #: prefix of the names of its last residual block
    augmented: bool  #: whether training images are varied at random each time they are seen

    @property
    def x(self) -> Tensor:
        """All training images at once, normalised, without augmentation; of a large data set rather `images`."""

    @property
    def y(self) -> Tensor:
        """Their labels; where every pixel has one, maps [n, H, W] of which 255 is void."""

    @property
    def labels(self) -> Tensor:
        """The label of each feature vector of the training images: y, or where pixels have labels one of each cell."""

    @property
    def owned(self) -> Tensor:
        """Classes with at least one sample, P_k."""

    def images(self, rows: Tensor) -> Tensor:
        """Return the training images of these numbers, 0 to n - 1, normalised, without augmentation."""

    def features(self, w: Model, x: Tensor, tap: Tap | None = None) -> Tensor:
        """Return f_theta(x); a layer runs in training mode exactly while its weights are being trained."""

    def stem(self, w: Model, x: Tensor) -> Tensor:
        """Return the input of the body's last stage; what `stage` makes of it are the features, bit for bit."""

    def stage(self, w: Model, f: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the features that the last stage makes of its input; `w` need not name anything before it."""

    def embed(self, w: Model) -> Tensor:
        """Return the features of all training images under a frozen body, without augmentation."""

    def vectors(self, w: Model, rows: Tensor) -> Tensor:
        """Return the feature vectors of these numbers, places in `labels`, as rows [m, d], without augmentation."""

    def classify(self, w: Model, h: Tensor, each: bool = False) -> Tensor:
        """Return the head's logits of features; of each expert, [M, B, C], where the head has several."""

    def logits(self, w: Model, x: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the whole model's logits of images."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the experiment's loss with its prior."""

    def fit(
        self,
        objective: Objective,
        *,
        data: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | Callable[[torch.Generator], Tensor] | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        batch: int | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        views: int = 1,
        **trees: Params,
    ) -> Fit:
        """Minimise the objective over the trees by SGD; what is not given is as in the experiment's `local`."""

    def batches(
        self,
        epochs: int = 1,
        *,
        data: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | Callable[[torch.Generator], Tensor] | None = None,
        batch: int | None = None,
        views: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled, augmented minibatches, for loops that `fit` cannot say; several views are [views, B, ...]."""


class Cohort(Protocol):
    """The clients of one round, seen from the server."""

    ids: list[int]
    everyone: list[int]  #: all clients that have data, drawn or not
    progress: float  #: share of this phase's rounds that are behind us, 0 <= progress < 1
    rng: np.random.Generator  #: the server's randomness of this round

    def sum(self, local: Callable[..., Sum], *shared: Any) -> Sum:
        """Run a client method on every client and add up what they return."""

    def sum_by(self, key: Mapping[int, Hashable], local: Callable[..., Sum], *shared: Any) -> dict[Hashable, Sum]:
        """Run a client method on the clients that have a key, and add up by key."""

    def map(self, local: Callable[..., Any], *shared: Any, each: Mapping[int, Any] | None = None) -> dict[int, Any]:
        """Run a client method on every client and return each one's value; `each` adds an argument per client."""

    def server(self, local: Callable[..., Any], *shared: Any) -> Any:
        """Run a client method once on the server, which has `server_images` of each class, and return its value."""

    def only(self, ids: Sequence[int]) -> Cohort:
        """Return the cohort of just these clients of the population."""


@dataclass(frozen=True)
class Phase:
    """A number of rounds of one server-side step."""

    step: Callable[[State, Cohort], None]
    rounds: int | None = None  #: None: the experiment's own number
    everyone: bool = False  #: all clients take part, not only clients_per_round of them
    scored: bool = True  #: whether there is a model worth testing during and after it


class Card(NamedTuple):
    """What a catalogue says of a method besides its hyperparameters."""

    kind: str  #: optimisation, personalized, class imbalance, classifier, or preparation
    uploads: str = "model"  #: what a client sends to the server
    keeps: str = ""  #: what stays with the client between its rounds
    needs: str = ""  #: what plain federated learning does not have, e.g. data on the server
    singles: str = ""  #: what the server must know of each client: its whole "upload", or something of it; else sums do

    @property
    def sums(self) -> bool:
        """Whether the server adds uploads up."""
        return self.uploads != "nothing" and self.singles != "upload"


@dataclass(frozen=True)
class Algorithm:
    """A method: fields are its hyperparameters, methods its procedure; it remembers nothing."""

    card: ClassVar[Card] = Card("optimisation")
    after: ClassVar[str | None] = None  #: what runs first when a post-hoc method is named alone
    inherits: ClassVar[tuple[str, ...]] = ()  #: fields of the server that are taken over from the algorithm before
    shares_head: ClassVar[bool] = True  #: whether all clients train one classifier
    later: ClassVar[Mapping[str, str]] = {}  #: phase, or "predict" -> hyperparameters that nothing before needs
    linear_head: ClassVar[bool] = False  #: whether it computes with weights of a linear classifier, and so has no other
    per_image: ClassVar[str] = ""  #: why it makes no sense where every pixel has a label; empty: it does

    @property
    def name(self) -> str:
        """The name of the algorithm's file, which is its name everywhere."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def experts(self) -> int | None:
        """How many experts the network must have; None where it is an ordinary one."""
        return None

    @property
    def server_images(self) -> int:
        """How many training images of each class the server itself must own."""
        return 0

    def refuses(self, loss: Loss) -> str | None:
        """Say why it cannot learn by a loss; None where it can."""
        wrong = self.linear_head and loss.cosine is not None
        return f"it needs a cosine classifier, but {self.name} a linear one" if wrong else None

    def server_state(self, model: Params) -> dict[str, Any]:
        """Declare the server's memory, given the model to start from."""
        return {"model": model}

    def client_state(self, client: Client, model: Params) -> dict[str, Any]:
        """Declare a client's memory as it is before the client first takes part."""
        return {}

    def phases(self) -> list[Phase]:
        """List what is done, in order."""
        raise TypeError(f"{type(self).__name__} must define phases()")

    def view(self, server: State) -> tuple[Any, ...]:
        """Return what clients are given before they predict."""
        return (server.model,)

    def generic(self, client: Client, *view: Any) -> Predictor | None:
        """Return the one model that everybody shares, or None where there is none."""
        return (lambda x: client.logits(view[0], x)) if self.shares_head else None

    def personal(self, client: Client, *view: Any) -> Predictor:
        """Return this client's own model; by default the generic one."""
        predict = self.generic(client, *view)
        assert predict is not None, "a method without a generic model defines personal()"
        return predict


@dataclass(frozen=True)
class Chain:
    """Algorithms run one after another, each starting from the model of the one before."""

    parts: tuple[Algorithm, ...]

    def phases(self) -> list[tuple[int, Phase]]:
        """Return all phases in order, each with the number of the algorithm it belongs to."""
        return [(i, phase) for i, part in enumerate(self.parts) for phase in part.phases()]
