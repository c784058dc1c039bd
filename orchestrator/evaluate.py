"""From hits per class to the metrics of the five papers, all at once.

Clients count, the driver divides: what crosses the wire are integers (and the generic model's logits), so the result
does not depend on who counted what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from orchestrator.data import Split

if TYPE_CHECKING:
    from algorithms.base import Predictor
    from algorithms.params import Params
    from orchestrator.client import Client
    from orchestrator.jobs import Job, Result
    from orchestrator.worker import Store, Worker

BLOCK = 256  #: test images per forward pass
IntArray = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, np.dtype[np.float64]]

#: What is counted for each client and class: on all test images, and on its own; the same on held-out ones.
OWNED, MASKED, MATCHED, HELD_OWNED, HELD_MASKED, HELD_MATCHED = range(6)
ON_TEST, ON_HELD_OUT = (OWNED, MASKED, MATCHED), (HELD_OWNED, HELD_MASKED, HELD_MATCHED)

SPLITS = "many", "medium", "few", "head", "middle", "tail"
SPLIT_METRICS = "generic/acc", "personal/acc_dist", "personal/acc_owned"


#: Of segmentation: mean intersection over union, mean recall of the classes, share of pixels.
PIXEL_METRICS = (
    "generic/miou", "generic/macc", "generic/acc",
    "personal/miou", "personal/macc", "personal/acc", "personal/miou_worst10",
    "validation/miou", "validation/macc", "validation/acc", "train/loss",
)  # fmt: skip


def known_metrics(task: str | None = None) -> list[str]:
    """List every metric that a sweep may rank by, or one of this task."""
    if task is None:
        return list(dict.fromkeys([*known_metrics("classification"), *PIXEL_METRICS]))
    if task == "segmentation":
        return list(PIXEL_METRICS)
    plain = ["personal/acc_owned_masked", "personal/acc_worst10", "generic/recall_tail", "train/loss"]
    held_out = ["validation/acc_dist", "validation/acc_owned", "validation/acc_owned_masked"]
    return [*SPLIT_METRICS, *(f"{m}_{s}" for m in SPLIT_METRICS for s in SPLITS), *plain, *held_out]


# On the workers ------------------------------------------------------------------------------------------------------


class SortedTest:
    """Images that are tested on, sorted by class and cut into blocks of one class each, the same for every worker."""

    def __init__(self, labels: IntArray, classes: int, rows: IntArray | None = None) -> None:
        """Take the labels of all images, and the rows of those that are tested on: by default all."""
        rows = np.arange(len(labels)) if rows is None else rows
        self.order = rows[np.argsort(labels[rows], kind="stable")]
        self.position = np.full(len(labels), -1)
        self.position[self.order] = np.arange(len(rows))
        edges = np.concatenate([[0], np.cumsum(np.bincount(labels[rows], minlength=classes))]).tolist()
        self.blocks = [
            (c, start, min(start + BLOCK, edges[c + 1]))
            for c in range(classes)
            for start in range(edges[c], edges[c + 1], BLOCK)
        ]
        self.whole = [(c, *ends) for c, ends in enumerate(pairwise(edges)) if ends[0] < ends[1]]  # classes uncut


def predict(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Return the generic model's logits on a range of test blocks."""
    (somebody,) = job.ids
    client = worker.client(somebody, job.part, job.memory, origin, 0)
    assert job.each is not None
    first, last = job.each[somebody]
    model = worker.parts[job.part].generic(client, *view)
    if model is not None:
        logits = []
        for _, start, stop in worker.tests.blocks[first:last]:
            with worker.predicting():
                logits.append(model(worker.images(worker.x_test, worker.tests.order[start:stop])))
        result.values[somebody] = torch.cat(logits).cpu()


def count(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Count each client's hits with its own model, or with the given logits where all share one model.

    What comes back is [setting, what, class]: the algorithm's own setting first, then those that are asked for too.
    """
    shared: Tensor | None = view[0] if job.method == "shared" else None
    part, classes = worker.parts[job.part], worker.counts.shape[1]
    settings = part, *job.also
    clients: list[tuple[Client, Tensor]] = []
    models: dict[int, list[Predictor]] = {}
    for id in job.ids:
        client = worker.client(id, job.part, job.memory, origin, 0)
        clients.append((client, worker.counts[id] > 0))
        shared_by_all = None if shared is None else part.generic(client, *view[1:])
        models[id] = [shared_by_all or setting.personal(client, *view) for setting in settings]
        result.values[id] = torch.zeros(len(settings), 6, classes, dtype=torch.int64)

    def tally(kinds: tuple[int, int, int], tests: SortedTest, local: Sequence[IntArray], store: Store) -> None:
        """Count hits on all images of the classes that a client owns, and among them on its own."""
        ready = shared if kinds is ON_TEST else None  # logits
        own, masked, matched = kinds
        places = {client.id: tests.position[local[client.id]] for client, _ in clients}
        for c, start, stop in tests.blocks if ready is None else tests.whole:
            inside = {id: at[(at >= start) & (at < stop)] - start for id, at in places.items()}
            holders = [(client, owned) for client, owned in clients if owned[c] or len(inside[client.id])]
            if not holders:
                continue
            x = worker.images(store, tests.order[start : stop if ready is None else start])
            with worker.predicting():
                for client, owned in holders:
                    for model, hits in zip(models[client.id], result.values[client.id], strict=True):
                        logits = model(x) if ready is None else ready[start:stop]
                        hit = logits.argmax(1) == c
                        hits[matched, c] += int(hit[torch.as_tensor(inside[client.id], device=hit.device)].sum())
                        if owned[c]:
                            hits[own, c] += int(hit.sum())
                            hits[masked, c] += int((logits.masked_fill(~owned, -math.inf).argmax(1) == c).sum())

    tally(ON_TEST, worker.tests, worker.split.test, worker.x_test)
    tally(ON_HELD_OUT, worker.held_out, worker.split.validation, worker.x_train)


def moments(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Return each client's sums over its training images, by class: ones, features, squared features."""
    (w,) = view
    for id in job.ids:
        client = worker.client(id, job.part, {id: {}}, origin, 0)
        h, own = client.embed(w).double(), F.one_hot(client.y, worker.counts.shape[1]).double().T
        result.values[id] = torch.cat([own.sum(1, keepdim=True), own @ h, own @ h**2], dim=1).cpu()


# On the driver -------------------------------------------------------------------------------------------------------


def groups(counts: IntArray) -> dict[str, IntArray]:
    """Return the classes of each shot group: LDAE's by count, FedLoGe's by cumulative share of the samples."""
    by_size = np.argsort(-counts, kind="stable")
    share = np.cumsum(counts[by_size]) / counts.sum()
    # A class belongs to the group in which it starts: the one that crosses a border is still inside.
    before = np.concatenate([[0.0], share[:-1]])
    named = {
        "many": counts > 100,
        "medium": (counts >= 20) & (counts <= 100),
        "few": counts < 20,
    }
    split = {k: np.flatnonzero(v) for k, v in named.items()}
    split["head"] = np.sort(by_size[before < 0.75])
    split["middle"] = np.sort(by_size[(before >= 0.75) & (before < 0.95)])
    split["tail"] = np.sort(by_size[before >= 0.95])
    return split


def mean_of(values: Iterable[float]) -> float | None:
    """Return the mean of the values that exist, or None."""
    there = [v for v in values if not math.isnan(v)]
    return float(sum(there) / len(there)) if there else None


def rates_of(hits: Any, totals: Any) -> Array:
    """Return hits / totals where there is something to hit, NaN elsewhere."""
    rates: Array = np.divide(hits, totals, out=np.full(np.shape(hits), np.nan), where=np.asarray(totals) > 0)
    return rates


class Scores:
    """All counts of one evaluation, and what the papers make of them."""

    def __init__(
        self,
        split: Split,
        y_train: IntArray,
        y_test: IntArray,
        generic: IntArray | None = None,
        personal: IntArray | None = None,
    ) -> None:
        """Take hits of the generic model [class] and of the clients' own [client, what, class]."""
        classes = split.counts.shape[1]
        self.split, self.groups = split, groups(split.counts.sum(0))
        self.clients = np.flatnonzero(split.counts.sum(1) > 0)
        self.test = np.bincount(y_test, minlength=classes)
        count = {
            "test": [np.bincount(y_test[rows], minlength=classes) for rows in split.test],
            "validation": [np.bincount(y_train[rows], minlength=classes) for rows in split.validation],
        }
        self.matched, self.held_matched = (np.stack(count[k])[self.clients] for k in ("test", "validation"))
        self.held_out = np.sum(count["validation"], axis=0)
        self.generic, self.personal = generic, personal

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return what is told per class, per client, and per class of a client."""
        of_both = self.per_client_class()
        return {"per_class": self.per_class(), "per_client": self.per_client(), "per_client_class": of_both}

    def per_class(self) -> list[dict[str, Any]]:
        """Return a table with a row per class."""
        owners = self.split.counts[self.clients] > 0
        rows = []
        for c, train in enumerate(self.split.counts.sum(0).tolist()):
            row = {"class": c, "train": train, "test": int(self.test[c]), "clients": int(owners[:, c].sum())}
            if self.generic is not None:
                row["generic_acc"] = float(self.generic[c] / max(1, self.test[c]))
            if self.personal is not None:
                accuracies = self.personal[owners[:, c], OWNED, c] / max(1, self.test[c])
                row["personal_acc_owned"] = float(accuracies.mean()) if len(accuracies) else None
            rows.append(row)
        return rows

    def per_client(self) -> list[dict[str, Any]]:
        """Return a table with a row per client."""
        if self.personal is None:
            return []
        dist, owned, masked = self._dist(), self._owned(OWNED), self._owned(MASKED)
        return [
            {
                "client": int(k),
                "train": int(self.split.counts[k].sum()),
                "classes": int((self.split.counts[k] > 0).sum()),
                "test": int(self.matched[i].sum()),
                "acc_dist": None if math.isnan(dist[i]) else dist[i],
                "acc_owned": None if math.isnan(owned[i]) else owned[i],
                "acc_owned_masked": None if math.isnan(masked[i]) else masked[i],
            }
            for i, k in enumerate(self.clients)
        ]

    def per_client_class(self) -> list[dict[str, Any]]:
        """Return a table with a row for each class that a client owns, from which any mix of tests can be weighed."""
        if self.personal is None:
            return []
        rows = []
        for i, k in enumerate(self.clients.tolist()):
            for c in np.flatnonzero((self.split.counts[k] > 0) & (self.test > 0)).tolist():
                acc, masked = (float(self.personal[i, what, c] / self.test[c]) for what in (OWNED, MASKED))
                counts = {"train": int(self.split.counts[k, c]), "test": int(self.matched[i, c])}
                rows.append({"client": k, "class": c, **counts, "acc": acc, "acc_masked": masked})
        return rows

    def _dist(self, among: Sequence[int] | IntArray | slice = slice(None)) -> list[float]:
        """Return each client's accuracy on its own, distribution-matched test images of some classes."""
        assert self.personal is not None
        hits, totals = self.personal[:, MATCHED][:, among].sum(1), self.matched[:, among].sum(1)
        return list(rates_of(hits, totals).tolist())

    def _owned(self, what: int, among: Sequence[int] | IntArray | slice = slice(None)) -> list[float]:
        """Return each client's mean over its owned classes of the accuracy on all images of the class."""
        assert self.personal is not None
        there = self.test if what in ON_TEST else self.held_out
        owned = ((self.split.counts[self.clients] > 0) & (there > 0))[:, among]
        rates = rates_of(self.personal[:, what], np.broadcast_to(there, self.personal[:, what].shape))[:, among]
        return list(rates_of(np.where(owned, rates, 0.0).sum(1), owned.sum(1)).tolist())

    def metrics(self) -> dict[str, float]:
        """Return every metric that this evaluation defines."""
        found: dict[str, float | None] = {}
        if self.generic is not None:
            recalls = rates_of(self.generic, self.test)
            found["generic/acc"] = float(self.generic.sum() / self.test.sum())
            for name, members in self.groups.items():
                found[f"generic/acc_{name}"] = mean_of(
                    [rates_of(self.generic[members].sum(), self.test[members].sum()).item()]
                )
            found["generic/recall_tail"] = mean_of(recalls[self.groups["tail"]].tolist())
        if self.personal is not None:
            accuracies = self._dist()
            found["personal/acc_dist"] = mean_of(accuracies)
            found["personal/acc_owned"] = mean_of(self._owned(OWNED))
            found["personal/acc_owned_masked"] = mean_of(self._owned(MASKED))
            for name, members in self.groups.items():
                found[f"personal/acc_dist_{name}"] = mean_of(self._dist(members))
                found[f"personal/acc_owned_{name}"] = mean_of(self._owned(OWNED, members))
            worst = sorted(a for a in accuracies if not math.isnan(a))
            found["personal/acc_worst10"] = mean_of(worst[: math.ceil(len(worst) / 10)])
            if self.held_out.sum():
                own = rates_of(self.personal[:, HELD_MATCHED].sum(1), self.held_matched.sum(1))
                found["validation/acc_dist"] = mean_of(own.tolist())
                found["validation/acc_owned"] = mean_of(self._owned(HELD_OWNED))
                found["validation/acc_owned_masked"] = mean_of(self._owned(HELD_MASKED))
        return {k: v for k, v in found.items() if v is not None}
