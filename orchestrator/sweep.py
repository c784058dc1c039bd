"""Ray Tune: run the trials that are left to run."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache as remember
from pathlib import Path
from typing import Any

import ray
from ray import tune
from rich.console import Console

from orchestrator.checkpoint import CheckpointError, set_status, status_of
from orchestrator.folder import ENDED, create, scored
from orchestrator.machines import cluster, machines
from orchestrator.plan import plan
from orchestrator.prefixes import Cache, Prefix, prefixes
from orchestrator.preflight import Checked
from orchestrator.resources import Share, concurrency, share
from orchestrator.schedulers import SCHEDULERS
from orchestrator.search import Feeder, Proposer, seeds
from orchestrator.signals import heed, postponed
from orchestrator.space import Trial as Point
from orchestrator.space import leaves, tune_domain, varied
from orchestrator.sweep_file import Sweep
from orchestrator.tracking import Mirror
from orchestrator.trial import Trial
from orchestrator.view import View
from orchestrator.yaml_file import Open


def run_sweep(
    folder: Path,
    points: Sequence[Point],
    examples: Sequence[Point],
    sweep: Sweep,
    checked: Checked,
    mirror: Mirror,
    options: argparse.Namespace,
    console: Console,
) -> bool:
    """Run every trial that has not ended yet; return whether the time budget ended it before."""
    search, optuna = sweep.search, sweep.search.searcher == "optuna"
    left = [p for p in points if status_of(folder / "trials" / p.id)["status"] not in ENDED]
    if not left and not optuna:
        return False
    in_turns = search.scheduler[0] in ("hyperband", "pbt")
    shared = None if options.no_share or search.scheduler[0] == "pbt" else Cache(folder.parent / ".prefixes")
    with cluster(options, console):
        here = ray.util.get_node_ip_address()
        nodes = machines(here, console) if options.address else [node["Resources"] for node in ray.nodes()]
        wanted = examples if optuna else left
        at_a_time = concurrency([p.experiment for p in wanted], search.concurrent, nodes, checked.gpu_share)

        def assign(point: Point, concurrent: int) -> dict[str, Any]:
            own = {path: value for path, value in point.params.items() if varied(path)}
            got = asdict(share(point.experiment, nodes, concurrent, here, checked.gpu_share))
            return {"job": {"trial": point.id, "share": got, "values": own, "alike": []}}

        @remember
        def beginnings(id: str) -> list[Prefix]:
            e = by_id[id].experiment
            device = "cuda" if share(e, nodes, at_a_time, here, checked.gpu_share).gpu else "cpu"
            return prefixes(e, checked.dataset(e).digest, device)

        by_id = {p.id: p for p in points}
        if shared and not optuna and search.concurrent is None:
            trained = {beginnings(p.id)[-1].key for p in left}
            at_a_time = min(at_a_time, len(trained))  # whoever only predicts otherwise needs no actors
        for point in wanted:
            assign(point, at_a_time)  # refuses now what can never be placed
        with View(folder, {p.id: (p.name, len(plan(p.experiment))) for p in points}, console, options.quiet) as view:

            def begin(point: Point) -> None:
                """Make the directory of a trial that was proposed just now."""
                checked.check(point)
                create(folder, point, checked.dataset(point.experiment), checked.partition(point.experiment))
                by_id[point.id] = point
                view.add(point.id, point.name, len(plan(point.experiment)))

            feeding: dict[str, Any] = {
                "at_a_time": at_a_time,
                "assign": assign,
                "cache": shared,
                "prefixes": lambda point: beginnings(point.id),
                "ended": lambda point: status_of(folder / "trials" / point.id)["status"] in ENDED,
            }
            if optuna:
                feeder: Feeder | None = Proposer(sweep, points, begin, lambda p: scored(folder, search, p), **feeding)
                count = search.samples * len(seeds(sweep)) - sum(p not in left for p in points)
            else:
                feeder, count = None if in_turns else Feeder(left, **feeding), len(left)
            if count <= 0:
                return False
            placed = {k: ray.put(d) for k, d in checked.datasets.items()}
            checked.datasets |= {k: ray.get(reference) for k, reference in placed.items()}  # the copy that all share
            trainable = tune.with_parameters(
                Trial,
                directory=str(folder),
                datasets=placed,
                cache=None if shared is None else str(shared.folder),
                goal=(search.metric, search.mode),
            )
            trainable = tune.with_resources(
                trainable,
                lambda config: tune.PlacementGroupFactory(Share(**config["job"]["share"]).bundles(), strategy="SPREAD"),
            )
            reporter = Reporter(folder, mirror, view, search.budget)
            with postponed(), reporter.drawing:
                tune.Tuner(
                    trainable,
                    param_space=None
                    if feeder
                    else {"job": tune.grid_search([assign(p, at_a_time)["job"] for p in left])},
                    tune_config=tune.TuneConfig(
                        metric=search.metric,
                        mode=search.mode,
                        search_alg=feeder,
                        num_samples=count if feeder else 1,
                        scheduler=_scheduler(sweep, wanted),
                        time_budget_s=search.budget,
                        reuse_actors=True,
                        trial_dirname_creator=lambda trial: trial.config["job"]["trial"],
                    ),
                    run_config=tune.RunConfig(
                        name="tune",
                        storage_path=str(folder),
                        callbacks=[reporter],
                        failure_config=tune.FailureConfig(max_failures=1),
                        verbose=0,
                    ),
                ).fit()
            if reporter.unwritten is not None:
                raise reporter.unwritten
            return reporter.out_of_time


class Reporter(tune.Callback):  # type: ignore[misc]
    """Passes on what Tune says of the trials' lives."""

    def __init__(self, folder: Path, mirror: Mirror, view: View, budget: float | None) -> None:
        self.folder, self.mirror, self.view = folder, mirror, view
        self.drawing = ThreadPoolExecutor(1, "pictures")  # beside Tune's loop, which must not wait for it
        self.deadline = None if budget is None else time.monotonic() + budget
        self.unwritten: CheckpointError | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks to restore a sweep; ours is restored from its directory instead."""
        return {}

    @property
    def out_of_time(self) -> bool:
        """Whether the sweep's time is used up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tune looks around."""
        heed()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial begins, or begins again."""
        id = trial.config["job"]["trial"]
        self.mirror.watch(id)
        self.view.status(id, "running")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial is done, or was stopped early by the scheduler, or because time is up."""
        self._end(trial, "KILLED" if self.out_of_time else "STOPPED")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed for good."""
        self._end(trial, "FAILED")

    def _end(self, trial: Any, otherwise: str) -> None:
        id = trial.config["job"]["trial"]
        path = self.folder / "trials" / id
        if status_of(path)["status"] in ("RUNNING", "WAITING"):
            error = None
            if otherwise == "FAILED":
                reason = getattr(trial, "get_error", lambda: None)()
                error = f"the driver of the trial died: {reason or 'nobody knows why'}"
            try:
                set_status(path, otherwise, error=error)
            except CheckpointError as full:  # told when Tune is done: it would answer with its own traceback
                self.unwritten = full
        for each in (id, *trial.config["job"]["alike"]):
            status = status_of(self.folder / "trials" / each)["status"]
            if each == id or status in ENDED:
                self.drawing.submit(self._show, each)
                self.view.status(each, status.lower())

    def _show(self, id: str) -> None:
        """Draw the pictures of a trial that has ended, then let MLflow have all of it."""
        from orchestrator.pictures.run import draw

        with suppress(Exception):  # the report says what could not be drawn
            draw(self.folder / "trials" / id)
        self.mirror.finish(id)


def _scheduler(sweep: Sweep, points: Sequence[Point]) -> Any:
    """Return Tune's scheduler, whose clock are the rounds of the first phase, where alone trials are stopped."""
    name, numbers = sweep.search.scheduler
    extra: dict[str, Any] = {}
    if name == "pbt":
        random.seed(0)
        opened = {path: leaf for path, leaf in leaves(sweep).items() if varied(path) and leaf.kind != "sample"}
        extra = {
            "mutations": {"job": {"values": {path: _variations(leaf) for path, leaf in opened.items()}}},
            "explore": lambda config: {"job": config["job"] | {"values": _within(config["job"]["values"], opened)}},
        }
    return SCHEDULERS[name](**numbers).make([p.experiment.rounds for p in points], **extra)


def _variations(leaf: Open) -> Any:
    """Return what population based training draws from: a list, in which it moves to a neighbour, or a domain."""
    return list(leaf.values) if leaf.kind in ("grid", "choice") else tune_domain(leaf)


def _within(values: Mapping[str, Any], opened: Mapping[str, Open]) -> dict[str, Any]:
    """Bring varied values back into their ranges."""
    found = {}
    for path, leaf in opened.items():
        value = values[path]
        if leaf.kind not in ("grid", "choice"):
            low, high, step = (*leaf.values, None)[:3]
            high = high - 1 if leaf.kind == "randint" else high
            value = min(max(value, low), high)
            value = round(value) if leaf.kind == "randint" else round(value / step) * step if step else value
        found[path] = value
    return found
