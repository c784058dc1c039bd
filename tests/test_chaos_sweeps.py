"""Sweeps that are interrupted, killed, or run beside one another in one database."""

import os
import signal
import time

import pytest
from chaos import (
    WORKING,
    called,
    finished,
    lines,
    logged,
    rounds,
    runs,
    settings,
    started,
    status,
    stored,
    summary,
    until,
)
from mlflow.tracking import MlflowClient
from test_command import gone, in_process

from orchestrator.checkpoint import RunDirectory

pytestmark = pytest.mark.chaos

SIX = """\
search: {metric: generic/acc}
experiment:
  data: {name: digits, clients: 6, imbalance: 5}
  local: {lr: !grid [0.05, 0.1], batch: 16}
  rounds: 60
  clients_per_round: 3
  evaluate: {every: 5}
  failures: {checkpoint_s: 0}
  seed: !grid [0, 1, 2]
"""

TRIALS = [f"{i:04d}" for i in range(6)]


def check_tracking(out, name):
    """Every trial of a sweep has one run with exactly the points of its log, below one parent."""
    found = runs(out / "mlflow.db", name)
    (parent,) = (id for id, (_, above) in found.items() if above is None)
    trials = summary(out / name)
    assert {id: above for id, (_, above) in found.items()} == {parent: None} | {t["run_id"]: parent for t in trials}
    assert {end for end, _ in found.values()} == {"FINISHED"}
    for trial in trials:
        assert stored(out / "mlflow.db", trial["run_id"]) == logged(out / name / "trials" / trial["id"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_after_two_of_six_trials(tmp_path, scratch, chance, signum):
    file, out = tmp_path / "six.yaml", tmp_path / "out"
    file.write_text(SIX)
    trials = out / "six" / "trials"
    common = ["--out", out, "--num-cpus", 2]
    with started(file, *common, scratch=scratch) as process:
        until(lambda: sum(status(trials / id) == "FINISHED" for id in TRIALS) >= 2, process)
        time.sleep(chance.uniform(0, 2) if signum == signal.SIGKILL else 0)
        if signum == signal.SIGKILL:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
            process.wait(timeout=20)
            assert process.returncode == 130
        assert not gone(process.pid)
    done = [id for id in TRIALS if status(trials / id) == "FINISHED"]
    assert 2 <= len(done) < 6, "stopped in the middle"
    kept = {id: [(p.stat().st_mtime_ns, p.read_bytes()) for p in files(trials / id)] for id in done}

    code, text, error = finished("--name", "six", "--resume", *common, scratch=scratch)
    assert code == 0, text + error
    assert [t["status"] for t in summary(out / "six")] == ["FINISHED"] * 6
    for trial in summary(out / "six"):
        assert trial["fingerprint"] == in_process(trials / trial["id"])
    for id in done:
        assert [(p.stat().st_mtime_ns, p.read_bytes()) for p in files(trials / id)] == kept[id], "not run again"
    check_tracking(out, "six")
    assert not [*scratch.iterdir()]


def files(trial):
    """Return what a trial that has ended never writes again."""
    return [trial / "metrics.jsonl", trial / "status.json", trial / "checkpoint" / "manifest.json"]


@pytest.mark.timeout(600)
def test_two_sweeps_and_a_reader_in_one_database(tmp_path, scratch):
    """They also share the work that they have in common: each trial of one is a trial of the other."""
    out, names = tmp_path / "out", ["one", "two"]
    for name in names:
        (tmp_path / f"{name}.yaml").write_text(SIX)
    words = ["--out", out, "--num-cpus", 2]
    looks = 0
    with (
        started(tmp_path / "one.yaml", *words, scratch=scratch) as one,
        started(tmp_path / "two.yaml", *words, scratch=scratch) as two,
    ):
        deadline = time.monotonic() + 240
        while one.poll() is None or two.poll() is None:
            assert time.monotonic() < deadline
            if (out / "mlflow.db").exists():
                client = MlflowClient(f"sqlite:///{out}/mlflow.db")
                client.search_runs([e.experiment_id for e in client.search_experiments()])
                looks += 1
            time.sleep(0.2)
        said = "".join(text for process in (one, two) for text in process.communicate())
        assert (one.returncode, two.returncode) == (0, 0), said
    assert looks > 10
    assert "locked" not in said
    for name in names:
        assert [t["status"] for t in summary(out / name)] == ["FINISHED"] * 6
        check_tracking(out, name)
    pairs = list(zip(*(summary(out / name) for name in names), strict=True))
    assert all(a["fingerprint"] == b["fingerprint"] for a, b in pairs)
    assert len({a["fingerprint"] for a, _ in pairs}) == 6
    assert pairs[0][0]["fingerprint"] == in_process(out / "one" / "trials" / "0000")
    assert not [*scratch.iterdir()]


# Signals ------------------------------------------------------------------------------------------------------------

LONG = """\
data: {name: digits, clients: 6}
rounds: 100000
clients_per_round: 3
evaluate: {every: 1000}
failures: {checkpoint_s: 0}
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["while it starts", "while it trains"])
def test_a_signal_ends_everything_in_order(tmp_path, scratch, chance, signum, when):
    (tmp_path / "long.yaml").write_text(LONG)
    out = tmp_path / "out"
    trial = out / "long" / "trials" / "0000"
    with started(tmp_path / "long.yaml", "--out", out, "--num-cpus", 2, scratch=scratch) as process:
        if when == "while it trains":
            wanted = chance.randint(1, 20)
            until(lambda: rounds(trial) >= wanted, process)
            until(lambda: runs(out / "mlflow.db", "long") if (out / "mlflow.db").exists() else False, process)
        else:
            until(lambda: (out / "long" / "sweep.yaml").exists(), process)
            time.sleep(chance.uniform(0, 8))
        began = time.monotonic()
        process.send_signal(signum)
        text, error = process.communicate(timeout=60)
        print(f"{time.monotonic() - began:.1f} s", text, error)
        assert time.monotonic() - began < 15
        assert process.returncode == 128 + signum
        assert not gone(process.pid, 5)
    assert "Traceback" not in error
    assert "--resume" in text
    assert not [*scratch.iterdir()]
    if when == "while it trains":
        assert status(trial) == "KILLED"
        RunDirectory(trial).load()  # refuses what is damaged
        assert {end for end, _ in runs(out / "mlflow.db", "long").values()} == {"KILLED"}


def test_a_second_signal_ends_it_at_once_and_the_next_run_tidies_up(tmp_path, scratch):
    (tmp_path / "long.yaml").write_text(LONG)
    out = tmp_path / "out"
    with started(tmp_path / "long.yaml", "--out", out, "--num-cpus", 2, scratch=scratch) as process:
        until(lambda: rounds(out / "long" / "trials" / "0000") >= 3, process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert time.monotonic() - began < 5
        until(lambda: not any(called(process.pid, name) for name in WORKING), seconds=30)
    words = settings(rounds=1)
    code, text, error = finished(
        tmp_path / "long.yaml", *words, "--name", "next", "--out", out, "--num-cpus", 2, scratch=scratch
    )
    assert code == 0, text + error
    assert not [*scratch.iterdir()]
    assert len(lines(out / "next" / "trials" / "0000")) == 1
