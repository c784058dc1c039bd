import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from conftest import driver, finish, tiny

from algorithms.params import Params
from orchestrator.checkpoint import CheckpointError, RunDirectory, fingerprint

TREE = {
    "model": Params.pack({"body.w": torch.ones(2, 3), "head.w": torch.zeros(2)}, {"body.mean": torch.ones(1)}),
    "numbers": [1, 2.5, True, None, "text"],
    "by client": {3: torch.arange(4), 7: (torch.tensor(1.5), {})},
}


def test_trees_come_back_as_they_were(tmp_path):
    RunDirectory(tmp_path).save(4, TREE, {5: {"w": torch.ones(2)}}, {5})
    run, memory = RunDirectory(tmp_path).load()
    assert fingerprint(run) == fingerprint(TREE)
    assert run["by client"][7][1] == {}
    assert run["model"] == TREE["model"]
    assert memory[5]["w"].tolist() == [1.0, 1.0]


def test_client_memories_are_written_as_increments_and_merged(tmp_path):
    directory, memory = RunDirectory(tmp_path), {}
    for round in range(1, 30):
        memory[round % 7] = {"x": torch.tensor([float(round)])}
        directory.save(round, {"round": round}, memory, {round % 7})
    files = {p.name for p in (tmp_path / "checkpoint").iterdir()}
    assert len(files) <= 13
    run, loaded = RunDirectory(tmp_path).load()
    assert run == {"round": 29}
    assert fingerprint(loaded) == fingerprint(memory)


def test_a_fingerprint_tells_values_types_and_names_apart():
    a = torch.ones(2)
    different = [a, a.double(), a.view(1, 2), a * 2, {"x": a}, {"y": a}, [a], 1, 1.0, True, "1", None]
    assert len({fingerprint(v) for v in different}) == len(different)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def damage(path, how):
    content = path.read_bytes()
    if how == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "remove":
        path.unlink()
    elif how == "link":
        path.unlink()
        path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "link"])
def test_what_is_damaged_is_refused_with_its_name(tmp_path, how):
    RunDirectory(tmp_path).save(1, TREE, {}, set())
    damage(tmp_path / "checkpoint" / "run-000001.safetensors", how)
    with pytest.raises(CheckpointError, match=r"run-000001\.safetensors is (damaged|missing)"):
        RunDirectory(tmp_path).load()


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "link", "swap"])
def test_the_checkpoint_before_stands_in_for_a_damaged_one(tmp_path, how):
    directory = RunDirectory(tmp_path)
    for round in (1, 2, 3):
        directory.save(round, {"round": round, "w": torch.full((9,), float(round))}, {round: {"x": 1.0}}, {round})
    kept = sorted(p.name for p in directory.checkpoints.glob("run-*"))
    assert kept == ["run-000002.safetensors", "run-000003.safetensors"], "no more than these two"
    if how == "swap":
        two, three = (directory.checkpoints / name for name in kept)
        content = two.read_bytes()
        two.write_bytes(three.read_bytes())
        three.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"run-000003\.safetensors is damaged"):
            RunDirectory(tmp_path).load()
        return
    damage(directory.checkpoints / kept[1], how)
    with pytest.warns(
        UserWarning, match=r"run-000003.safetensors is .*; going on from round 2, which was saved before"
    ):
        run, memory = RunDirectory(tmp_path).load()
    assert run["round"] == 2
    assert set(memory) == {1, 2}


def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_bits(tmp_path):
    experiment = tiny(algorithm="scaffold", rounds=6)
    run = driver(experiment, tmp_path)
    for _ in range(4):
        run.advance()
        run.checkpoint()
    damage(tmp_path / "checkpoint" / "run-000004.safetensors", "truncate")
    with pytest.warns(UserWarning, match="going on from round 3"):
        again = driver(experiment, tmp_path)
    assert again.round == 3
    assert finish(again).fingerprint() == finish(driver(experiment)).fingerprint()
    assert [line["round"] for line in again.directory.lines()] == [1, 2, 3, 4, 5, 6]


def test_a_pickle_is_never_executed(tmp_path):
    import hashlib
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/exploded",)

    RunDirectory(tmp_path).save(1, TREE, {}, set())
    content = pickle.dumps(Bomb())
    (tmp_path / "checkpoint" / "run-000001.safetensors").write_bytes(content)
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    manifest["sha256"]["run-000001.safetensors"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a file of ours"):
        RunDirectory(tmp_path).load()
    assert not (tmp_path / "exploded").exists()


def test_another_schema_is_refused(tmp_path):
    RunDirectory(tmp_path).save(1, TREE, {}, set())
    path = tmp_path / "checkpoint" / "manifest.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(CheckpointError, match="schema 99, this version reads 1"):
        RunDirectory(tmp_path).load()


def test_a_torn_last_line_is_dropped_and_logged_rounds_stay_as_they_are(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.log({"round": 1, "metrics": {"a": 1.0}})
    directory.log({"round": 2, "metrics": {"a": 2.0}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "met')
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    again = RunDirectory(tmp_path)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before, "cut short, which needs no room on the disk"
    again.log({"round": 2, "metrics": {"a": 99.0}})
    again.log({"round": 3, "metrics": {"a": 3.0}})
    assert [line["metrics"]["a"] for line in again.lines()] == [1.0, 2.0, 3.0]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    """A file-size limit stands for a full disk: the write fails with the path, its size and an intact past."""
    directory = RunDirectory(tmp_path)
    directory.save(1, {"w": torch.ones(10)}, {}, set())
    code = f"""
import resource, signal, torch
from pathlib import Path
from orchestrator.checkpoint import RunDirectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = RunDirectory(Path({str(tmp_path)!r}))
directory.load()
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
directory.save(2, {{"w": torch.ones(100_000)}}, {{}}, set())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cannot write" in done.stderr
    assert "run-000002.safetensors (4" in done.stderr
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {"manifest.json", "run-000001.safetensors"}
    assert RunDirectory(tmp_path).load()[0]["w"].tolist() == [1.0] * 10
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000


def test_a_finished_run_is_read_back_as_finished(tmp_path):
    run = finish(driver(tiny(), tmp_path))
    again = driver(tiny(), tmp_path)
    assert again.done
    assert again.fingerprint() == run.fingerprint()


def test_checkpoints_are_rare_unless_asked_for(tmp_path):
    run = driver(tiny(rounds=4), tmp_path)
    run.advance()
    assert run.directory.load() is None
    finish(run)
    assert run.directory.load()[0]["round"] == 4
