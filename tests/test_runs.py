"""Run directories as they may be found: whole, unfinished, damaged, of another version, or not ours at all."""

import json
import shutil

import numpy as np
import pytest

from orchestrator.runs import NothingHere, compared, read_run, read_source, runs_of
from orchestrator.summary import configurations


@pytest.fixture
def sweep(finished_sweep, tmp_path):
    return shutil.copytree(finished_sweep, tmp_path / "methods")


@pytest.fixture
def trial(sweep):
    return sweep / "trials" / "0006"


def test_a_whole_sweep_is_read_as_its_summary_has_it(sweep):
    source, summary = read_source(sweep), json.loads((sweep / "summary.json").read_text())
    assert (source.metric, source.mode, source.notes) == ("personal/acc_dist", "max", [])
    assert [run.notes for run in source.runs] == [[]] * 9
    for run, told in zip(source.runs, summary["trials"], strict=True):
        assert {k: v for k, v in run.record().items() if k != "run"} == {k: v for k, v in told.items() if k != "run_id"}
    ours, theirs = compared([source]), configurations(summary)
    assert [(c.name, c.show("personal/acc_dist")) for c in ours] == [
        (c.name, c.show("personal/acc_dist")) for c in theirs
    ]


def test_the_tables_are_those_of_the_last_phase(trial):
    run = read_run(trial)
    assert run.per_client[0]["acc_dist"] is not None
    assert np.mean([row["acc_dist"] for row in run.per_client if row["acc_dist"] is not None]) == pytest.approx(
        run.record()["last"]["personal/acc_dist"]
    )
    assert run.counts.sum(0).tolist() == run.data["class_counts"] == [int(row["train"]) for row in run.per_class]


def tear(path):
    path.write_bytes(path.read_bytes()[:-20])


def spoil(path):
    path.write_bytes(b"\xff\x00{[" + path.read_bytes()[40:])


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGES = [
    (tear, "metrics.jsonl", "the last line of metrics.jsonl is torn"),
    (remove, "metrics.jsonl", "metrics.jsonl is missing"),
    (lambda p: p.write_text(""), "metrics.jsonl", "metrics.jsonl has no lines"),
    (lambda p: p.write_text('{"round": 1}\n[]\n' + p.read_text()), "metrics.jsonl", "2 of 5 lines of metrics.jsonl"),
    (spoil, "trial.json", "trial.json is damaged"),
    (lambda p: p.write_text("[1]"), "trial.json", "trial.json is damaged"),
    (remove, "trial.json", "trial.json is missing"),
    (spoil, "status.json", "status.json is damaged"),
    (remove, "experiment.yaml", "experiment.yaml is missing"),
    (lambda p: p.write_text("a: [b"), "experiment.yaml", "experiment.yaml is damaged"),
    (tear, "artifacts/data.json", "data.json is damaged"),
    (tear, "artifacts/split.npz", "split.npz is damaged"),
    (remove, "artifacts/split.npz", "split.npz is missing"),
    (
        lambda p: p.write_text("class,train\n0,many\n"),
        "artifacts/2-finetune.tune/per_class.csv",
        "per_class.csv is damaged",
    ),
    (remove, "artifacts", "there are no tables per class and per client"),
]


@pytest.mark.parametrize(("harm", "file", "note"), DAMAGES, ids=[f"{f}-{i}" for i, (_, f, _) in enumerate(DAMAGES)])
def test_what_is_damaged_is_named_and_the_rest_is_read(trial, harm, file, note):
    whole = read_run(trial)
    harm(trial / file)
    run = read_run(trial)
    assert any(note in told for told in run.notes), run.notes
    assert run.record()["id"] == "0006"
    if file != "metrics.jsonl":
        assert run.series("personal/acc_dist") == whole.series("personal/acc_dist")
    if not file.startswith("artifacts"):
        assert run.per_client == whole.per_client


def test_a_trial_without_its_name_goes_by_its_directory(trial):
    (trial / "trial.json").unlink()
    assert (read_run(trial).name, read_run(trial).id) == ("0006", "0006")


def test_what_has_not_ended_is_told_and_does_not_count(sweep, trial):
    (trial / "status.json").write_text('{"status": "RUNNING"}')
    waiting = sweep / "trials" / "0007"
    for name in ("status.json", "metrics.jsonl"):
        (waiting / name).unlink()
    assert "it has not ended (status RUNNING)" in read_run(trial).notes[0]
    assert (read_run(waiting).status, read_run(waiting).notes) == ("WAITING", ["it has not begun"])
    (both,) = (c for c in compared([read_source(sweep)]) if len(c.trials) == 3 and "finetune" in c.name)
    assert [run.id for run in runs_of(both)] == ["0008"]


def test_another_schema_is_told_and_the_trials_are_read(sweep):
    (sweep / "summary.json").write_text('{"schema": 7, "trials": 5}')
    source = read_source(sweep)
    assert source.notes == ["summary.json has schema 7, this version reads 1; it is not used"]
    assert len(source.runs) == 9


def test_a_sweep_that_has_not_ended_is_ranked_by_its_own_metric(sweep):
    (sweep / "summary.json").unlink()
    text = (sweep / "sweep.yaml").read_text()
    (sweep / "sweep.yaml").write_text(text.replace("personal/acc_dist, mode: max", "train/loss, mode: min"))
    source = read_source(sweep)
    assert (source.metric, source.mode) == ("train/loss", "min")
    assert "!grid" in source.text


def test_a_lost_trial_is_told(sweep):
    shutil.rmtree(sweep / "trials" / "0003")
    assert read_source(sweep).notes == ["trials/0003 is missing, though summary.json knows it"]


def test_an_empty_sweep_says_so(tmp_path):
    (tmp_path / "trials").mkdir()
    notes = read_source(tmp_path).notes
    assert any("summary.json is missing" in note and "--resume" in note for note in notes)
    assert any("there are no trials" in note for note in notes)


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_what_is_not_ours_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NothingHere, match="give"):
        read_source(tmp_path / name)


def test_the_same_experiment_in_two_directories_is_one_configuration(finished_sweep):
    """Seeds 0 and 1 of a method, each given as a directory of its own, are two seeds of one configuration."""
    trials = finished_sweep / "trials"
    found = compared([read_source(trials / id) for id in ("0003", "0004", "0006")])
    assert [(c.name, len(c.trials)) for c in found] == [("fedavg", 2), ("fedavg+finetune", 1)]
