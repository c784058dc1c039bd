"""Ray: join a cluster, or start one of our own on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.node import Node
from ray.tune.execution import class_cache
from rich.console import Console

import algorithms
import orchestrator
from orchestrator.resources import HEAD, Nodes, planned, with_those_to_come
from orchestrator.scratch import scratch
from orchestrator.signals import listen, postponed
from orchestrator.yaml_file import InputError

STARTS = 3  #: tries to start Ray
MACHINES_S = 180.0  #: how long a sweep waits for the machines of a cluster that was launched just now
HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")
#: Nobody asks our own Ray for its statistics; and small models travel in the answer itself, not by the object store.
SYSTEM = {
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    "max_direct_call_object_size": 2 << 20,
    "idle_worker_killing_time_threshold_ms": 60_000,
    "preload_python_modules": ["orchestrator.actors"],
}


@contextmanager
def cluster(options: argparse.Namespace, console: Console) -> Iterator[None]:
    """Join the given cluster, or start one of our own and leave nothing of it behind."""
    # Tune prints the traceback of every failed try; ours are in the trials' directories, and named at the end.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with ExitStack() as after:
        if options.address:
            after.callback(ray.shutdown)
            try:
                ray.init(address=options.address, **common)
            except ConnectionError as error:
                hint = "is it running, and does ~/.ray/auth_token hold the token of that cluster?"
                raise InputError([f"--address {options.address}: {error}; {hint}"]) from None
        else:
            folder = after.enter_context(scratch()) / "ray"  # Ray opens its own directory to everybody
            after.callback(ray.shutdown)
            with postponed():
                _start(options, folder, common, console)
        listen()
        token = Path.home() / ".ray" / "auth_token"
        if token.exists():
            token.chmod(0o600)  # Ray writes it as the umask has it
        if not options.quiet:
            console.print(_machine(), highlight=False)
        yield


def _start(options: argparse.Namespace, folder: Path, common: Mapping[str, Any], console: Console) -> None:
    """Start Ray on this machine; it gives up after half a minute, which is too early for one that is very busy."""
    for attempt in range(1, STARTS + 1):
        try:
            with _few_helpers(), _same_sources():
                ray.init(
                    address="local",
                    num_cpus=options.num_cpus,
                    num_gpus=options.num_gpus,
                    include_dashboard=False,
                    _temp_dir=str(folder),
                    _system_config=SYSTEM,
                    **common,
                )
            _plain_trials()
            return
        except Exception as error:
            ray.shutdown()
            if attempt == STARTS or "timed out" not in str(error):
                raise
            console.print("Ray did not come up in time (is the machine very busy?); trying again", highlight=False)


@contextmanager
def _few_helpers() -> Iterator[None]:
    """Start Ray without what only serves dashboards, autoscaling and logs on the driver: a second and 170 MB."""
    kept = {name: getattr(Node, name) for name in HELPERS if hasattr(Node, name)}
    try:
        for name in kept:
            setattr(Node, name, _not_started)
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


@contextmanager
def _same_sources() -> Iterator[None]:
    """Let the workers, who import our modules before they know of any job, find them where this process has."""
    here = [str(Path(str(module.__file__)).parents[1]) for module in (algorithms, orchestrator)]
    before = os.environ.get("PYTHONPATH", "")  # empty is as good as none
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*here, *filter(None, [before])]))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def _not_started(node: Node, **_: Any) -> None:
    node._webui_url = ""


def _plain_trials() -> None:
    """Let trials run in the workers that Ray has already started: Tune asks for new ones by variables of its own."""
    class_cache.DEFAULT_ENV_VARS.clear()
    os.environ.pop("RAY_CHDIR_TO_TRIAL_DIR", None)  # the workers have it from the raylet


def machines(here: str, console: Console) -> Nodes:
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
