"""The command as people and scripts use it: real runs in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import driver, finish
from mlflow.tracking import MlflowClient

from algorithms.fedavg import FedAvg
from algorithms.finetune import FineTune
from orchestrator.experiment import Experiment
from orchestrator.prefixes import code

SWEEP = """\
search: {metric: generic/acc}
experiment:
  data: {name: digits, clients: 4, imbalance: 5}
  algorithm: [fedavg, {finetune: {epochs: 1}}]
  local: {lr: !grid [0.05, 1.0e+30], batch: 16}
  rounds: 4
  clients_per_round: 2
  evaluate: {every: 2}
"""


PLAIN = "data: {name: digits, clients: 6}\nclients_per_round: 3\n"


def command(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.tune", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def run(*arguments):
    process = command(*arguments)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def left_behind(session):
    """Return the processes of a session that still live, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if stat[0] != "Z" and int(stat[3]) == session:
                found.append((path / "cmdline").read_text().replace("\0", " ")[:80])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def gone(session, seconds=15):
    """Wait until nothing of a session lives."""
    deadline = time.monotonic() + seconds
    while left_behind(session) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left_behind(session)


def in_process(trial: Path) -> str:
    """Return the fingerprint of the same experiment run without Ray."""
    tree = yaml.safe_load((trial / "experiment.yaml").read_text())
    return finish(driver(Experiment.model_validate(tree))).fingerprint()


def test_a_sweep_with_a_trial_that_fails(tmp_path):
    (tmp_path / "small.yaml").write_text(SWEEP)
    process = command(tmp_path / "small.yaml", "--out", tmp_path / "out", "--num-cpus", 2)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert not gone(process.pid)
    folder = tmp_path / "out" / "small"

    summary = json.loads((folder / "summary.json").read_text())
    assert {"schema", "name", "metric", "mode", "trials"} == set(summary)
    assert [summary[k] for k in ("schema", "name", "metric", "mode")] == [1, "small", "generic/acc", "max"]
    good, bad = summary["trials"]
    assert (good["status"], bad["status"]) == ("FINISHED", "FAILED")
    assert good["params"] == {"local.lr": 0.05}
    assert good["best"]["generic/acc"] >= good["last"]["generic/acc"] > 0
    assert set(good["best_at"]["personal/acc_dist"]) == {"phase", "round"}
    assert good["fingerprint"] == in_process(folder / "trials" / good["id"])
    status = json.loads((folder / "trials" / good["id"] / "status.json").read_text())
    assert status["code"] == code((FedAvg, FineTune)), "which source has computed it"
    assert "not finite" in bad["error"]

    lines = [json.loads(line) for line in (folder / "trials/0000/metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["phase"]) for line in lines] == [
        (1, "fedavg.train"), (2, "fedavg.train"), (3, "fedavg.train"), (4, "fedavg.train"), (5, "finetune.tune"),
    ]  # fmt: skip
    assert (folder / "trials/0000/artifacts/2-finetune.tune/per_client.csv").exists()
    assert (folder / "trials/0000/artifacts/split.npz").exists()

    assert "best: fedavg+finetune lr=0.05 (trial 0000): highest generic/acc in the last round, 0." in out
    assert "trial 0001 failed: client" in out
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/out/mlflow.db" in out

    client = MlflowClient(f"sqlite:///{tmp_path}/out/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "small"]
    runs = {r.info.run_id: r for r in client.search_runs([experiment.experiment_id])}
    parents = [r for r in runs.values() if "mlflow.parentRunId" not in r.data.tags]
    assert len(runs) == 3
    assert len(parents) == 1
    assert parents[0].info.status == "FAILED"
    child = runs[good["run_id"]]
    assert child.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
    assert child.info.status == "FINISHED"
    assert runs[bad["run_id"]].info.status == "FAILED"
    assert child.data.params["local.lr"] == "0.05"
    history = client.get_metric_history(child.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
        (line["round"], line["metrics"]["train/loss"]) for line in lines
    ]
    assert len(child.data.metrics) <= 60
    assert "git.revision" in parents[0].data.tags


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([signal.SIGKILL], id="SIGKILL"),
        pytest.param([signal.SIGTERM, signal.SIGINT], id="SIGTERM, SIGINT", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_resumed_to_the_same_bits(tmp_path, sent):
    """Stop it in the middle of its rounds, again and again; the last command ends it as if nothing had happened."""
    settings = ["algorithm=[fedavg, {finetune: {epochs: 1}}]", "rounds=80", "evaluate.every=10", "local={batch: 16}"]
    settings += ["failures.checkpoint_s=0"]
    changes = [word for setting in settings for word in ("--set", setting)]
    common = ["--out", tmp_path, "--name", "broken", "--num-cpus", 1]
    (tmp_path / "plain.yaml").write_text(PLAIN)
    trial = tmp_path / "broken" / "trials" / "0000"

    def rounds():
        log = trial / "metrics.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    started = [tmp_path / "plain.yaml", *common, *changes]
    for signum in sent:
        before, process, deadline = rounds(), command(*started), time.monotonic() + 120
        while rounds() < before + 7:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if signum == signal.SIGKILL:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        began = time.monotonic()
        process.communicate(timeout=60)
        if signum != signal.SIGKILL:
            assert process.returncode == 128 + signum
            assert time.monotonic() - began < 20
            assert not gone(process.pid)
            assert json.loads((trial / "status.json").read_text())["status"] == "KILLED"
        assert rounds() < 81, "it was stopped before its end"
        started = [*common, "--resume"]

    code, _, err = run(*common, "--resume")
    assert code == 0, err
    summary = json.loads((tmp_path / "broken" / "summary.json").read_text())
    assert summary["trials"][0]["status"] == "FINISHED"
    assert summary["trials"][0]["fingerprint"] == in_process(trial)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    ids = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(ids)
    assert len(runs) == 2, "one parent and one child, whatever happened"
    assert {r.info.status for r in runs} == {"FINISHED"}
    history = client.get_metric_history(summary["trials"][0]["run_id"], "time/round")
    assert sorted(m.step for m in history) == list(range(1, 82)), "no round lost and none twice"


def test_wrong_input_is_answered_in_a_line_and_nothing_starts(tmp_path):
    (tmp_path / "typo.yaml").write_text("data: {name: digits}\nalgoritm: fedavg\n")
    code, _, err = run(tmp_path / "typo.yaml", "--out", tmp_path / "out")
    assert code == 2
    assert err == f"error: {tmp_path}/typo.yaml:2:1: algoritm: unknown key 'algoritm'; did you mean 'algorithm'?\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "../x"], "--name '../x': use letters"),
        (["--resume", "--name", "nothing"], "there is no sweep in"),
        (["--address", "127.0.0.1:9"], "--address 127.0.0.1:9: nobody answers there"),
        (["--set", "data.clients=5000"], "5000 clients"),
        (["--set", "model=resnet50"], "model: "),
        (["--set", "data.name=cifar10", "--set", "data.root=nowhere"], "cifar10"),
    ],
)
def test_mistakes_that_need_the_data_are_found_before_ray_starts(tmp_path, arguments, message):
    code, _, err = run("--out", tmp_path / "out", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 12
    assert not (tmp_path / "out").exists()


def test_what_the_machine_cannot_hold_is_refused_at_once(tmp_path):
    code, _, err = run("--out", tmp_path / "out", "--num-cpus", 2, "--set", "cluster.actors=64")
    assert code == 2
    assert "asks for 64 client actors with 1 CPU" in err
    assert "has 2 CPU" in err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_everything_and_starts_nothing(tmp_path):
    (tmp_path / "plain.yaml").write_text(PLAIN)
    code, out, err = run(tmp_path / "plain.yaml", "--dry-run", "--out", tmp_path / "out", "--set", "seed=!grid [0,1]")
    assert code == 0, err
    assert "2 trial(s)" in out
    first = out.split("# trial 0001")[0].split("\n", 1)[1]
    assert Experiment.model_validate(yaml.safe_load(first)).rounds == 20
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_early_stopping_ends_the_worst_in_their_first_phase(tmp_path):
    (tmp_path / "asha.yaml").write_text(
        "search: {metric: personal/acc_owned, scheduler: asha}\n"
        "experiment:\n"
        "  data: {name: digits, clients: 4, imbalance: 5}\n"
        "  algorithm: [fedavg, {finetune: {epochs: 1}}]\n"
        "  local: {lr: !grid [0.1, 0.05, 1.0e-7, 1.0e-8, 1.0e-9, 1.0e-10], batch: 16}\n"
        "  rounds: 16\n"
        "  evaluate: {every: 1}\n"
    )
    code, out, err = run(tmp_path / "asha.yaml", "--out", tmp_path, "--num-cpus", 2)
    assert code == 0, err
    trials = json.loads((tmp_path / "asha" / "summary.json").read_text())["trials"]
    stopped = [t for t in trials if t["status"] == "STOPPED"]
    assert stopped
    assert "stopped" in out
    assert {t["status"] for t in trials} == {"STOPPED", "FINISHED"}
    assert all(t["best_at"]["train/loss"]["phase"] == "fedavg.train" for t in stopped)
