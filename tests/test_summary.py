"""What a sweep's numbers become: by hand, from written logs."""

import json

import pytest

from orchestrator.summary import best, configurations, headline, main, markdown, table, write_summary
from orchestrator.sweep_file import Search

VALUES = {"0000": [0.5, 0.9, 0.6], "0001": [0.4, 0.5, 0.8], "0002": [0.9, 0.2, 0.65]}
PARAMS = {"0000": {"mu": 1, "seed": 0}, "0001": {"mu": 1, "seed": 1}, "0002": {"mu": 2, "seed": 0}}


@pytest.fixture
def summary(tmp_path):
    for id, values in VALUES.items():
        folder = tmp_path / "trials" / id
        folder.mkdir(parents=True)
        name = f"fedprox mu={PARAMS[id]['mu']} seed={PARAMS[id]['seed']}"
        (folder / "trial.json").write_text(json.dumps({"id": id, "name": name, "params": PARAMS[id]}))
        (folder / "status.json").write_text(json.dumps({"status": "FINISHED", "fingerprint": "f"}))
        lines = [
            {
                "round": i + 1,
                "phase": "a.b",
                "time": 0,
                "metrics": {"generic/acc": v, "train/loss": v, "time/round": 2.0},
            }
            for i, v in enumerate(values)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    return write_summary(tmp_path, Search(metric="generic/acc"), {"0000": "run"})


def test_last_and_best_of_every_metric(summary, tmp_path):
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    first = summary["trials"][0]
    assert (first["last"]["generic/acc"], first["best"]["generic/acc"]) == (0.6, 0.9)
    assert first["best_at"]["generic/acc"] == {"phase": "a.b", "round": 2}
    assert (first["best"]["train/loss"], first["best_at"]["train/loss"]["round"]) == (0.5, 1), "a loss is best when low"
    assert first["seconds"] == 6.0
    assert (first["run_id"], summary["trials"][1]["run_id"]) == ("run", None)


def test_configurations_are_ranked_by_their_mean_over_seeds(summary):
    """0.6 and 0.8 over two seeds beat 0.65 of one."""
    assert [(c.name, len(c.trials)) for c in configurations(summary)] == [("fedprox mu=1", 2), ("fedprox mu=2", 1)]
    winner = best(summary)
    assert winner.name == "fedprox mu=1"
    assert winner.show("generic/acc") == "0.7000 ± 0.1414"
    assert winner.show("personal/acc_dist") == "-"
    assert best(summary | {"mode": "min"}).name == "fedprox mu=2"


def test_a_failed_trial_does_not_count(summary):
    summary["trials"][1]["status"] = "FAILED"
    assert best(summary).name == "fedprox mu=2"


def test_tables(summary, tmp_path, monkeypatch, capsys):
    assert markdown(summary, ["generic/acc"]).splitlines() == [
        "| name | seeds | generic/acc |",
        "|---|---|---|",
        "| fedprox mu=1 | 2 | 0.7000 ± 0.1414 |",
        "| fedprox mu=2 | 1 | 0.6500 |",
    ]
    assert table(summary).row_count == 2
    monkeypatch.setattr("sys.argv", ["summary", str(tmp_path), "generic/acc"])
    assert main() == 0
    assert "0.7000 ± 0.1414" in capsys.readouterr().out


def test_a_sweep_of_pixels_has_its_columns_before_there_are_scores():
    waiting = [{"last": {}}]
    assert "personal/miou" in headline(waiting, "validation/miou")
    assert "personal/acc_dist" in headline(waiting, "validation/acc_owned")
    assert "personal/miou" in headline([{"last": {"personal/miou": 0.3}}], "train/loss")
