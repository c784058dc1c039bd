"""What a round costs beyond training, fitted and checked: `python benchmarks/cost_model.py` writes cost_model.json.

beyond = fixed + message M + put b + fold U, and for machines other than the driver's + fetch m b + send U, where M are
a round's messages, b the model's megabytes, U the megabytes of all answers (b of a client alone, 2 b of a sum, which is
in double precision), and m the machines that fetch the model. Fitted to networks of several sizes on one raylet and on
two, checked on sizes, numbers of clients and of raylets in between that the fit has not seen. Training itself
(`time/clients`), with what an actor adds up before it answers, is what the actors measure, divided by their number.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from orchestrator.actors import Pool, keep_memory
from orchestrator.data import load
from orchestrator.driver import Driver, split_for
from orchestrator.experiment import Experiment

STORE = 3 * 10**9  #: bytes of shared memory of each raylet
ROUNDS = 7  #: measured after two that warm up
TERMS = ("fixed", "message", "put", "fold", "fetch", "send")
FITTED = [(n, width, s) for n, width, s in itertools.product((1, 2), (16, 40, 64), (6, 24))]
CHECKED = [(1, 52, 12), (2, 28, 16), (2, 52, 12), (3, 40, 12), (3, 64, 18)]


def measure(raylets: int, width: int, clients: int) -> dict[str, Any]:
    """Run rounds of a ResNet-18 of some width with next to no training; of several raylets the driver has its own."""
    experiment = Experiment.model_validate(
        {
            "data": {"name": "digits", "clients": clients, "alpha": 100, "imbalance": 100},
            "model": {"name": "resnet18", "width": width},
            "local": {"lr": 0.01, "momentum": 0.9, "batch": 4096, "augment": "none"},
            "rounds": ROUNDS + 3,
            "clients_per_round": clients,
            "evaluate": {"every": 10**6},
            "algorithm": "fedavg",
        }
    )
    with tempfile.TemporaryDirectory(prefix="fedtail-", ignore_cleanup_errors=True) as folder:
        # Ray's clusters for tests have stores of 150 MB: what does not fit waits for two seconds.
        store: dict[str, Any] = {"object_store_memory": STORE}
        head = {"num_cpus": 2 if raylets == 1 else 0, "include_dashboard": False, "temp_dir": folder} | store
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(raylets - 1):
                cluster.add_node(num_cpus=2 / (raylets - 1), **store)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            dataset = load("digits")
            split = split_for(experiment, dataset)
            pool = Pool(actors=2, cpu=1.0, gpu=0.0)
            pool.load(experiment, ray.put(dataset), split)
            driver = Driver(experiment, dataset, split, pool)
            lines = [driver.advance()["metrics"] for _ in range(ROUNDS + 2)][2:]
            megabytes = driver.origin.flat.numel() * 4 / 1e6
            waiting, messages = [range(clients)], []
            while waiting:
                messages.append(pool._next(waiting, [1] * clients))
            pool.close()
        finally:
            ray.shutdown()
            cluster.shutdown()
    beyond = [line["time/train"] - line["time/clients"] for line in lines]
    answers = sum(min(2, len(some)) for some in messages) * megabytes
    return {
        "raylets": raylets,
        "megabytes": megabytes,
        "clients": clients,
        "messages": len(messages),
        "terms": [1, len(messages), megabytes, answers, (raylets - 1) * megabytes, (raylets > 1) * answers],
        "beyond_s": statistics.median(beyond),
        "spread_s": [min(beyond), max(beyond)],
        "training_s": statistics.median(line["time/clients"] for line in lines),
    }


def main() -> None:
    """Measure, fit, check, and write it down."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_memory()
    points = {name: [measure(*case) for case in cases] for name, cases in (("fitted", FITTED), ("checked", CHECKED))}
    # Relative errors count, and nothing costs less than nothing.
    weights = np.array([1 / point["beyond_s"] for point in points["fitted"]])
    terms = np.array([point["terms"] for point in points["fitted"]])
    found = _nonnegative(terms * weights[:, None], np.ones(len(weights)))
    for point in itertools.chain(*points.values()):
        point["predicted_s"] = float(np.dot(found, point["terms"]))
        print(
            f"{point['raylets']} raylet(s), {point['clients']:2d} clients, {point['megabytes']:5.1f} MB: beyond "
            f"training {point['beyond_s']:.3f} s ({point['spread_s'][0]:.3f} to {point['spread_s'][1]:.3f}), "
            f"predicted {point['predicted_s']:.3f} s"
        )
    model = dict(zip(TERMS, map(float, found), strict=True))
    print(json.dumps(model, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps({"model": model, **points}, indent=1))


def _nonnegative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Solve least squares; terms that come out negative are left out."""
    kept = list(range(a.shape[1]))
    while True:
        found = np.zeros(a.shape[1])
        found[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept.remove(int(found.argmin()))


if __name__ == "__main__":
    main()
