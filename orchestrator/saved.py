"""Trained models that can be loaded again, by us or by MLflow: safetensors and JSON, never pickle.

model = orchestrator.saved.load("runs/demo/trials/0000/artifacts/models/generic")
labels = model.predict(images).argmax(1)          # images: bytes [N, C, H, W] as the data set has them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from algorithms.base import Algorithm, Predictor
from orchestrator.augment import centre
from orchestrator.checkpoint import CheckpointError, pack, unpack, write
from orchestrator.data import Dataset, Split
from orchestrator.driver import Driver
from orchestrator.experiment import Experiment
from orchestrator.values import CPU, place
from orchestrator.worker import Worker

FILE = "model.safetensors"


class Saved:
    """A model with all that it takes to predict: how images are scaled, the network, and what its owner remembers."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts
        data, counts = parts["data"], parts["counts"].numpy()
        experiment = Experiment.model_validate(parts["experiment"])
        images, nobody = np.zeros((0, *data["shape"]), np.uint8), np.zeros(0, np.int64)
        self.pixels: tuple[int, ...] = tuple(data["shape"][1:]) if experiment.task == "segmentation" else ()
        labels = np.zeros((0, *self.pixels), np.int64)
        scale, classes = (tuple(data["mean"]), tuple(data["std"])), counts.shape[1] - bool(self.pixels)
        dataset = Dataset(data["name"], images, labels, images, labels, classes, *scale)
        nothing = (nobody,) * len(counts)
        self._worker = Worker(experiment, dataset, Split(nothing, nothing, nothing, counts))

    def predictor(self) -> Predictor | None:
        """Return the function from scaled images to logits; None where the method has no such model."""
        algorithm, id = self._worker.parts[self.parts["part"]], self.parts["client"]
        client = self._worker.client(id, self.parts["part"], {id: self.parts["memory"]}, self.parts["origin"], 0)
        view = place(self.parts["view"], CPU)
        return getattr(algorithm, self.parts["kind"])(client, *view)  # type: ignore[no-any-return]

    def predict(self, images: Any, params: Any = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits [N, classes] of images, bytes [N, C, H, W], cut or not; of pixels [N, classes, H, W]."""
        x, data = torch.as_tensor(np.asarray(images)), self.parts["data"]
        shape, stored = tuple(data["shape"]), tuple(data.get("stored", data["shape"]))
        if x.dtype != torch.uint8 or x.shape[1:] not in (shape, stored):
            wanted = ", ".join(map(str, ("N", *stored)))
            raise ValueError(f"images must be bytes of shape [{wanted}], not {x.dtype} {list(x.shape)}")
        model = self.predictor()
        assert model is not None
        logits = [torch.zeros(0, self.parts["counts"].shape[1], *self.pixels)]
        for block in centre(x, self._worker.size).split(self._worker.block) if len(x) else ():
            with self._worker.predicting():
                logits.append(model(self._worker.images(block, range(len(block)))))
        found: np.ndarray[Any, np.dtype[np.float32]] = torch.cat(logits).numpy()
        return found


def load(directory: str | Path) -> Saved:
    """Load a model that a run has left in its artifacts."""
    path = Path(directory) / FILE
    if not path.is_file():
        raise CheckpointError(f"there is no model in {directory}; give a directory artifacts/models/... of a trial")
    return Saved(unpack(path.read_bytes(), path))


def _load_pyfunc(path: str) -> Saved:
    """Load a model for `mlflow.pyfunc.load_model`."""
    return Saved(unpack(Path(path).read_bytes(), Path(path)))


def save(driver: Driver, folder: Path) -> None:
    """Write the model that all clients share, and one client's own, where the method has them."""
    algorithm, dataset = driver.parts[driver.part], driver.dataset
    parts: dict[str, Any] = {
        "experiment": driver.experiment.model_dump(mode="json"),
        "data": {
            "name": dataset.name,
            "shape": list(dataset.shape),
            "stored": list(dataset.x_test.shape[1:]),
            "mean": list(dataset.mean),
            "std": list(dataset.std),
        },
        "counts": torch.from_numpy(driver.split.counts),
        "part": driver.part,
        "view": place(algorithm.view(driver.server), CPU),
        "origin": driver.origin,
        "client": (somebody := min(driver.memory, default=driver.selectable[0])),
        "memory": driver.memory.get(somebody, {}),
    }
    kinds = {"generic": "generic", f"client-{somebody}": "personal"}
    if type(algorithm).personal is Algorithm.personal:
        del kinds[f"client-{somebody}"]  # all predict with the shared model
    for name, kind in kinds.items():
        if Saved(parts | {"kind": kind}).predictor() is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            write(folder / name / FILE, pack(parts | {"kind": kind}))
            about = {"flavors": {"python_function": {"loader_module": __name__, "data": FILE}}}
            write(folder / name / "MLmodel", yaml.safe_dump(about).encode())
