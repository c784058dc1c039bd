"""A contender: our driver with its pool of client actors, on Ray. `python benchmarks/run_ours.py TASK.npz`."""

import logging
import shutil
import sys
import tempfile
from pathlib import Path

import ray
import torch
from gate import Gate

from orchestrator.actors import Pool, keep_memory
from orchestrator.data import load
from orchestrator.driver import Driver, split_for
from orchestrator.experiment import Experiment


def main() -> None:
    """Run rounds as the harness wants them."""
    gate = Gate()
    keep_memory()
    experiment = Experiment.model_validate_json(Path(sys.argv[1]).with_suffix(".json").read_text())
    folder = tempfile.mkdtemp(prefix="fedtail-")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address="local", include_dashboard=False, _temp_dir=folder, **quiet)
    torch.set_num_threads(experiment.cluster.threads)
    dataset = load(experiment.data.name, experiment.data.root)
    split = split_for(experiment, dataset)
    pool = Pool(actors=int(ray.cluster_resources()["CPU"]), cpu=1.0, gpu=0.0)
    pool.load(experiment, ray.put(dataset), split)
    driver = Driver(experiment, dataset, split, pool)

    def weights() -> torch.Tensor:
        return torch.cat([driver.server.model.flat, driver.server.model.buffers])

    while gate.opens(weights):
        samples = int(split.counts[driver._draw(driver.plan[driver.round])].sum())
        metrics = driver.advance()["metrics"]
        gate.answer(steps=driver._steps, samples=samples, up=metrics["bytes/up"], down=metrics["bytes/down"])
    pool.close()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
