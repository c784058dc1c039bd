"""The driver actor: a Ray Tune trial that runs one experiment and can always be taken up again from its directory."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
import yaml
from ray import tune

from orchestrator.actors import Pool
from orchestrator.checkpoint import set_status, write_json
from orchestrator.client import ClientFailed, claim
from orchestrator.data import describe
from orchestrator.driver import Driver, data_key, split_for
from orchestrator.experiment import Experiment
from orchestrator.resources import Share


class Trial(tune.Trainable):  # type: ignore[misc]
    """One experiment as a Tune trial; a step is what lies between two evaluations."""

    def setup(
        self, config: dict[str, Any], directory: str, datasets: Mapping[str, Any], shares: Mapping[str, Share]
    ) -> None:
        """Remember what to run; Tune may make an actor that it then does not use, so nothing is touched yet."""
        self.folder, self.datasets, self.shares = Path(directory), datasets, shares
        self.pool: Pool | None = None
        self.driver: Driver | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve the next trial with the same actors."""
        self.driver = None
        return True

    def _open(self) -> Driver:
        """Take up the run in its directory, or begin it."""
        text = (self.path / "experiment.yaml").read_text(encoding="utf-8")
        experiment = Experiment.model_validate(yaml.safe_load(text))
        set_status(self.path, "RUNNING")
        torch.set_num_threads(experiment.cluster.threads)
        reference = self.datasets[data_key(experiment)]
        dataset = ray.get(reference)
        parts = split_for(experiment, dataset)
        artifacts = self.path / "artifacts"
        artifacts.mkdir(exist_ok=True)
        parts.save(artifacts / "split.npz")
        write_json(artifacts / "data.json", describe(dataset, parts))
        if self.pool is None:
            share = self.shares[self.config["trial"]]
            self.pool = Pool(share.actors, share.cpu, share.gpu)
        self.pool.load(experiment, reference, parts)
        device = claim(self.shares[self.config["trial"]].driver_gpu)
        return Driver(experiment, dataset, parts, self.pool, self.path, device)

    def step(self) -> dict[str, Any]:
        """Run until there are scores; phases after the first are one step, since nothing may stop them early."""
        self.path = self.folder / "trials" / self.config["trial"]
        try:
            return self._step()
        except Exception as error:
            # Leave the reason where people look for it.
            set_status(self.path, "FAILED", error=f"{error}\n{traceback.format_exc()}")
            if isinstance(error, ClientFailed):
                return {"done": True}  # the same again would only fail again
            raise

    def _step(self) -> dict[str, Any]:
        driver = self.driver = self.driver or self._open()
        line = driver.history[-1] if driver.history else {"metrics": {}}
        while not driver.done:
            line = driver.advance()
            first = next((turn.number for turn in driver.plan if turn.phase.scored), 0)
            if not driver.done and driver.plan[driver.round].number == first and "time/evaluate" in line["metrics"]:
                break
        if driver.done and self.pool is not None:
            set_status(self.path, "FINISHED", fingerprint=driver.fingerprint(), restarts=self.pool.restarts)
        return {**line["metrics"], "round": driver.round, "done": driver.done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune keeps nothing: the run directory is the checkpoint."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing to load: `_open` takes the run up."""

    def cleanup(self) -> None:
        """End the client actors."""
        if self.pool is not None:
            self.pool.close()
