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
from orchestrator.data import describe
from orchestrator.driver import Driver, data_key, split_for
from orchestrator.experiment import Experiment
from orchestrator.resources import Share


class Trial(tune.Trainable):  # type: ignore[misc]
    """One experiment as a Tune trial; a step is what lies between two evaluations."""

    def setup(
        self, config: dict[str, Any], directory: str, datasets: Mapping[str, Any], shares: Mapping[str, Share]
    ) -> None:
        """Take up the run in its directory, or begin it."""
        self.folder, self.datasets, self.shares = Path(directory), datasets, shares
        self.pool: Pool | None = None
        self._guard(self._open, config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve the next trial with the same actors."""
        self._guard(self._open, new_config)
        return True

    def _open(self, config: dict[str, Any]) -> None:
        self.path = self.folder / "trials" / config["trial"]
        text = (self.path / "experiment.yaml").read_text(encoding="utf-8")
        self.experiment = Experiment.model_validate(yaml.safe_load(text))
        set_status(self.path, "RUNNING")
        torch.set_num_threads(self.experiment.cluster.threads)
        reference = self.datasets[data_key(self.experiment)]
        dataset = ray.get(reference)
        parts = split_for(self.experiment, dataset)
        artifacts = self.path / "artifacts"
        artifacts.mkdir(exist_ok=True)
        parts.save(artifacts / "split.npz")
        write_json(artifacts / "data.json", describe(dataset, parts))
        if self.pool is None:
            share = self.shares[config["trial"]]
            self.pool = Pool(share.actors, share.cpu, share.gpu)
        self.pool.load(self.experiment, reference, parts)
        self.driver = Driver(self.experiment, dataset, parts, self.pool, self.path)

    def step(self) -> dict[str, Any]:
        """Run until there are scores; phases after the first are one step, since nothing may stop them early."""
        return self._guard(self._step)  # type: ignore[no-any-return]

    def _step(self) -> dict[str, Any]:
        driver = self.driver
        line = driver.history[-1] if driver.history else {"metrics": {}}
        while not driver.done:
            line = driver.advance()
            first = next((turn.number for turn in driver.plan if turn.phase.scored), 0)
            if not driver.done and driver.plan[driver.round].number == first and "time/evaluate" in line["metrics"]:
                break
        if driver.done:
            set_status(self.path, "FINISHED", fingerprint=driver.fingerprint(), restarts=self.pool.restarts)
        return {**line["metrics"], "round": driver.round, "done": driver.done}

    def _guard(self, action: Any, *arguments: Any) -> Any:
        """Leave the reason of a failure in the trial's directory, where people look for it."""
        try:
            return action(*arguments)
        except Exception as error:
            facts = {"error": f"{error}\n{traceback.format_exc()}"}
            set_status(self.path, "FAILED", **facts)
            raise

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune keeps nothing: the run directory is the checkpoint."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing to load: `setup` has taken the run up already."""

    def cleanup(self) -> None:
        """End the client actors."""
        if self.pool is not None:
            self.pool.close()
