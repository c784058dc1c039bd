"""What a driver's models are worth at the moment, and the pictures that belong to its method."""

from __future__ import annotations

import heapq
import math
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from algorithms.base import Algorithm, Model, State
from algorithms.portraits import Sitting, portraits
from orchestrator import segmentation
from orchestrator.cohort import cut
from orchestrator.evaluate import Scores
from orchestrator.jobs import Job
from orchestrator.values import CPU, place

if TYPE_CHECKING:
    from orchestrator.driver import Driver


RANGE = 4 * segmentation.BLOCK  #: test images of one job where pixels are counted
MOST_TOGETHER = 256  #: clients whose memory is sent in one message
SHOWN_IMAGES, SHOWN_CLIENTS = 3, 2  #: of segmentation, in a picture


class Scored(Protocol):
    """All counts of one evaluation."""

    def metrics(self) -> dict[str, float]:
        """Return every metric that this evaluation defines."""

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return what is told per class and per client."""


def score(driver: Driver, also: tuple[Algorithm, ...] = ()) -> Sequence[Scored]:
    """Score the generic model on the whole test and every client's own model on what it knows.

    Where only the clients' own predictions differ between settings of the algorithm, those given are scored too.
    """
    algorithm = driver.parts[driver.part]
    view = place(algorithm.view(driver.server), CPU)
    one_for_all = type(algorithm).personal is Algorithm.personal
    if one_for_all or type(algorithm).generic is not Algorithm.generic:
        also = ()
    by_task = {"classification": _of_images, "segmentation": _of_pixels}
    return by_task[driver.experiment.task](driver, view, one_for_all, also)


def _of_images(driver: Driver, view: Any, one_for_all: bool, also: tuple[Algorithm, ...]) -> Sequence[Scored]:
    what, somebody, blocks = driver.experiment.evaluate.what, driver.selectable[0], driver.tests.blocks
    logits, generic, personal = None, None, None
    if "generic" in what or one_for_all:
        ranges = [(part[0], part[-1] + 1) for part in cut(range(len(blocks)))]
        job = Job("predict", driver.part, "generic", (somebody,), memory=driver.remembered([somebody]))
        jobs = [replace(job, each={somebody: r}) for r in ranges]
        parts = [r.values.get(somebody) for r in driver.engine.run(jobs, driver.engine.put(view), driver.placed_origin)]
        logits = None if any(p is None for p in parts) else torch.cat(parts)  # type: ignore[arg-type]
    if logits is not None and "generic" in what:
        labels = torch.from_numpy(driver.dataset.y_test[driver.tests.order])
        hits = labels[logits.argmax(1) == labels]
        generic = torch.bincount(hits, minlength=driver.dataset.classes).numpy()
    if "personal" in what:
        shared = one_for_all and logits is not None
        method = "shared" if shared else "personal"
        jobs = [
            Job("count", driver.part, method, part, memory=driver.remembered(part), also=also)
            for part in _shares(driver)
        ]
        results = driver.engine.run(jobs, driver.engine.put((logits, *view) if shared else view), driver.placed_origin)
        hits_of = {id: hits for result in results for id, hits in result.values.items()}
        personal = torch.stack([hits_of[id] for id in driver.selectable], dim=1).numpy()
    return [
        Scores(
            driver.split,
            driver.dataset.y_train,
            driver.dataset.y_test,
            generic,
            None if personal is None else personal[i],
        )
        for i in range(1 + len(also))
    ]


def _of_pixels(driver: Driver, view: Any, one_for_all: bool, also: tuple[Algorithm, ...]) -> Sequence[Scored]:
    what, somebody, shared = driver.experiment.evaluate.what, driver.selectable[0], driver.engine.put(view)
    counts, personal, images = None, None, len(driver.dataset.y_test)
    if "generic" in what or one_for_all:
        ranges = [(start, min(start + RANGE, images)) for start in range(0, images, RANGE)]
        job = Job("compare", driver.part, "generic", (somebody,), memory=driver.remembered([somebody]))
        jobs = [replace(job, each={somebody: r}) for r in ranges]
        parts = [r.values.get(somebody) for r in driver.engine.run(jobs, shared, driver.placed_origin)]
        counts = None if any(p is None for p in parts) else torch.stack(parts).sum(0).numpy()  # type: ignore[arg-type]
    if "personal" in what:
        method = "generic" if one_for_all else "personal"
        jobs = [
            Job("confuse", driver.part, method, part, memory=driver.remembered(part), also=also)
            for part in _shares(driver)
        ]
        results = driver.engine.run(jobs, shared, driver.placed_origin)
        found = {id: counted for result in results for id, counted in result.values.items()}
        personal = torch.stack([found[id] for id in driver.selectable], dim=1).numpy()
        if one_for_all and counts is not None:
            personal[:, :, segmentation.TEST] = counts[1]
    generic = None if counts is None or "generic" not in what else counts[0, :, :-1]
    return [
        segmentation.Scores(driver.split, driver.dataset.y_test, generic, None if personal is None else personal[i])
        for i in range(1 + len(also))
    ]


def _shares(driver: Driver) -> list[tuple[int, ...]]:
    """Deal the clients to as many jobs as there are actors: within a job, those who share a body share its features.

    What comes back are whole numbers, so who counts what changes nothing.
    """
    work = {id: int((driver.split.counts[id] > 0).sum()) for id in driver.selectable}
    jobs = max(driver.engine.size, math.ceil(len(work) / MOST_TOGETHER))
    shares: list[list[int]] = [[] for _ in range(min(jobs, len(work)))]
    load = [(0, place) for place in range(len(shares))]
    for id in sorted(work, key=lambda id: -work[id]):
        so_far, place = heapq.heappop(load)
        shares[place].append(id)
        heapq.heappush(load, (so_far + work[id], place))
    return [tuple(sorted(share)) for share in shares]


def portraits_of(driver: Driver, algorithm: Algorithm) -> dict[str, Any]:
    """Return the pictures that belong to the method that is done; a run never fails for want of one."""
    sitting = Sitting(
        driver.server,
        {id: State(fields) for id, fields in driver.memory.items()},
        driver.origin,
        torch.from_numpy(driver.split.counts),
        partial(_moments, driver),
    )
    try:
        return {name: picture.to_json() for name, picture in portraits(algorithm, sitting).items()}
    except Exception:
        return {"error": traceback.format_exc()}


def examples_of(driver: Driver) -> dict[str, Any]:
    """Return some test images, their labels and what is predicted, by the shared model and by some clients' own.

    A run never fails for want of them.
    """
    algorithm, dataset, chosen = driver.parts[driver.part], driver.dataset, driver.selectable
    rows = np.linspace(0, len(dataset.y_test) - 1, SHOWN_IMAGES + 2)[1:-1].astype(np.int64)
    clients = sorted({chosen[len(chosen) * i // SHOWN_CLIENTS] for i in range(SHOWN_CLIENTS)})
    truth = dataset.y_test[rows]
    try:
        shown = {"images": dataset.x_test[rows], "truth": truth, "names": np.array(dataset.names), "clients": clients}
        view = driver.engine.put(place(algorithm.view(driver.server), CPU))
        for method, ids in (("generic", chosen[:1]), ("personal", clients)):
            memory, each = driver.remembered(ids), dict.fromkeys(ids, rows)
            job = Job("segment", driver.part, method, tuple(ids), memory=memory, each=each)
            (result,) = driver.engine.run([job], view, driver.placed_origin)
            if result.values:
                shown[method] = torch.stack([result.values[id] for id in ids]).numpy()
        return shown | {"known": np.stack([driver.split.relabelling(id)[truth] for id in clients])}
    except Exception:
        return {}


def _moments(driver: Driver, w: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of every class's features [classes, d] under a body; NaN for a class nobody has."""
    jobs = [Job("moments", driver.part, "", part) for part in cut(driver.selectable)]
    results = driver.engine.run(jobs, driver.engine.put((place(w, CPU),)), driver.placed_origin)
    total = sum(value for result in results for value in result.values.values())
    n, first, second = total.split([1, *[(total.shape[1] - 1) // 2] * 2], dim=1)  # type: ignore[union-attr]
    mean = first / n
    return mean, (second / n - mean**2).clamp_min(0)
