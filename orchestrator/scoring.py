"""What a driver's models are worth at the moment, and the pictures that belong to its method."""

from __future__ import annotations

import heapq
import math
import traceback
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from algorithms.base import Algorithm, Model, State
from algorithms.portraits import Sitting, portraits
from orchestrator.cohort import cut
from orchestrator.evaluate import Scores
from orchestrator.jobs import Job
from orchestrator.values import CPU, place

if TYPE_CHECKING:
    from orchestrator.driver import Driver


MOST_TOGETHER = 256  #: clients whose memory is sent in one message


def score(driver: Driver, also: tuple[Algorithm, ...] = ()) -> list[Scores]:
    """Score the generic model on the balanced test and every client's own model on its classes.

    Where only the clients' own predictions differ between settings of the algorithm, those given are scored too.
    """
    algorithm, what = driver.parts[driver.part], driver.experiment.evaluate.what
    view = place(algorithm.view(driver.server), CPU)
    somebody, blocks = driver.selectable[0], driver.tests.blocks
    one_for_all = type(algorithm).personal is Algorithm.personal
    if one_for_all or type(algorithm).generic is not Algorithm.generic:
        also = ()
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


def _moments(driver: Driver, w: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of every class's features [classes, d] under a body; NaN for a class nobody has."""
    jobs = [Job("moments", driver.part, "", part) for part in cut(driver.selectable)]
    results = driver.engine.run(jobs, driver.engine.put((place(w, CPU),)), driver.placed_origin)
    total = sum(value for result in results for value in result.values.values())
    n, first, second = total.split([1, *[(total.shape[1] - 1) // 2] * 2], dim=1)  # type: ignore[union-attr]
    mean = first / n
    return mean, (second / n - mean**2).clamp_min(0)
