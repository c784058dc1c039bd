"""What tests share: tiny real experiments, run in this process or on a real Ray."""

import logging
import os
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")

import numpy as np
import pytest
import torch

from orchestrator import folder, summary
from orchestrator.checkpoint import set_status, write_json
from orchestrator.data import Dataset, describe, load
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.experiment import Experiment
from orchestrator.scratch import scratch as temporary
from orchestrator.space import trials
from orchestrator.sweep_file import read
from orchestrator.worker import Worker


def tiny(**changes: object) -> Experiment:
    """Return a small experiment on digits; keyword arguments replace its parts."""
    base: dict[str, object] = {
        "data": {"name": "digits", "clients": 6, "alpha": 0.5, "imbalance": 10},
        "algorithm": "fedavg",
        "local": {"lr": 0.05, "batch": 16},
        "rounds": 2,
        "clients_per_round": 3,
        "evaluate": {"every": 2},
    }
    return Experiment.model_validate(base | changes)


def driver(
    experiment: Experiment, directory: Path | None = None, dataset: Dataset | None = None, **more: object
) -> Driver:
    """Return a driver that works in this process, on digits unless another data set is given."""
    dataset = dataset or digits()
    parts = split_for(experiment, dataset)
    return Driver(experiment, dataset, parts, InProcess(Worker(experiment, dataset, parts)), directory, **more)


def finish(run: Driver) -> Driver:
    """Run to the end."""
    while not run.done:
        run.advance()
    return run


def arrived(
    found: list[torch.Tensor], expected: list[torch.Tensor], start: list[torch.Tensor], within: float = 1e-4
) -> None:
    """Check that training has led where it should, within a share of the way, which is the room for rounding.

    ResNets need more of it: of a rectifier before a batch norm that just opens, or just not, each step makes more.
    """
    ours, theirs, first = (torch.cat([t.detach().flatten().double() for t in ts]) for ts in (found, expected, start))
    way, apart = float((theirs - first).norm()), float((ours - theirs).norm())
    assert way > 0.1, "it moves"
    assert apart < within * way, f"{apart:.2g} apart after a way of {way:.2g}"


def sweep_here(directory: Path, text: str) -> Path:
    """Run a sweep in this process, and leave the directory that the command leaves."""
    file = directory.with_suffix(".yaml")
    file.write_text(text)
    sweep = read(file)
    for trial in trials(sweep):
        parts = split_for(trial.experiment, digits())
        folder.create(directory, trial, digits(), parts.digest)
        path = directory / "trials" / trial.id
        run = finish(driver(trial.experiment, path))
        parts.save(path / "artifacts" / "split.npz")
        write_json(path / "artifacts" / "data.json", describe(digits(), parts))
        set_status(path, "FINISHED", fingerprint=run.fingerprint())
    folder.commit(directory, sweep, trials(sweep))
    summary.write_summary(directory, sweep.search, {})
    return directory


_METHODS = """\
search: {metric: personal/acc_dist}
experiment:
  data: {name: digits, clients: 6, alpha: 0.5, imbalance: 10}
  local: {lr: 0.05, momentum: 0.9, batch: 16}
  rounds: 2
  clients_per_round: 3
  evaluate: {every: 1}
  seed: !grid [0, 1, 2]
cases:
  - algorithm: local
  - algorithm: fedavg
  - algorithm: [fedavg, finetune]
"""


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory):
    """Three methods under three seeds; to be read, or copied and then damaged."""
    return sweep_here(tmp_path_factory.mktemp("runs") / "methods", _METHODS)


_digits: list[Dataset] = []


def digits() -> Dataset:
    """Return the digits, loaded once."""
    if not _digits:
        _digits.append(load("digits"))
    return _digits[0]


VOID = 255


@cache
def scenes(height: int = 12, width: int = 16) -> Dataset:
    """Return small pictures in which sky, ground, a wall and a thing each have a colour; their edges are void."""
    rng, parts = np.random.default_rng(0), []
    for count in (22, 7):
        y = np.zeros((count, height, width), np.uint8)
        for one in y:
            horizon, left = rng.integers(3, height - 3), rng.integers(0, width - 4)
            one[horizon:] = 1
            one[horizon - 2 : horizon, left : left + 4] = 2
            if rng.random() < 0.6:
                one[-2:, left : left + 2] = 3
        x = np.array([[60, 120, 220], [90, 90, 90], [180, 60, 40], [30, 160, 60]])[y] + rng.integers(
            -30, 31, (*y.shape, 3)
        )
        y[:, 0], y[:, :, -1] = VOID, VOID
        parts += [x.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2).copy(), y]
    return Dataset("scenes.npz", *parts, classes=4, mean=(0.4, 0.4, 0.4), std=(0.3, 0.3, 0.3), augment="flip")


def pixels(**changes: object) -> Experiment:
    """Return a small experiment on scenes; keyword arguments replace its parts."""
    data = {"name": "scenes.npz", "clients": 4, "partition": "foreground", "imbalance": 3, "classes_per_client": 2}
    local = {"lr": 0.05, "batch": 4}
    return tiny(
        **{"data": data, "task": "segmentation", "model": {"name": "cnn_pixels", "width": 4}, "local": local} | changes
    )


@pytest.fixture(scope="session")
def ray_cluster():
    """Start a local Ray of our own and end it again."""
    import ray

    with temporary() as folder:
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield ray
        ray.shutdown()


CHAOS_SEED = os.environ.get("FEDTAIL_CHAOS_SEED") or str(random.SystemRandom().randrange(10**6))


@pytest.fixture
def chance(request):
    """Draw when and whom to kill; what is printed here, pytest shows of a test that fails."""
    print(f"to draw the same again: FEDTAIL_CHAOS_SEED={CHAOS_SEED}")
    return random.Random(f"{CHAOS_SEED} {request.node.name}")


@pytest.fixture
def scratch():
    """A temporary directory with a short path, as Ray's sockets need it; tests look at what is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="ft-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
