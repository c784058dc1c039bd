"""What the methods show of themselves: numbers against what was learnt, and nothing that changes it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny
from test_every_algorithm import NAMES, QUICK, experiment

import algorithms.portraits
from algorithms.pictures import from_json
from orchestrator.scoring import _moments
from orchestrator.worker import Worker


def sat(name, folder, **changes):
    """Run a method, return the run and its pictures of the last phase."""
    run = finish(driver(tiny(algorithm={name: QUICK.get(name, {})}, **changes), folder))
    return run, pictures(folder)


def pictures(folder):
    return {p.stem: from_json(json.loads(p.read_text())) for p in folder.glob("artifacts/*/portraits/*.json")}


SITTERS = [name for name in NAMES if Path(algorithms.portraits.__file__).with_name(f"{name}.py").exists()]


@pytest.mark.parametrize("name", SITTERS)
def test_portraits_change_nothing(name, tmp_path, monkeypatch):
    with_them = finish(driver(experiment(name), tmp_path))
    pictures(tmp_path)  # all can be read
    monkeypatch.setattr("orchestrator.driver.portraits_of", lambda *_: {})
    assert with_them.fingerprint() == finish(driver(experiment(name))).fingerprint()


def test_a_broken_portrait_fails_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.scoring.portraits", lambda *_: 1 / 0)
    assert finish(driver(tiny(), tmp_path)).done
    (note,) = tmp_path.glob("artifacts/*/portraits/error.json")
    assert "ZeroDivisionError" in note.read_text()


def test_moments_are_those_of_all_features(tmp_path):
    run = finish(driver(tiny()))
    mean, variance = _moments(run, run.server.model)
    worker = Worker(run.experiment, digits(), run.split)
    rows = torch.cat([torch.as_tensor(run.split.train[k]) for k in run.selectable])
    h = worker.features(run.server.model, worker.images(worker.x_train, rows)).detach().double()
    y = worker.y_train[rows]
    for c in range(10):
        assert torch.allclose(mean[c], h[y == c].mean(0), atol=1e-5)
        assert torch.allclose(variance[c], h[y == c].var(0, correction=0), atol=1e-4)


def test_gpi_beside_the_labels(tmp_path):
    run = finish(driver(tiny(local={"lr": 0.05, "loss": "balanced_softmax", "prior": "gpi"}), tmp_path))
    found = pictures(tmp_path)
    counts = torch.from_numpy(run.split.counts).sum(0).double()
    labels = torch.tensor(found["gpi"].series["labels"], dtype=torch.float64)
    estimate = torch.tensor(found["gpi"].series["GPI"], dtype=torch.float64)
    assert torch.allclose(labels, counts.sort(descending=True).values / counts.sum())
    assert torch.allclose(estimate, run.proxy.double()[counts.argsort(descending=True, stable=True)])
    assert f"{float(F.cosine_similarity(labels, estimate, dim=0)):.3f}" in found["gpi"].title
    off = max(max(a / b, b / a) for a, b in zip(labels.tolist(), estimate.tolist(), strict=True) if a)
    assert f"at worst {off:.1f} times off" in found["gpi"].title
    assert len(found["lpi"].at) == 6


def test_ecl_owners_and_scales(tmp_path):
    run, found = sat("ecl", tmp_path)
    for row, k in zip(found["owners"].values, found["owners"].rows, strict=True):
        by_class = dict(zip(map(int, found["owners"].columns), row, strict=True))
        for c, owner in enumerate(run.memory[int(k)]["owner"].tolist()):
            assert by_class[c] == (None if run.split.counts[int(k)][c] == 0 else owner)
    own = run.memory[0]
    ratio = own["experts"][0]["head.weight"].norm() / own["head"]["head.weight"].norm()
    assert found["scales"].series["expert 0"][0] == pytest.approx(float(ratio) ** 2, rel=1e-4)


def test_fedloge_angles_norms_features(tmp_path):
    run, found = sat("fedloge", tmp_path)
    fixed = run.server.fixed["head.weight"]
    assert found["cosines"].values[0][0] == pytest.approx(1, abs=1e-5)
    first, second = (int(found["cosines"].rows[i]) for i in (0, 1))
    between = float(F.cosine_similarity(fixed[first], fixed[second], dim=0))
    assert found["cosines"].values[0][1] == pytest.approx(between, abs=1e-5)
    assert found["norms"].series["fixed"][0] == pytest.approx(float(fixed[first].norm()), rel=1e-5)
    assert found["norms"].series["generic, in the end"] == pytest.approx([1.0] * 10, rel=1e-5)  # GA-FR
    for when in ("before", "after"):
        means = found["features"].series[f"mean, {when} training"]
        assert means == sorted(means, reverse=True)


def test_bpfed_smoothing_and_spectrum(tmp_path):
    run, found = sat("bpfed", tmp_path)
    for title, g in found["smoothing"].series.items():
        n = torch.from_numpy(run.split.counts[int(title.split()[1].rstrip(","))])
        order = torch.from_numpy(run.split.counts).sum(0).argsort(descending=True, stable=True)
        several = (n > 0).sum() > 1
        for value, count in zip(g, n[order].tolist(), strict=True):
            wanted = 0.5 * (count / int(n.max())) ** 0.4 * float(several) if count else None
            assert value == (None if wanted is None else pytest.approx(wanted, abs=1e-5))
    spectrum = found["spectrum"].series["M_glo"]
    assert spectrum == sorted(spectrum)
    assert spectrum[-1] == pytest.approx(1)


def test_mupfl_clusters(tmp_path):
    run, found = sat("mupfl", tmp_path)
    assert sum(map(len, found["clusters"].series.values())) == len(run.memory)
    scores = dict(zip(found["silhouettes"].at, found["silhouettes"].series["k-means"], strict=True))
    assert len(found["clusters"].series) == max(scores, key=scores.get)


def test_ldae_groups(tmp_path):
    local = {"lr": 0.05, "batch": 16, "loss": "balanced_softmax", "prior": "gpi"}
    run, found = sat("ldae", tmp_path, local=local)
    for row in found["groups"].values:
        assert sum(row) == pytest.approx(1)
    group = run.server.groups[0]
    counts = run.split.counts[group].sum(0)
    assert found["groups"].values[0][0] == pytest.approx(counts[int(found["groups"].columns[0])] / counts.sum())


def test_most_methods_have_none():
    sitting = algorithms.portraits.Sitting(None, {}, None, torch.zeros(1, 1), None)
    assert algorithms.portraits.portraits(algorithms.find("fedavg")(), sitting) == {}
