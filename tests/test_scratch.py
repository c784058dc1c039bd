"""The temporary directory of a run: private, gone at the end, and after a kill gone with the next start."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from test_tracking import ROOT

from orchestrator.scratch import scratch

HOLD = """
import signal, subprocess, sys
from orchestrator.scratch import scratch
with scratch() as folder:
    (folder / "log").write_text("much")
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
    print(folder, helper.pid, flush=True)
    signal.pause()
"""


def test_the_leavings_of_the_dead_go_and_those_of_the_living_stay(tmp_path, monkeypatch):
    (tmp_path / "fedtail-of-somebody").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    held = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for _ in range(2)
    ]
    try:
        said = [process.stdout.readline().split() for process in held]
        (dead, alive), helpers = (Path(folder) for folder, _ in said), [int(helper) for _, helper in said]
        held[0].kill()
        held[0].wait()
        assert (dead / "log").exists()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with scratch() as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert os.environ["TMPDIR"] == str(own)
            assert {*tmp_path.iterdir()} == {own, alive, tmp_path / "fedtail-of-somebody"}
            assert (alive / "log").exists()
            assert [lives(helper) for helper in helpers] == [False, True]
        assert {*tmp_path.iterdir()} == {alive, tmp_path / "fedtail-of-somebody"}
        assert os.environ["TMPDIR"] != str(own)
    finally:
        for process in held:
            process.kill()
            process.wait()
        os.kill(helpers[1], signal.SIGKILL)


def lives(pid):
    """Tell whether a process is there, and not only its exit code."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_nobody_who_was_started_for_it_outlives_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sleep = "import time; time.sleep(60)"
    with scratch() as own:
        inside = subprocess.Popen([sys.executable, "-c", sleep])  # TMPDIR is its only tie
        with open(own / "log", "w") as log:
            writing = subprocess.Popen([sys.executable, "-c", sleep], stdout=log, env={})
        outside = subprocess.Popen([sys.executable, "-c", sleep], env={})
    try:
        assert inside.wait(timeout=5) == writing.wait(timeout=5) == -signal.SIGKILL
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()
