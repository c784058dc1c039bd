"""A contender: our driver with its pool of client actors, on Ray. `python benchmarks/run_ours.py TASK.npz`."""

import argparse
import sys
from pathlib import Path

import ray
import torch
from gate import Gate
from rich.console import Console

from orchestrator.actors import Pool, keep_memory
from orchestrator.data import load
from orchestrator.driver import Driver, split_for
from orchestrator.experiment import Experiment
from orchestrator.machines import cluster


def main() -> None:
    """Run rounds as the harness wants them, on a Ray that is started as the command starts it."""
    gate = Gate()
    keep_memory()
    with cluster(argparse.Namespace(address=None, num_cpus=None, num_gpus=None, quiet=True), Console()):
        experiment = Experiment.model_validate_json(Path(sys.argv[1]).with_suffix(".json").read_text())
        torch.set_num_threads(experiment.cluster.threads)
        placed = ray.put(load(experiment.data.name, experiment.data.root))
        dataset = ray.get(placed)  # the copy that all share
        split = split_for(experiment, dataset)
        pool = Pool(actors=int(ray.cluster_resources()["CPU"]), cpu=1.0, gpu=0.0)
        pool.load(experiment, placed, split)
        driver = Driver(experiment, dataset, split, pool)

        def weights() -> torch.Tensor:
            return torch.cat([driver.server.model.flat, driver.server.model.buffers])

        while gate.opens(weights):
            sizes = split.counts[driver._draw(driver.plan[driver.round])].sum(1)
            # A last batch of one image is left out where there is batch norm.
            left_over = (sizes % experiment.local.batch == 1).sum() if driver.origin.buffers.numel() else 0
            metrics = driver.advance()["metrics"]
            gate.answer(
                steps=driver._steps,
                samples=int(sizes.sum() - left_over),
                up=metrics["bytes/up"],
                down=metrics["bytes/down"],
                profile={part: metrics[f"time/{part}"] for part in ("clients", "wait", "move", "server")},
            )
        pool.close()


if __name__ == "__main__":
    main()
