"""The workloads as experiments, and the file that hands one over to contenders that know nothing of experiments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algorithms.params import Params
from orchestrator.client import CALL, SAMPLING, stream
from orchestrator.data import Dataset, Split, load
from orchestrator.driver import split_for
from orchestrator.experiment import Experiment
from orchestrator.worker import network


@dataclass(frozen=True)
class Workload:
    """An experiment with its data, without any evaluation."""

    about: str
    rounds: int
    tree: dict[str, Any]

    def experiment(self, rounds: int | None = None, **changes: Any) -> Experiment:
        """Return the experiment; one round more than is run, since the last would be followed by an evaluation."""
        rounds = self.rounds if rounds is None else rounds
        return Experiment.model_validate(
            {"rounds": rounds + 1, "evaluate": {"every": 10**6}, "algorithm": "fedavg", **self.tree, **changes}
        )

    def at(self, root: str | None, rounds: int | None) -> Workload:
        """Return the workload with its data in this directory, and with another number of rounds."""
        tree = self.tree | {"data": self.tree["data"] | {"root": root}}
        return dataclasses.replace(self, tree=tree, rounds=rounds or self.rounds)


def _local(**more: Any) -> dict[str, Any]:
    return {"lr": 0.01, "momentum": 0.9, "batch": 64, "augment": "none", **more}


def _fashion(clients: int) -> dict[str, Any]:
    return {
        "data": {"name": "fashion_mnist", "clients": clients, "alpha": 0.5, "imbalance": 100},
        "model": "cnn_mupfl",
        "local": _local(),
        "clients_per_round": clients // 5,
    }


WORKLOADS = {
    "W1": Workload("Fashion-MNIST-LT, 50 clients, 10 a round, two-conv CNN", 20, _fashion(50)),
    "W2": Workload("Fashion-MNIST-LT, 500 tiny clients, 100 a round, two-conv CNN", 20, _fashion(500)),
    "W3": Workload(
        "CIFAR-10-LT, 20 clients, 8 a round, ResNet-8 of width 16",
        5,
        {
            "data": {"name": "cifar10", "clients": 20, "alpha": 0.5, "imbalance": 100},
            "model": {"name": "resnet8", "width": 16},
            "local": _local(),
            "clients_per_round": 8,
        },
    ),
    "W4": Workload(
        "digits, 10 clients with one step each, ResNet-18: 45 MB of weights to move",
        12,
        {
            "data": {"name": "digits", "clients": 10, "alpha": 100, "imbalance": 100},
            "model": "resnet18",
            "local": _local(batch=4096),
            "clients_per_round": 10,
        },
    ),
}


def population(clients: int, folder: Path) -> Workload:
    """W5: so many clients with a dozen digits each, 100 a round; there are 1,200 digits, so they come repeatedly."""
    digits, copies = load("digits"), clients // 100
    path = folder / f"digits-{clients}.npz"
    arrays = {"x_train": np.tile(digits.x_train, (copies, 1, 1, 1)), "y_train": np.tile(digits.y_train, copies)}
    np.savez(path, x_test=digits.x_test, y_test=digits.y_test, **arrays)
    tree = {
        "data": {"name": str(path), "clients": clients, "alpha": 100, "imbalance": 1},
        "model": "cnn_small",
        "local": _local(),
        "clients_per_round": 100,
    }
    return Workload(f"digits, {clients:,} clients, 100 a round", 10, tree)


def hand_over(experiment: Experiment, dataset: Dataset, split: Split, path: Path) -> None:
    """Write all that a contender needs: images by client, initial weights, and who trains when in which order."""
    seed, local, rounds = experiment.seed, experiment.local, range(experiment.rounds)
    assert experiment.chain().parts[0].name == "fedavg"
    assert local.epochs == 1
    assert not local.weight_decay
    assert local.augment == "none" or dataset.augment == "none"
    selectable = np.flatnonzero(split.counts.sum(1) > 0)
    drawn = [
        sorted(
            np.random.default_rng(stream(seed, SAMPLING, r))
            .choice(selectable, experiment.clients_per_round, replace=False)
            .tolist()
        )
        if experiment.clients_per_round < len(selectable)
        else selectable.tolist()
        for r in rounds
    ]
    weights = Params.of(network(experiment, dataset))
    rows = np.concatenate(split.train)
    np.savez(
        path,
        network=np.array(experiment.model.name),
        classes=np.array(dataset.classes),
        batch=np.array(local.batch),
        lr=np.array(local.lr),
        momentum=np.array(local.momentum),
        x=dataset.x_train[rows],
        y=dataset.y_train[rows],
        ends=np.cumsum([len(part) for part in split.train]),
        x_test=dataset.x_test,
        y_test=dataset.y_test,
        mean=np.array(dataset.mean, np.float32),
        std=np.array(dataset.std, np.float32),
        weights=np.concatenate([weights.flat.numpy(), weights.buffers.numpy()]),
        clients=np.array(drawn),
        seeds=np.array([[stream(seed, CALL, r, 0, k) for k in drawn[r]] for r in rounds]),
    )


def prepare(workload: Workload, folder: Path, name: str) -> Path:
    """Load a workload's data and hand it over; return the file."""
    experiment = workload.experiment()
    dataset = load(experiment.data.name, experiment.data.root)
    path = folder / f"{name}.npz"
    hand_over(experiment, dataset, split_for(experiment, dataset), path)
    (folder / f"{name}.json").write_text(experiment.model_dump_json())
    return path
