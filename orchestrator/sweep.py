"""Ray and Ray Tune: start or join a cluster, and run the trials that are left to run."""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from rich.console import Console

from orchestrator.checkpoint import set_status, status_of
from orchestrator.data import Dataset
from orchestrator.experiment import InputError, Search
from orchestrator.resources import HEAD, Nodes, concurrency, planned, share, with_those_to_come
from orchestrator.signals import interruptible, listen
from orchestrator.space import Trial as Point
from orchestrator.tracking import Mirror
from orchestrator.trial import Trial
from orchestrator.view import View

MACHINES_S = 180.0  #: how long a sweep waits for the machines of a cluster that was launched just now


def run_sweep(
    folder: Path,
    points: Sequence[Point],
    search: Search,
    datasets: Mapping[str, Dataset],
    mirror: Mirror,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Run every trial that has not ended yet."""
    left = [p for p in points if status_of(folder / "trials" / p.id)["status"] not in ("FINISHED", "STOPPED")]
    if not left:
        return
    with _cluster(options, console):
        here = ray.util.get_node_ip_address()
        nodes = _machines(here, console) if options.address else [node["Resources"] for node in ray.nodes()]
        at_a_time = concurrency([p.experiment for p in left], search.concurrent, nodes)
        shares = {p.id: share(p.experiment, nodes, at_a_time, here) for p in left}
        trainable = tune.with_parameters(
            Trial, directory=str(folder), datasets={k: ray.put(d) for k, d in datasets.items()}, shares=shares
        )
        trainable = tune.with_resources(
            trainable,
            lambda config: tune.PlacementGroupFactory(shares[config["trial"]].bundles(), strategy="SPREAD"),
        )
        rounds = {p.id: (p.name, _rounds(p)) for p in points}
        with View(folder, rounds, console, options.quiet) as view, interruptible():
            tune.Tuner(
                trainable,
                param_space={"trial": tune.grid_search([p.id for p in left])},
                tune_config=tune.TuneConfig(
                    metric=search.metric,
                    mode=search.mode,
                    scheduler=_scheduler(search, left),
                    max_concurrent_trials=at_a_time,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: trial.config["trial"],
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(folder),
                    callbacks=[Reporter(folder, mirror, view)],
                    failure_config=tune.FailureConfig(max_failures=1),
                    verbose=0,
                ),
            ).fit()


class Reporter(tune.Callback):  # type: ignore[misc]
    """Passes on what Tune says of the trials' lives."""

    def __init__(self, folder: Path, mirror: Mirror, view: View) -> None:
        self.folder, self.mirror, self.view = folder, mirror, view

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks to restore a sweep; ours is restored from its directory instead."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial begins, or begins again."""
        id = trial.config["trial"]
        self.mirror.watch(id)
        self.view.status(id, "running")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial is done, or was stopped early by the scheduler."""
        self._end(trial, "STOPPED")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed for good."""
        self._end(trial, "FAILED")

    def _end(self, trial: Any, otherwise: str) -> None:
        id = trial.config["trial"]
        path = self.folder / "trials" / id
        if status_of(path)["status"] in ("RUNNING", "WAITING"):
            error = None
            if otherwise == "FAILED":
                error = getattr(trial, "get_error", lambda: None)() or "the driver of the trial died"
            set_status(path, otherwise, error=None if error is None else str(error))
        self.mirror.finish(id)
        self.view.status(id, status_of(path)["status"].lower())


def _rounds(point: Point) -> int:
    return sum(point.experiment.rounds if p.rounds is None else p.rounds for _, p in point.experiment.chain().phases())


def _scheduler(search: Search, points: Sequence[Point]) -> TrialScheduler:
    if search.scheduler == "asha":
        longest = max(p.experiment.rounds for p in points)
        return ASHAScheduler(time_attr="round", max_t=longest + 1, grace_period=max(1, longest // 8))
    return FIFOScheduler()


@contextmanager
def _cluster(options: argparse.Namespace, console: Console) -> Iterator[None]:
    """Join the given cluster, or start one of our own and leave nothing of it behind."""
    # Tune prints the traceback of every failed try; ours are in the trials' directories, and named at the end.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    temporary = None
    if options.address:
        try:
            ray.init(address=options.address, **common)
        except ConnectionError as error:
            hint = "is it running, and does ~/.ray/auth_token hold the token of that cluster?"
            raise InputError([f"--address {options.address}: {error}; {hint}"]) from None
    else:
        temporary = tempfile.mkdtemp(prefix="fedtail-")
        ray.init(
            address="local",
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            include_dashboard=False,
            _temp_dir=temporary,
            **common,
        )
    listen()
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        token.chmod(0o600)  # Ray writes it as the umask has it
    try:
        if not options.quiet:
            console.print(_machine(), highlight=False)
        yield
    finally:
        ray.shutdown()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _machines(here: str, console: Console) -> Nodes:
    """Return what each machine of a cluster has: wait for all that it is to have, and count those that it may start."""
    least, most = planned()
    deadline, told = time.monotonic() + MACHINES_S, 0
    while True:
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(HEAD in node and f"node:{here}" in node for node in alive):
            return alive  # the plan found here is not this cluster's
        if len(alive) > least or time.monotonic() > deadline:
            return with_those_to_come(alive, most)
        if len(alive) != told:
            told = len(alive)
            console.print(f"{told} of {1 + least} machines are there; waiting for the others", highlight=False)
        time.sleep(1.0)


def _machine() -> str:
    """Say in one line what was found."""
    have = ray.cluster_resources()
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return (
        f"torch {torch.__version__} ({cuda}, {torch.cuda.device_count()} CUDA device(s) here), ray {ray.__version__}: "
        f"{have.get('CPU', 0):g} CPU, {have.get('GPU', 0):g} GPU, {len(ray.nodes())} machine(s)"
    )
