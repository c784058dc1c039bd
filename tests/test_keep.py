"""What is kept of a sweep: everything that tables, reports and summaries show, and nothing that weighs much."""

import json
import shutil
import subprocess
import sys

import pytest

from orchestrator.checkpoint import set_status
from orchestrator.keep import keep, thinned
from orchestrator.runs import read_source
from orchestrator.summary import history


def shown(source):
    """Return what is read of each trial, but for the clock's and the bytes' last and best round."""
    records = [run.record() for run in source.runs]
    for record in records:
        del record["run"], record["best_at"]
        for part in record["last"], record["best"]:
            for metric in [m for m in part if m.startswith(("time/", "bytes/", "train/"))]:
                del part[metric]
        record["seconds"] = pytest.approx(record["seconds"])
    return records


def test_the_copy_is_read_like_the_sweep(finished_sweep, tmp_path):
    assert keep(finished_sweep, tmp_path) == 9
    copy = read_source(tmp_path / "methods")
    assert shown(read_source(finished_sweep)) == shown(copy)
    assert [run.per_client for run in copy.runs] == [run.per_client for run in read_source(finished_sweep).runs]
    assert not list((tmp_path / "methods").rglob("models*"))
    for name, count in {"per_class.csv": 9, "data.json": 9}.items():
        assert len(list((tmp_path / "methods").rglob(name))) == count
    kept = [path for path in (tmp_path / "methods").rglob("*") if path.is_file()]
    assert not [path for path in kept if path.suffix in (".safetensors", ".npz", ".pkl")]
    assert sum(path.stat().st_size for path in kept) < 300_000


def test_only_what_has_ended_is_kept_and_the_command_says_how_much(finished_sweep, tmp_path):
    sweep = shutil.copytree(finished_sweep, tmp_path / "methods")
    set_status(sweep / "trials" / "0002", "RUNNING")
    words = [sys.executable, "-m", "orchestrator.keep"]
    done = subprocess.run([*words, str(sweep), str(tmp_path / "kept")], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"8 trials kept in {tmp_path}/kept/methods (")
    assert not (tmp_path / "kept" / "methods" / "trials" / "0002").exists()
    wrong = subprocess.run([*words, str(tmp_path), str(tmp_path / "kept")], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "it has no trials/" in wrong.stderr


def test_pictures_are_kept_and_no_place_of_this_machine(finished_sweep, tmp_path):
    sweep = shutil.copytree(finished_sweep, tmp_path / "methods")
    (sweep / "pictures").mkdir(exist_ok=True)
    (sweep / "pictures" / "rounds.svg").write_text("<svg/>")
    (sweep / "report.html").write_text(f"<p>{sweep}/trials/0000</p>")
    keep(sweep, tmp_path / "kept")
    assert (tmp_path / "kept" / "methods" / "pictures" / "rounds.svg").read_text() == "<svg/>"
    for path in (tmp_path / "kept").rglob("*.*"):
        assert not path.is_file() or str(sweep).encode() not in path.read_bytes(), path


def test_a_line_stands_for_the_rounds_before_it(finished_sweep):
    lines = history(finished_sweep / "trials" / "0000")
    for line in lines[:-1]:
        line["metrics"].pop("time/evaluate")
    (only,) = thinned(lines)
    assert only["round"] == lines[-1]["round"]
    for part in ("time/train", "bytes/up"):
        assert only["metrics"][part] == sum(line["metrics"][part] for line in lines)
    assert only["metrics"]["personal/acc_dist"] == lines[-1]["metrics"]["personal/acc_dist"]


def test_no_traceback_is_kept(finished_sweep, tmp_path):
    sweep = shutil.copytree(finished_sweep, tmp_path / "methods")
    trials = [{"id": "0000", "error": "it diverged\nTraceback of /here"}, {"id": "0001", "error": None}]
    (sweep / "summary.json").write_text(json.dumps({"schema": 1, "trials": trials}))
    keep(sweep, tmp_path / "to")
    kept = json.loads((tmp_path / "to" / "methods" / "summary.json").read_text())
    assert kept == {"schema": 1, "trials": [{"id": "0000", "error": "it diverged"}, {"id": "0001", "error": None}]}
