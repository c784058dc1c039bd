"""A disk that is full, for the run's directory or for MLflow's database: said in words, nothing lost, resumable."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from chaos import finished, logged, rounds, runs, settings, started, stored, summary, until
from test_command import gone, in_process
from test_tracking import ROOT

from orchestrator.checkpoint import RunDirectory

pytestmark = pytest.mark.chaos

RUN = """\
data: {name: digits, clients: 6}
algorithm: scaffold
local: {lr: 0.05, batch: 16}
rounds: 300
clients_per_round: 3
evaluate: {every: 25}
failures: {checkpoint_s: 0}
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a disk; remove the returned file to make some."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return ballast


@pytest.mark.timeout(400)
def test_the_run_stops_in_words_and_goes_on_when_there_is_room(tmp_path, small_disk, scratch, chance):
    (tmp_path / "full.yaml").write_text(RUN)
    out = small_disk / "out"
    folder, trial, common = out / "full", out / "full/trials/0000", ["--out", out, "--num-cpus", 2]
    with started(tmp_path / "full.yaml", *common, scratch=scratch) as process:
        wanted = chance.randint(10, 120)
        until(lambda: rounds(trial) >= wanted and (trial / "checkpoint" / "manifest.json").exists(), process)
        ballast = fill(small_disk)
        text, error = process.communicate(timeout=120)
        print(text, error)
        assert process.returncode == 1
        assert not gone(process.pid)
    assert "Traceback" not in text + error
    assert "No space left on device" in text + error
    assert f"cannot write {trial}" in text + error, "which file"
    assert "bytes" in text + error, "and how large"
    assert "make room, and continue with --resume" in error, "and what to do next"
    assert rounds(trial) < 300
    assert RunDirectory(trial).load() is not None, "the previous checkpoint is intact"
    files = [p for p in (*folder.iterdir(), *(folder / "trials").rglob("*")) if p.is_file()]
    assert [p for p in files if p.name.startswith(".") or p.name.endswith(".new")] == [], "no half files"

    ballast.unlink()
    code, text, error = finished("--name", "full", "--resume", *common, scratch=scratch)
    assert code == 0, text + error
    (found,) = summary(folder)
    assert found["status"] == "FINISHED"
    assert found["fingerprint"] == in_process(trial)
    assert stored(out / "mlflow.db", found["run_id"]) == logged(trial)
    assert sorted(end for end, _ in runs(out / "mlflow.db", "full").values()) == ["FINISHED"] * 2
    assert not [*scratch.iterdir()]


def test_mlflow_has_no_room_and_gets_the_rest_later(tmp_path, small_disk, scratch, chance):
    (tmp_path / "later.yaml").write_text(RUN)
    out, database = tmp_path / "out", small_disk / "mlflow.db"
    words = ["--out", out, "--num-cpus", 2, "--tracking-uri", f"sqlite:///{database}", *settings(rounds=150)]
    with started(tmp_path / "later.yaml", *words, scratch=scratch) as process:
        wanted = chance.randint(1, 60)
        until(lambda: rounds(out / "later/trials/0000") >= wanted, process)
        ballast = fill(small_disk)
        text, error = process.communicate(timeout=120)
        assert process.returncode == 0, text + error
    assert [t["status"] for t in summary(out / "later")] == ["FINISHED"]
    assert "Traceback" not in text + error
    assert "full" in text, "the reason"
    (command,) = (line for line in text.splitlines() if "orchestrator.sync" in line)
    ballast.unlink()
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (child,) = (id for id, (_, parent) in runs(database, "later").items() if parent)
    assert stored(database, child) == logged(out / "later/trials/0000")
    assert os.listdir(scratch) == []
