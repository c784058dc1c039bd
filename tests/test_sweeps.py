"""Sweeps as people run them, in real processes: shared work, extension, schedulers, budget, GPUs."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient
from test_command import command, in_process, run

import search_spaces
from orchestrator.space import leaves, trials
from orchestrator.sweep_file import read
from orchestrator.tune import main

CHAIN = """\
search: {metric: personal/acc_owned, samples: 2}
experiment:
  data: {name: digits, clients: 6, imbalance: 5}
  algorithm: [fedavg, {ecl: {epochs: 1, num_experts: !grid [2, 3], expert_logit_weight: !uniform [0, 1]}}]
  local: {lr: 0.1, batch: 16}
  rounds: 3
  clients_per_round: 3
  evaluate: {every: 2}
"""


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_shared_work_extended_by_samples_and_by_rounds(tmp_path, capsys):
    file, out = tmp_path / "chain.yaml", tmp_path / "runs"
    file.write_text(CHAIN)
    folder = out / "chain"

    code, text, error = run(file, "--out", out)
    assert code == 0, text + error
    found = summary_of(folder)["trials"]
    assert len(found) == 4
    whole = [t for t in found if not t["reused"]]
    assert len(whole) == 1, "phase I is trained once"
    experts = [t for t in found if t["reused"] == [f"fedavg.train: rounds 1 to 3 of chain/{whole[0]['id']}"]]
    assert len(experts) == 1, "the other number of experts goes on from there"
    assert sum(any("ecl.specialise" in each for each in t["reused"]) for t in found) == 2, "a weight trains nothing"
    for trial in found:
        assert trial["fingerprint"] == in_process(folder / "trials" / trial["id"])

    code, text, error = run("--name", "chain", "--out", out, "--extend", "samples=3", "--no-share")
    assert code == 0, text + error
    more = summary_of(folder)["trials"]
    assert [t["fingerprint"] for t in more[:4]] == [t["fingerprint"] for t in found]
    assert len(more) == 6
    assert not more[4]["reused"]
    assert not more[5]["reused"]
    assert len({t["params"]["algorithm.1.ecl.expert_logit_weight"] for t in more}) == 3

    code, text, error = run("--name", "chain", "--out", out, "--extend", "rounds=5")
    assert code == 0, text + error
    longer = summary_of(folder)["trials"]
    for trial in longer:
        path = folder / "trials" / trial["id"]
        assert yaml.safe_load((path / "experiment.yaml").read_text())["rounds"] == 5
        assert trial["fingerprint"] == in_process(path)
        assert len(list((path / "rounds-3" / "metrics.jsonl").open())) == 4, "what was there is kept"
    assert sum("rounds 1 to 3" in " ".join(t["reused"]) for t in longer) >= 1

    client = MlflowClient(f"sqlite:///{out}/mlflow.db")
    (experiment,) = (e for e in client.search_experiments() if e.name == "chain")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (r for r in runs if "mlflow.parentRunId" not in r.data.tags)
    children = {r.info.run_id: r for r in runs if r is not parent}
    assert set(children) == {t["run_id"] for t in longer}, "one run per trial; those of fewer rounds are deleted"
    for trial in longer:
        steps = [m.step for m in client.get_metric_history(trial["run_id"], "time/train")]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert ("reused" in children[trial["run_id"]].data.tags) == bool(trial["reused"])

    for wrong, message in [
        ("rounds=5", "has 5 rounds already"),
        ("samples=3", "has 3 samples already"),
        ("rounds=x", "must be rounds=N or samples=N"),
        ("epochs=4", "must be rounds=N or samples=N"),
    ]:
        assert main(["--name", "chain", "--out", str(out), "--extend", wrong]) == 2
        assert message in capsys.readouterr().err


POPULATION = """\
search: {metric: generic/acc, samples: %d, scheduler: %s}
experiment:
  data: {name: digits, clients: 6, imbalance: 5}
  algorithm: [{fedprox: {mu: !loguniform [0.001, 1.0]}}, {finetune: {epochs: 1}}]
  local: {lr: !choice [0.0001, 0.05, 0.1], batch: 16}
  rounds: 9
  clients_per_round: 3
  evaluate: {every: 1}
"""


@pytest.mark.parametrize(
    ("scheduler", "samples"),
    [
        pytest.param("{pbt: {interval: 3, quantile: 0.5}}", 4, marks=pytest.mark.slow),
        pytest.param("hyperband", 9, marks=pytest.mark.slow),  # as many as its widest bracket of nine rounds holds
        pytest.param("{median: {grace: 2, fewest: 2}}", 4, marks=pytest.mark.slow),
    ],
)
def test_schedulers_act_in_the_first_phase(tmp_path, scheduler, samples):
    file, out = tmp_path / "population.yaml", tmp_path / "runs"
    file.write_text(POPULATION % (samples, scheduler))
    code, text, error = run(file, "--out", out)
    assert code == 0, text + error
    found = summary_of(out / "population")["trials"]
    assert {t["status"] for t in found} <= {"FINISHED", "STOPPED"}
    assert any(t["status"] == "FINISHED" for t in found)
    for trial in found:
        path = out / "population" / "trials" / trial["id"]
        lines = [json.loads(line) for line in (path / "metrics.jsonl").open()]
        assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
        assert len(lines) == 10 if trial["status"] == "FINISHED" else len(lines) < 9
    if "pbt" in scheduler:
        lineages = [*(out / "population" / "trials").glob("*/lineage.jsonl")]
        assert lineages, "somebody has taken over another's weights"
        for lineage in lineages:
            note = json.loads(lineage.read_text().splitlines()[-1])
            experiment = yaml.safe_load((lineage.parent / "experiment.yaml").read_text())
            assert experiment["local"]["lr"] == note["values"]["local.lr"]
            assert 0.001 <= note["values"]["algorithm.0.fedprox.mu"] <= 1.0
            assert note["from"] != lineage.parent.name
    else:
        assert any(t["status"] == "STOPPED" for t in found)


@pytest.mark.slow
def test_two_trials_share_a_gpu_until_time_is_up(tmp_path):
    """Logical GPUs: half of one for each trial's actor; the budget ends the sweep, and what is left can be resumed."""
    file, out = tmp_path / "gpu.yaml", tmp_path / "runs"
    file.write_text(
        """\
search: {budget: 30s}
experiment:
  data: {name: digits, clients: 6}
  rounds: !grid [3, 4, 100000]
  clients_per_round: 3
  cluster: {actors: 1, gpu_per_actor: 0.5}
"""
    )
    code, text, error = run(file, "--out", out, "--num-gpus", "1", "--num-cpus", "2")
    assert code == 0, text + error
    assert "the time budget is used up" in text
    assert "--resume" in text
    found = summary_of(out / "gpu")["trials"]
    assert [t["status"] for t in found] == ["FINISHED", "FINISHED", "KILLED"]
    states = [json.loads((out / "gpu" / "trials" / t["id"] / "status.json").read_text()) for t in found[:2]]
    assert [actor["gpus"] for state in states for actor in state["actors"]] == [["0"], ["0"]]
    spans = []
    for trial in found:
        times = [json.loads(x)["time"] for x in (out / "gpu" / "trials" / trial["id"] / "metrics.jsonl").open()]
        spans.append((times[0], times[-1]))
    assert spans[2][0] < spans[1][1] or spans[1][0] < spans[0][1], "two were at work at the same time"


FILES = sorted(Path(search_spaces.__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_search_spaces_say_their_command_and_expand(file):
    command = file.read_text().splitlines()[0]
    assert command in ("# python -m orchestrator.tune", f"# python -m orchestrator.tune search_spaces/{file.name}")
    assert trials(read(file))


#: what the sweep of each method must leave open
OPEN = {
    "ecl": {"expert_logit_weight", "num_experts", "alpha"},
    "ldae": {"group_fraction", "num_experts", "alpha"},
    "fedloge": {"sparsity", "target_norm", "alpha"},
    "bpfed": {"smooth_max", "smooth_power", "mixup_alpha", "alpha"},
    "mupfl": {"update_similarity_weight", "features_per_class", "classifier_epochs", "kappa_min", "kappa_max", "alpha"},
}


@pytest.mark.parametrize("name", OPEN)
def test_each_method_has_a_sweep_over_its_hyperparameters_and_a_small_one(name):
    file = Path(search_spaces.__file__).with_name(f"{name}.yaml")
    opened = {path.rpartition(".")[2] for path in leaves(read(file))}
    assert opened - {"seed"} == OPEN[name]
    smoke = trials(read(file, preset="smoke"))
    assert {t.experiment.data.name for t in smoke} == {"digits"}
    assert sum(t.experiment.rounds for t in smoke) <= 200


PROPOSED = """\
search: {metric: personal/acc_owned, samples: 5, searcher: optuna}
experiment:
  data: {name: digits, clients: 6, imbalance: 5}
  local: {lr: !loguniform [0.01, 0.2], batch: 16}
  rounds: 12
  clients_per_round: 3
  evaluate: {every: 4}
  failures: {checkpoint_s: 0}
  seed: !grid [0, 1]
"""


@pytest.mark.slow
def test_proposals_go_on_after_a_kill(tmp_path):
    """What Optuna has proposed and learnt is in the sweep's directory: a kill costs no trial, and none is run twice."""
    file, out = tmp_path / "proposed.yaml", tmp_path / "runs"
    file.write_text(PROPOSED)
    process = command(file, "--out", out)
    folder, deadline = out / "proposed", time.monotonic() + 240
    while sum('"FINISHED"' in path.read_text() for path in folder.glob("trials/*/status.json")) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = {path.parent.name: path.read_text() for path in folder.glob("trials/*/experiment.yaml")}
    ended = {
        p.parent.name: p.stat().st_mtime_ns for p in folder.glob("trials/*/status.json") if "FINISHED" in p.read_text()
    }
    assert len(before) < 10

    code, text, error = run("--name", "proposed", "--out", out, "--resume")
    assert code == 0, text + error
    found = summary_of(folder)["trials"]
    assert [t["status"] for t in found] == ["FINISHED"] * 10
    for id, written in before.items():
        assert (folder / "trials" / id / "experiment.yaml").read_text() == written
    for id, stamp in ended.items():
        assert (folder / "trials" / id / "status.json").stat().st_mtime_ns == stamp, "what had ended was not run again"
    assert len({t["params"]["local.lr"] for t in found}) == 5
    assert all(t["fingerprint"] == in_process(folder / "trials" / t["id"]) for t in found[:4])
    client = MlflowClient(f"sqlite:///{out}/mlflow.db")
    (experiment,) = (e for e in client.search_experiments() if e.name == "proposed")
    assert len(client.search_runs([experiment.experiment_id])) == 11
