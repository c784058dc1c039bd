"""Resuming under other circumstances than a run was begun in is refused, and what differs is shown."""

import json
import shutil

import pytest
from conftest import sweep_here

from orchestrator import tune
from orchestrator.checkpoint import set_status

TEXT = """\
search: {metric: personal/acc_dist}
experiment:
  data: {name: digits, clients: 4, imbalance: 5}
  algorithm: fedavg
  rounds: 1
  seed: !grid [0, 1]
"""


@pytest.fixture
def begun(tmp_path):
    """A sweep of which one trial is still to be run."""
    directory = sweep_here(tmp_path / "begun", TEXT)
    set_status(directory / "trials" / "0001", "KILLED")
    return directory


def resume(directory, *more):
    arguments = ["--resume", "--name", directory.name, "--out", str(directory.parent), "--dry-run", *map(str, more)]
    return tune.main(arguments)


def test_nothing_has_changed(begun):
    assert resume(begun) == 0
    assert resume(begun, begun.with_suffix(".yaml")) == 0


def test_other_code_is_named(begun, capsys):
    path = begun / "code.json"
    then = json.loads(path.read_text())
    assert {"algorithms/fedavg.py", "orchestrator/driver.py", "data/splits.py", "torch"} <= then.keys()
    path.write_text(json.dumps(then | {"algorithms/fedavg.py": "0" * 64, "torch": "1.0"}))
    assert resume(begun) == 2
    told = capsys.readouterr().err
    assert "algorithms/fedavg.py has changed\n" in told
    assert "torch was 1.0, and is 2." in told
    assert "undo this, or add --force" in told
    assert "Traceback" not in told
    assert resume(begun, "--force") == 0


def test_code_that_computes_nothing_here_may_change(begun):
    path = begun / "code.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithms/scaffold.py": "0" * 64}))
    assert resume(begun) == 0


def test_another_experiment_is_shown_leaf_by_leaf(begun, capsys):
    path = begun / "trials" / "0001" / "experiment.yaml"
    path.write_text(path.read_text().replace("lr: 0.05", "lr: 0.5"))
    assert resume(begun) == 2
    assert "trials/0001/experiment.yaml: local.lr was 0.05, and is 0.5" in capsys.readouterr().err
    assert resume(begun, "--force") == 0


def test_another_file_is_compared(begun, capsys):
    file = begun.with_suffix(".yaml")
    file.write_text(TEXT.replace("imbalance: 5", "imbalance: 50"))
    assert resume(begun, file) == 2
    told = capsys.readouterr().err
    assert f"{file}: experiment.data.imbalance was 5, and is 50" in told


def test_a_disk_that_is_too_full_is_told_before_the_start(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    (tmp_path / "one.yaml").write_text(TEXT)
    assert tune.main([str(tmp_path / "one.yaml"), "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "2 trial(s) need about 0.0" in told
    assert "but 0.00 GB are free there" in told
    assert not (tmp_path / "out").exists()
