"""From confusion matrices to the metrics of semantic segmentation; a void pixel counts nowhere.

Workers count, for every true class as the data set has it, what was predicted; the driver relabels the truth for each
client and divides. What crosses the wire are integers, so the result does not depend on who counted what.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from orchestrator.data import VOID, Split
from orchestrator.evaluate import Array, IntArray, mean_of, rates_of

if TYPE_CHECKING:
    from algorithms.base import Predictor
    from algorithms.params import Params
    from orchestrator.jobs import Job, Result
    from orchestrator.worker import Worker

BLOCK = 16  #: images per forward pass

#: Which images of a client were counted.
TEST, HELD_OUT = range(2)

# On the workers ------------------------------------------------------------------------------------------------------


def table(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Count the pixels of each true class by what was predicted, one of the classes or background."""
    known = truth != VOID
    pairs = truth[known].long() * (classes + 1) + predicted[known]
    return torch.bincount(pairs, minlength=classes * (classes + 1)).view(classes, classes + 1).cpu()


def compare(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Count what the generic model makes of a range of test images: of the classes alone, and with background."""
    (somebody,) = job.ids
    client = worker.client(somebody, job.part, job.memory, origin, 0)
    model = worker.parts[job.part].generic(client, *view)
    if model is None:
        return
    assert job.each is not None
    classes = worker.counts.shape[1] - 1
    total = torch.zeros(2, classes, classes + 1, dtype=torch.int64)
    for rows in _blocks(np.arange(*job.each[somebody])):
        with worker.predicting():
            logits = model(worker.images(worker.x_test, rows))
        for counts, shown in zip(total, (logits[:, :classes], logits), strict=True):
            counts += table(worker.y_test[rows].to(worker.device), shown.max(1).indices, classes)
    result.values[somebody] = total


def confuse(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Count what each client's own model makes of test and held-out images, [setting, which images, truth, prediction].

    Where all share one model, which was counted on the test images already, only held-out ones are left.
    """
    classes, settings = worker.counts.shape[1] - 1, (worker.parts[job.part], *job.also)
    models: dict[int, list[Predictor | None]] = {}
    for id in job.ids:
        client = worker.client(id, job.part, job.memory, origin, 0)
        models[id] = [getattr(setting, job.method)(client, *view) for setting in settings]
        result.values[id] = torch.zeros(len(settings), 2, classes, classes + 1, dtype=torch.int64)

    def count(which: int, rows: IntArray, ids: tuple[int, ...]) -> None:
        x, y = ((worker.x_test, worker.y_test), (worker.x_train, worker.y_train))[which]
        images, truth = worker.images(x, rows), y[rows].to(worker.device)
        with worker.predicting():
            for id in ids:
                for model, counts in zip(models[id], result.values[id], strict=True):
                    if model is not None:
                        counts[which] += table(truth, model(images).max(1).indices, classes)

    for rows in _blocks(np.arange(len(worker.y_test))) if job.method == "personal" else ():
        count(TEST, rows, job.ids)
    for id in job.ids:
        for rows in _blocks(worker.split.validation[id]):
            count(HELD_OUT, rows, (id,))


def segment(worker: Worker, job: Job, view: tuple[Any, ...], origin: Params, result: Result) -> None:
    """Return what models make of some test images, as maps of labels; the generic one's are without background."""
    assert job.each is not None
    for id in job.ids:
        client = worker.client(id, job.part, job.memory, origin, 0)
        model = getattr(worker.parts[job.part], job.method)(client, *view)
        if model is not None:
            with worker.predicting():
                logits = model(worker.images(worker.x_test, job.each[id]))
            shown = logits[:, :-1] if job.method == "generic" else logits
            result.values[id] = shown.max(1).indices.byte().cpu()


def _blocks(rows: IntArray) -> list[IntArray]:
    return np.split(rows, range(BLOCK, len(rows), BLOCK)) if len(rows) else []


# On the driver -------------------------------------------------------------------------------------------------------


class Confusion:
    """A confusion matrix [truth, prediction], and what is made of it; a class absent from the truth does not count."""

    def __init__(self, counts: IntArray) -> None:
        hits, truth = np.diagonal(counts), counts.sum(1)
        self.iou: Array = rates_of(hits, np.where(truth > 0, truth + counts.sum(0) - hits, 0))
        self.recall: Array = rates_of(hits, truth)
        self.acc = float(rates_of(hits.sum(), truth.sum()))

    def metrics(self) -> dict[str, float]:
        """Return mean intersection over union, mean recall, and the share of pixels that are right; NaN of nothing."""
        means = {"miou": mean_of(self.iou.tolist()), "macc": mean_of(self.recall.tolist())}
        return {name: _plain(mean) for name, mean in means.items()} | {"acc": self.acc}


class Scores:
    """All counts of one evaluation: of the generic model on the labels as they are, of each client's on its own."""

    def __init__(
        self,
        split: Split,
        y_test: npt.NDArray[np.integer[Any]],
        generic: IntArray | None = None,
        personal: IntArray | None = None,
    ) -> None:
        """Take counts of the generic model [truth, prediction] and of clients [client, which images, the same]."""
        self.split, self.y_test = split, y_test
        self.clients = np.flatnonzero(split.counts.sum(1) > 0)
        self.generic = None if generic is None else Confusion(generic)
        self.own: list[list[Confusion]] = []
        for k, of in zip(self.clients, [] if personal is None else personal, strict=False):
            self.own.append([Confusion(self._relabelled(int(k), counts)) for counts in of])

    @cached_property
    def test(self) -> IntArray:
        """How many test pixels each true class has."""
        # Image by image and only where tables are made: to be counted, a byte is copied into eight.
        counts = sum((np.bincount(y.ravel(), minlength=VOID + 1) for y in self.y_test), np.zeros(VOID + 1, np.int64))
        return counts[: self.split.counts.shape[1] - 1]

    def _relabelled(self, client: int, counts: IntArray) -> IntArray:
        """Return a square matrix whose truth is as the client knows it."""
        known = np.zeros((counts.shape[1], counts.shape[1]), np.int64)
        np.add.at(known, self.split.relabelling(client)[: len(counts)], counts)
        return known

    def metrics(self) -> dict[str, float]:
        """Return every metric that this evaluation defines."""
        found: dict[str, float] = {}
        if self.generic is not None:
            found |= {f"generic/{name}": value for name, value in self.generic.metrics().items()}
        for kind, which in (("personal", TEST), ("validation", HELD_OUT)) if self.own else ():
            each = [own[which].metrics() for own in self.own]
            found |= {f"{kind}/{name}": _plain(mean_of(m[name] for m in each)) for name in each[0]}
        worst = sorted(miou for own in self.own if not math.isnan(miou := own[TEST].metrics()["miou"]))
        found["personal/miou_worst10"] = _plain(mean_of(worst[: math.ceil(len(worst) / 10)]))
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return what is told per class and per client."""
        return {"per_class": self.per_class(), "per_client": self.per_client()}

    def per_class(self) -> list[dict[str, Any]]:
        """Return a table with a row per class, the background last; a class is personal to those who know it."""
        rows, background = list[dict[str, Any]](), len(self.test)
        knows = np.zeros((len(self.clients), background + 1), bool)
        for known, k in zip(knows, self.clients, strict=True):
            known[[*self.split.foreground[k], background]] = True
        for c, train in enumerate(self.split.counts.sum(0).tolist()):
            there, row = c < background, {"class": c, "train": train, "clients": int(knows[:, c].sum())}
            row |= {"test": int(self.test[c]) if there else None}
            for name in ("iou", "recall"):
                if self.generic is not None:
                    row[f"generic_{name}"] = _number(getattr(self.generic, name)[c]) if there else None
                if self.own:
                    mine = [own[TEST] for own, known in zip(self.own, knows[:, c], strict=True) if known]
                    row[f"personal_{name}"] = mean_of(float(getattr(own, name)[c]) for own in mine)
            rows.append(row)
        return rows

    def per_client(self) -> list[dict[str, Any]]:
        """Return a table with a row per client."""
        return [
            {
                "client": int(k),
                "train": len(self.split.train[k]),
                "classes": self.split.foreground.shape[1],
                "test": len(self.y_test),
                **{name: _number(value) for name, value in own[TEST].metrics().items()},
            }
            for k, own in zip(self.clients, self.own, strict=False)
        ]


def _plain(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
