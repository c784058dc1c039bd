"""The driver actor: a Ray Tune trial that runs one experiment and can always be taken up again from its directory."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune

from algorithms.base import Algorithm
from orchestrator.actors import Pool, keep_memory
from orchestrator.checkpoint import CheckpointError, RunDirectory, set_status, write, write_json
from orchestrator.data import describe
from orchestrator.driver import Driver, data_key, split_for
from orchestrator.experiment import Experiment, dump, read_back
from orchestrator.prefixes import Cache, code, prefixes
from orchestrator.resources import Share
from orchestrator.saved import save
from orchestrator.space import fill
from orchestrator.sweep_file import read
from orchestrator.worker import ClientFailed, claim

MOST_ALIKE = 64  #: settings that are scored in one go


class Trial(tune.Trainable):  # type: ignore[misc]
    """One experiment as a Tune trial; a step is what lies between two evaluations."""

    config: dict[str, Any]

    def setup(
        self,
        config: dict[str, Any],
        directory: str,
        datasets: Mapping[str, Any],
        cache: str | None,
        goal: tuple[str, str],
    ) -> None:
        """Remember what to run; Tune may make an actor that it then does not use, so nothing is touched yet."""
        keep_memory()
        self.folder, self.datasets, (self.metric, self.mode) = Path(directory), datasets, goal
        self.cache = None if cache is None else Cache(Path(cache))
        self.pool: Pool | None = None
        self.driver: Driver | None = None
        self.lease: Any = None

    @property
    def path(self) -> Path:
        """The trial's directory."""
        return self.folder / "trials" / str(self.config["job"]["trial"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve the next trial with the same actors."""
        self.driver = None
        self._release()
        return True

    def _open(self) -> Driver:
        """Take up the run in its directory, or where another has left what both have in common, or begin it."""
        experiment = self._experiment()
        set_status(self.path, "RUNNING")
        torch.set_num_threads(experiment.cluster.threads)
        reference = self.datasets[data_key(experiment)]
        dataset = ray.get(reference)
        share = Share(**self.config["job"]["share"])
        device = claim(share.driver_gpu)
        self.prefixes = prefixes(experiment, dataset.digest, "cuda" if share.gpu else "cpu") if self.cache else []
        self._share_work()
        also = self._alike(dataset.digest, "cuda" if share.gpu else "cpu")
        parts = split_for(experiment, dataset)
        artifacts = self.path / "artifacts"
        artifacts.mkdir(exist_ok=True)
        parts.save(artifacts / "split.npz")
        write_json(artifacts / "data.json", describe(dataset, parts))
        if self.pool is None:
            self.pool = Pool(share.actors, share.cpu, share.gpu)
        self.pool.load(experiment, reference, parts)
        return Driver(experiment, dataset, parts, self.pool, self.path, device, also)

    def step(self) -> dict[str, Any]:
        """Run until there are scores; phases after the first are one step, since nothing may stop them early."""
        try:
            return self._step()
        except Exception as error:
            with suppress(CheckpointError):  # a full disk
                # Leave the reason where people look for it.
                set_status(self.path, "FAILED", error=f"{error}\n{traceback.format_exc()}")
            self._release()
            if isinstance(error, ClientFailed):
                return {"done": True}  # the same again would only fail again
            raise

    def _step(self) -> dict[str, Any]:
        driver = self.driver = self.driver or self._open()
        line = driver.history[-1] if driver.history else {"metrics": {}}
        while not driver.done:
            line = driver.advance()
            self._keep_best(driver, line)
            driver = self._leave_work(driver)
            first = next((turn.number for turn in driver.plan if turn.phase.scored), 0)
            if not driver.done and driver.plan[driver.round].number == first and "time/evaluate" in line["metrics"]:
                break
        if driver.done:
            self._finish(driver)
            self._finish_others()
        return {**driver.history[-1]["metrics"], "round": driver.round, "done": driver.done}

    def _finish(self, driver: Driver) -> None:
        """Write down what is left when all rounds have been run."""
        assert self.pool is not None
        save(driver, self.path / "artifacts" / "models")
        facts = {"restarts": self.pool.restarts, "actors": self.pool.places()}
        ran = code(tuple(type(part) for part in driver.parts))
        set_status(self.path, "FINISHED", fingerprint=driver.fingerprint(), code=ran, **facts)
        self._release()

    def _finish_others(self) -> None:
        """Finish the trials that only predict otherwise: all that they lack is to be written down."""
        config, driver = self.config, self.driver
        for id in config["job"]["alike"]:
            self.config = {**config, "job": {**config["job"], "trial": id, "alike": [], "values": {}}}
            try:
                other = self._open()
                if other.done:
                    self._finish(other)
            except Exception:  # on its own it tells what is wrong
                set_status(self.path, "WAITING")
                self._release()
        self.config, self.driver = config, driver

    def _keep_best(self, driver: Driver, line: Mapping[str, Any]) -> None:
        """Keep the models of the best round by the sweep's metric, besides those of the last one."""
        value, folder = line["metrics"].get(self.metric), self.path / "artifacts" / "models-best"
        if value is None:
            return
        note = folder / "round.json"
        best = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
        if best is None or (value > best["value"] if self.mode == "max" else value < best["value"]):
            save(driver, folder)
            write_json(note, {"round": line["round"], "phase": line["phase"], "metric": self.metric, "value": value})

    def cleanup(self) -> None:
        """End the client actors."""
        self._release()
        if self.pool is not None:
            self.pool.close()

    # Work that trials have in common ---------------------------------------------------------------------------------

    def _share_work(self) -> None:
        """Take over what others have computed; wait for what somebody is computing; claim what comes next."""
        while self.cache is not None:
            self.cache.adopt(self.path, self.prefixes)
            saved = RunDirectory(self.path).saved_round
            following = next((prefix for prefix in self.prefixes if prefix.turn > saved), None)
            if following is None:
                return
            self.lease = self.cache.lease(following)
            if self.lease is None:
                time.sleep(0.5)
            elif self.cache.holds(following):  # published since we looked
                self._release()
            else:
                return

    def _leave_work(self, driver: Driver) -> Driver:
        """Leave the end of a phase to others; take up again if somebody else is already at the next."""
        prefix = next((prefix for prefix in self.prefixes if prefix.turn == driver.round), None)
        if self.cache is None or prefix is None or driver.directory is None:
            return driver
        whose = f"{self.folder.name}/{self.path.name}"
        self.cache.publish(driver.directory, prefix, whose, driver.asked_progress, driver.scored_too)
        self._release()
        following = next((each for each in self.prefixes if each.turn > driver.round), None)
        if following is None:
            return driver
        self.lease = self.cache.lease(following)
        if self.lease is None or self.cache.holds(following):
            self._release()
            self.driver = self._open()
            return self.driver
        return driver

    def _alike(self, digest: str, device: str) -> dict[str, Algorithm]:
        """Return the settings of waiting trials that train what this one trains and only predict otherwise."""
        found: dict[str, Algorithm] = {}
        if not self.prefixes or RunDirectory(self.path).saved_round == self.prefixes[-1].turn:
            return found  # nothing is left to score
        for id in self.config["job"]["alike"]:
            experiment = read_back(self.folder / "trials" / id)
            scored_by = prefixes(experiment, digest, device)[-1].scored_by
            if scored_by != self.prefixes[-1].scored_by:
                found[scored_by] = experiment.chain().parts[-1]
        return dict(list(found.items())[:MOST_ALIKE])

    def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    # Schedulers that let trials wait, and that move weights between them ---------------------------------------------

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the run in its own directory; Tune keeps only a word of where that is."""
        assert self.driver is not None
        self.driver.checkpoint()
        at = self.path / "snapshots" / str(self.driver.round)
        if not at.exists():
            RunDirectory(self.path).copy_to(at)
            for old in sorted(at.parent.iterdir(), key=lambda p: int(p.name))[:-3]:
                shutil.rmtree(old)  # whoever wanted it has taken it long ago
        write_json(Path(checkpoint_dir) / "trial.json", {"trial": self.path.name, "snapshot": str(at)})

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Take over the weights of another trial; its own are in its directory."""
        about = json.loads((Path(checkpoint_dir) / "trial.json").read_text(encoding="utf-8"))
        if about["trial"] != self.path.name:
            self.driver = None
            RunDirectory(self.path).exchange(Path(about["snapshot"]), f"{self.folder.name}/{about['trial']}")
            note = {
                "round": int(Path(about["snapshot"]).name),
                "from": about["trial"],
                "values": self.config["job"]["values"],
            }
            with (self.path / "lineage.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")

    def _experiment(self) -> Experiment:
        """Read the trial's experiment, with what Tune has changed since."""
        about = json.loads((self.path / "trial.json").read_text(encoding="utf-8"))
        params = about["params"] | self.config["job"]["values"]
        if about["params"] != params:
            changed = fill(read(self.folder / "sweep.yaml"), params, self.path.name)
            write(self.path / "experiment.yaml", dump(changed.experiment).encode())
            told = {"params": changed.params, "name": changed.name}
            told |= {"experiment": changed.experiment.model_dump(mode="json")}
            write_json(self.path / "trial.json", about | told)
        return read_back(self.path)
