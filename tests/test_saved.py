"""Models that were saved are loaded again and are as good as reported, for every method, without pickle."""

import csv
import shutil

import mlflow
import numpy as np
import pytest
from conftest import digits, driver, finish, tiny
from PIL import Image
from test_every_algorithm import NAMES, experiment

from orchestrator.checkpoint import CheckpointError
from orchestrator.data import Dataset, ImageFiles
from orchestrator.data.files import listed
from orchestrator.saved import load, save


def accuracy(model, images, labels):
    return float((model.predict(images).argmax(1) == labels).mean())


@pytest.mark.parametrize("name", NAMES)
def test_saved_models_give_the_reported_accuracy(name, tmp_path):
    run = finish(driver(experiment(name), tmp_path / "run"))
    save(run, tmp_path / "models")
    data, metrics = digits(), run.history[-1]["metrics"]
    saved = {path.name for path in tmp_path.glob("models/*")}
    assert ("generic" in saved) == ("generic/acc" in metrics)
    if "generic" in saved:
        found = accuracy(load(tmp_path / "models/generic"), data.x_test, data.y_test)
        assert found == pytest.approx(metrics["generic/acc"], abs=1e-9)
    (table,) = (tmp_path / "run").glob(f"artifacts/{run.plan[-1].title}/per_client.csv")
    for folder in tmp_path.glob("models/client-*"):
        id = int(folder.name.partition("-")[2])
        (row,) = (row for row in csv.DictReader(table.open()) if row["client"] == str(id))
        mine = run.split.test[id]
        assert accuracy(load(folder), data.x_test[mine], data.y_test[mine]) == pytest.approx(float(row["acc_dist"]))
        owned = [c for c in range(data.classes) if run.split.counts[id][c]]
        rates = [accuracy(load(folder), data.x_test[data.y_test == c], c) for c in owned]
        assert np.mean(rates) == pytest.approx(float(row["acc_owned"]))
    assert saved, "every method has a model to save"


def test_mlflow_loads_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    run = finish(driver(tiny(algorithm=["fedavg", {"finetune": {"epochs": 1}}])))
    save(run, tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "MLmodel"}
        theirs = mlflow.pyfunc.load_model(str(folder)).predict(digits().x_test[:20])
        assert np.array_equal(theirs, load(folder).predict(digits().x_test[:20]))
        assert theirs.shape == (20, 10)


def test_images_in_files_are_predicted_as_stored_or_as_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    draw, labels = np.random.default_rng(0), np.arange(60) % 3
    names = [f"{i}.png" for i in range(60)]
    for name, label in zip(names, labels, strict=True):
        shown = draw.integers(0, 200, (12, 12, 3)) + np.array([0, 20, 50])[label]
        Image.fromarray(shown.astype(np.uint8)).save(tmp_path / name)
    listing = listed(tmp_path, names, (12, 12))
    train, test = ImageFiles(listing, range(40)), ImageFiles(listing, range(40, 60))
    moments = (0.4,) * 3, (0.3,) * 3
    data = Dataset("pictures", train, labels[:40], test, labels[40:], 3, *moments, crop=8)
    run = finish(driver(tiny(data={"name": "pictures", "clients": 2}, clients_per_round=2), dataset=data))
    save(run, tmp_path / "models")
    model, images = load(tmp_path / "models/generic"), data.x_test[np.arange(20)]
    assert images.shape == (20, 3, 12, 12)
    assert accuracy(model, images, data.y_test) == pytest.approx(run.history[-1]["metrics"]["generic/acc"])
    assert np.array_equal(model.predict(images), model.predict(images[:, :, 2:10, 2:10]))
    with pytest.raises(ValueError, match=r"bytes of shape \[N, 3, 12, 12\], not torch.uint8 \[20, 3, 10, 12\]"):
        model.predict(images[:, :, 1:11])


def test_what_is_no_model_is_refused(tmp_path):
    run = finish(driver(tiny()))
    save(run, tmp_path)
    model = load(tmp_path / "generic")
    assert model.predict(digits().x_test[:0]).shape == (0, 10)
    with pytest.raises(ValueError, match=r"bytes of shape \[N, 1, 8, 8\], not torch.float32 \[2, 1, 8, 8\]"):
        model.predict(digits().x_test[:2].astype(np.float32))
    with pytest.raises(CheckpointError, match="there is no model in"):
        load(tmp_path)
    (tmp_path / "generic" / "model.safetensors").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="not a file of ours"):
        load(tmp_path / "generic")
    shutil.rmtree(tmp_path / "generic")
