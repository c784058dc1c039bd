"""Names are names: none leads out of the directory it was meant for, and what cannot be had is refused at once."""

import time
from pathlib import Path

import pytest

from orchestrator.folder import NAME, stem
from orchestrator.spool import valid_name
from orchestrator.tune import main

HOSTILE = [
    "../x",
    "/etc/x",
    "a/../../b",
    "..",
    ".",
    "",
    "a\0b",
    "x" * 300,
    "<script>alert(1)</script>",
    "a b",
    "-x",
    "~",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("flag", [[], ["--resume"], ["--extend", "rounds=5"]], ids=["new", "resume", "extend"])
def test_a_directory_cannot_be_named_out_of_its_place(tmp_path, capsys, name, flag):
    code = main(["--out", str(tmp_path / "out"), f"--name={name}", *flag])
    assert code == 2
    error = capsys.readouterr().err
    assert "use letters, digits" in error
    assert len(error) < 1000
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", [*HOSTILE, "..yaml", "....", "%2e%2e", "名前"])
def test_a_file_of_any_name_gives_a_directory_inside(tmp_path, name):
    made = stem(Path(f"{name}.yaml"))
    assert NAME.fullmatch(made)
    assert (tmp_path / made).resolve().parent == tmp_path.resolve()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_metric_of_any_name_is_one_that_mlflow_takes(name):
    made = valid_name(name)
    assert 0 < len(made) <= 250
    assert not made.startswith("/")
    assert {"..", "."}.isdisjoint(made.split("/"))
    assert not set(made) & set("<>\0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["cluster.actors=64"], "64 client actors with 1 CPU and 0 GPU each, but the cluster has 2 CPU"),
        (["cluster.gpu_per_actor=0.5"], "0.5 GPU each, but the cluster has 2 CPU and 0 GPU"),
        (["cluster.cpu_per_actor=3"], "3 CPU"),
        (["cluster.driver_gpu=1"], "GPU"),
    ],
)
def test_what_this_machine_can_never_give_is_refused_within_seconds(tmp_path, capsys, changes, reason):
    began = time.monotonic()
    words = [word for change in changes for word in ("--set", change)]
    assert main(["--out", str(tmp_path / "out"), "--num-cpus", "2", "--num-gpus", "0", *words]) == 2
    assert time.monotonic() - began < 5
    assert reason in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
