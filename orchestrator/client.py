"""A client as an algorithm sees it during one call; nothing of Ray is in here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Fit, Model, Objective, State, Tap
from algorithms.params import Params
from algorithms.priors import pseudo_counts
from orchestrator.augment import centre
from orchestrator.data import VOID

if TYPE_CHECKING:
    from orchestrator.data.partition import Rows
    from orchestrator.worker import Worker


def stream(seed: int, *key: int) -> int:
    """Return an independent seed for each purpose, wherever and whenever it is asked for."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> 1)


PART = 512  #: images per forward pass where some vectors are asked for

#: First numbers of a stream's key: who draws from it.
CALL, MEMORY, SAMPLING, SERVER, DROPOUT, STRAGGLER, NOISE = range(7)


class Client:
    """One client during one call; `algorithms.base.Client` tells what each member is for."""

    def __init__(
        self,
        worker: Worker,
        id: int,
        seed: int,
        lr: float = 0.0,
        proxy: Tensor | None = None,
        progress: float = 0.0,
        work: float = 1.0,
    ) -> None:
        self.worker, self.id, self.lr = worker, id, lr
        self.work = work  # share of its steps that this client manages in this round
        self.momentum = worker.experiment.local.momentum
        self.state = State({})
        self.counts = worker.counts[id]
        self.n = len(worker.split.rows(id))
        everywhere, source = worker.everywhere, worker.experiment.local.prior
        self.prior = worker.prior(self.counts, everywhere, proxy)
        self._loss = worker.loss.at(progress)
        self._given = {
            "shares": self.prior,
            "pseudo_counts": pseudo_counts(source, self.prior, self.counts, everywhere),
            "own_counts": self.counts,
        }[self._loss.takes]
        self.last_stage, self.last_block = worker.network.last_stage, worker.network.last_block
        self.augmented = worker.augmented
        self.rng = torch.Generator().manual_seed(seed)
        self.losses = {"images": (0.0, 0), "features": (0.0, 0)}  # summed over steps, and how many

    @cached_property
    def x(self) -> Tensor:
        """All training images at once, normalised, without augmentation."""
        return self.worker.images(self.worker.x_train, self.rows)

    @property
    def rows(self) -> Rows:
        """Where its images are in the data set."""
        return self.worker.split.rows(self.id)

    def images(self, rows: Tensor) -> Tensor:
        """Return those of its training images that have these numbers, normalised, without augmentation."""
        files = self.worker.x_train
        if isinstance(files, Tensor):
            return self.x[rows.to(self.x.device)]
        return self.worker.images(files, self.rows[rows.cpu().numpy()])

    def _stored(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield its images by sets of numbers, normalised, as large as they are stored."""
        files = self.worker.x_train
        if isinstance(files, Tensor):
            return (self.x[part] for part in parts)
        return self.worker.stored(files, [self.rows[part.cpu().numpy()] for part in parts])

    @cached_property
    def y(self) -> Tensor:
        """Their labels; where every pixel has one, as this client knows them, in bytes [n, H, W]."""
        y = self.worker.y_train[self.rows]
        if y.dim() > 1:
            table = torch.from_numpy(self.worker.split.relabelling(self.id))
            y = torch.cat([table[part.int()] for part in y.split(self.worker.block)])  # an index takes 4 bytes a pixel
        return y.to(self.worker.device)

    @cached_property
    def labels(self) -> Tensor:
        """The label of each feature vector: that of the image, or that in the middle of each cell of its map."""
        if self.y.dim() == 1:
            return self.y
        size, cells = self.worker.size, self.worker.cells
        down, across = (((torch.arange(n) + 0.5) * side / n).long() for n, side in zip(cells, size, strict=True))
        return self.y[:, down[:, None].to(self.y.device), across.to(self.y.device)].flatten()

    @cached_property
    def owned(self) -> Tensor:
        """Classes with at least one sample."""
        return self.counts.nonzero().flatten()

    def features(self, w: Model, x: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the body's features of images."""
        with self.worker.tapped(tap):
            return self.worker.features(w, x)

    def stem(self, w: Model, x: Tensor) -> Tensor:
        """Return what the body's last stage is given of images."""
        return self.worker.stem(w, x)

    def stage(self, w: Model, f: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the body's features from the input of its last stage."""
        with self.worker.tapped(tap):
            return self.worker.stage(w, f)

    def embed(self, w: Model) -> Tensor:
        """Return the features of all training images under a frozen body, without augmentation."""
        with torch.no_grad():
            in_memory, parts = isinstance(self.worker.x_train, Tensor), torch.arange(self.n).split(self.worker.block)
            blocks = torch.split(self.x, self.worker.block) if in_memory else self._stored(parts)
            return torch.cat([self.worker.features(w, centre(x, self.worker.size)) for x in blocks])

    def vectors(self, w: Model, rows: Tensor) -> Tensor:
        """Return the feature vectors of these numbers; only images that have some of them are looked at."""
        if self.y.dim() == 1:
            return torch.cat([self.worker.features(w, self.images(part)) for part in rows.split(PART)])
        found, cells = torch.zeros(len(rows), self.worker.network.dim, device=self.y.device), self.worker.cells
        images, cell = rows // math.prod(cells), rows % math.prod(cells)
        for part in images.unique().split(self.worker.block):
            maps = self.worker.features(w, self.images(part)).flatten(2)
            here = torch.isin(images, part)
            found[here] = maps[torch.searchsorted(part, images[here]), :, cell[here]]
        return found

    def classify(self, w: Model, h: Tensor, each: bool = False) -> Tensor:
        """Return the head's logits of features."""
        return self.worker.head(w, h, each)

    def logits(self, w: Model, x: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the whole model's logits of images."""
        with self.worker.tapped(tap):
            return self.worker.logits(w, x)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the experiment's loss with its prior; of pixels, that of all which have a label."""
        if y.dim() > 1:
            known = y != VOID
            if not known.any():
                return 0.0 * logits.sum()
            logits, y = logits.movedim(1, -1)[known], y[known].long()
        return self._loss(logits, y, self._given)

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
        local = self.worker.experiment.local
        lr = self.lr if lr is None else lr
        momentum = local.momentum if momentum is None else momentum
        decay = local.weight_decay if weight_decay is None else weight_decay
        trees = {name: tree.to(self.worker.device).clone() for name, tree in trees.items()}
        flats = [tree.flat.requires_grad_() for tree in trees.values()]
        velocities: list[Tensor | None] = [None] * len(flats)
        steps, total = 0, torch.zeros((), device=self.worker.device)
        epochs = local.epochs if epochs is None else epochs
        for x, y in self.batches(epochs, data=data, rows=rows, batch=batch, views=views):
            # Fresh views each step: the vectors under them have changed.
            loss = objective(self, x, y, **{k: Params(t.layout, t.flat, t.buffers) for k, t in trees.items()})
            with torch.no_grad():
                for i, (flat, grad) in enumerate(zip(flats, torch.autograd.grad(loss, flats), strict=True)):
                    if decay:
                        grad = grad.add(flat, alpha=decay)
                    if momentum:
                        velocity = velocities[i]
                        grad = grad.clone() if velocity is None else velocity.mul_(momentum).add_(grad)
                        velocities[i] = grad
                    flat.add_(grad, alpha=-lr)
            total += loss.detach()
            steps += 1
        # What is reported is the loss on images; that on features only where a call trains on nothing else.
        kind = "images" if data is None else "features"
        self.losses[kind] = self.losses[kind][0] + float(total), self.losses[kind][1] + steps
        return Fit(steps, float(total) / max(1, steps), **{name: tree.detach() for name, tree in trees.items()})

    def batches(
        self,
        epochs: int = 1,
        *,
        data: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | Callable[[torch.Generator], Tensor] | None = None,
        batch: int | None = None,
        views: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled, augmented minibatches; `rows` picks samples (a function: anew each epoch)."""
        y = self.y if data is None else data[1]
        for epoch in range(epochs):
            chosen = rows(self.rng) if callable(rows) else rows
            order = torch.randperm(len(y) if chosen is None else len(chosen), generator=self.rng)
            order = order if chosen is None else chosen.cpu()[order]
            parts = order.to(y.device).split(batch or self.worker.experiment.local.batch)
            left = max(0, math.ceil(self.work * epochs * len(parts)) - epoch * len(parts))
            # Batch norm cannot train on one image.
            wanted = [part for part in parts[:left] if len(part) > 1 or data is not None or not self.worker.norms]
            given = self._stored(wanted) if data is None else (data[0][part] for part in wanted)
            for part, x in zip(wanted, given, strict=True):
                known = y[part]
                maps = data is None and known.dim() > 1 and self.augmented
                x = torch.cat([x, known[:, None].to(x)], dim=1) if maps else x  # labels go where their pixels go
                seen = [self.worker.augment(x, self.rng) if data is None else x for _ in range(views)]
                x = seen[0] if views == 1 else torch.stack(seen)
                yield (x[..., :-1, :, :], x[..., -1, :, :].byte()) if maps else (x, known)
            if left < len(parts):
                return
