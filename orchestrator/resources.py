"""What a trial asks of the cluster, computed from its experiment and refused up front when it can never be had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.cohort import JOBS
from orchestrator.experiment import Experiment
from orchestrator.yaml_file import InputError

Nodes = Sequence[Mapping[str, float]]  # the resources of each machine
Needs = Callable[[Experiment], float]  # the share of a GPU without which an actor of a trial finds too little memory
HEAD = "node:__internal_head__"  #: what only the head of a cluster has
PLAN = Path("~/ray_bootstrap_config.yaml").expanduser()  #: where `ray up` leaves the cluster's description on its head


@dataclass(frozen=True)
class Share:
    """What one trial gets of the cluster."""

    actors: int
    cpu: float
    gpu: float
    driver_gpu: float
    node: str  #: the address of the machine that holds the run directories: drivers stay there

    def bundles(self) -> list[dict[str, float]]:
        """Return the driver's bundle and one for each client actor."""
        driver = {f"node:{self.node}": 0.001, "GPU": self.driver_gpu}
        actor = {"CPU": self.cpu, "GPU": self.gpu}
        return [{k: v for k, v in bundle.items() if v} for bundle in (driver, *[actor] * self.actors)]


def planned(path: Path = PLAN) -> tuple[int, list[dict[str, float]]]:
    """Return how many workers a cluster is to have at least, and the resources of each that it may ever have."""
    if not path.is_file():
        return 0, []
    plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    kinds = plan["available_node_types"].values()
    # Machines of one's own say only once they are there what they have.
    most = [kind["resources"] for kind in kinds if kind["resources"] for _ in range(kind["max_workers"])]
    return sum(kind["min_workers"] for kind in kinds), most[: plan["max_workers"]]


def with_those_to_come(alive: Nodes, planned: Nodes) -> Nodes:
    """Return the machines that are there, and those that the cluster starts when they are asked for."""
    to_come = list(planned)
    for node in alive:
        alike = (n for n in to_come if all(n.get(kind, 0.0) == node.get(kind, 0.0) for kind in ("CPU", "GPU")))
        if HEAD not in node and (found := next(alike, None)) is not None:
            to_come.remove(found)
    return [*alive, *to_come]


def least_share(bytes: float, gpu_memory: float) -> float:
    """Return the share of a GPU that has so much memory, one that whole actors fill up; all of it if none is enough."""
    return 1 / max(1, int(gpu_memory / bytes)) if bytes else 0.0


def nothing(_: Experiment) -> float:
    """Need no memory of a GPU."""
    return 0.0


def concurrency(experiments: Sequence[Experiment], wanted: int | None, nodes: Nodes, needs: Needs = nothing) -> int:
    """Return how many trials run at a time: as asked, or as many as there is room for."""
    most = min(int(_slots(e, nodes, needs) / _fixed_actors(e)) for e in experiments)
    return max(1, min(len(experiments), most if wanted is None else wanted))


def _slots(experiment: Experiment, nodes: Nodes, needs: Needs) -> float:
    """Return how many actors of a trial the cluster has room for."""
    asked, slots = experiment.cluster.gpu_per_actor, sum(n.get("CPU", 0.0) for n in nodes)
    slots /= experiment.cluster.cpu_per_actor
    gpus = [n.get("GPU", 0.0) for n in nodes]
    each = asked if asked != "auto" else needs(experiment) if any(gpus) else 0.0
    return min(slots, sum(int(gpu / each + 1e-9) for gpu in gpus)) if each else slots


def _fixed_actors(experiment: Experiment) -> int:
    """Return how many actors a trial insists on; an automatic number can always be one."""
    asked = experiment.cluster.actors
    return experiment.data.clients if asked == "per_client" else 1 if asked == "auto" else asked


def share(experiment: Experiment, nodes: Nodes, concurrent: int, node: str, needs: Needs = nothing) -> Share:
    """Return a trial's share; raise an InputError that compares requested with available if it cannot fit."""
    cluster = experiment.cluster
    cpus, gpus = (sum(n.get(kind, 0.0) for n in nodes) for kind in ("CPU", "GPU"))
    actors = _fixed_actors(experiment)
    if cluster.actors == "auto":
        slots = int(_slots(experiment, nodes, needs) / concurrent)
        actors = max(1, min(experiment.clients_per_round, JOBS, slots))
    if cluster.gpu_per_actor != "auto":
        gpu = cluster.gpu_per_actor
    else:
        left = gpus - concurrent * cluster.driver_gpu
        gpu = max(needs(experiment), 1 / math.ceil(actors * concurrent / left)) if left > 0 else 0.0
    wanted = Share(actors, cluster.cpu_per_actor, gpu, cluster.driver_gpu, node)
    if not _fits(wanted.bundles(), nodes):
        driver = f" and {wanted.driver_gpu:g} GPU for its driver" if wanted.driver_gpu else ""
        text = (
            f"cluster: one trial asks for {actors} client actors with {wanted.cpu:g} CPU and {gpu:g} GPU each{driver}, "
            f"but the cluster has {cpus:g} CPU and {gpus:g} GPU on {len(nodes)} machine(s); lower cluster.actors (one "
            "actor serves many clients), cluster.cpu_per_actor or cluster.gpu_per_actor"
        )
        raise InputError([text])
    return wanted


def _fits(bundles: Sequence[Mapping[str, float]], nodes: Nodes) -> bool:
    """Tell whether all bundles can be placed, each whole on one machine."""
    free = [dict(node) for node in nodes]
    for bundle in bundles:
        room = (n for n in free if all(n.get(kind, 0.0) + 1e-9 >= amount for kind, amount in bundle.items()))
        node = next(room, None)
        if node is None:
            return False
        for kind, amount in bundle.items():
            node[kind] -= amount
    return True
