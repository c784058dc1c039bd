"""An MLflow server that stops answering, dies, or has no room: a run neither waits for it nor loses a number."""

import os
import shlex
import signal
import statistics
import subprocess
import time

import numpy as np
import pytest
from chaos import lines, logged, rounds, runs, settings, started, stored, summary, until
from test_command import gone
from test_tracking import ROOT, Server

pytestmark = pytest.mark.chaos

RUN = """\
data: {name: digits, clients: 6}
local: {lr: 0.05, batch: 16, epochs: 10}
rounds: 200
clients_per_round: 3
evaluate: {every: 20}
"""


def delivered(server, folder, name):
    """Tell whether MLflow has exactly the points that the run has logged, and how its runs have ended."""
    database = server.store.removeprefix("sqlite:///")
    record = runs(database, name)
    (child,) = (id for id, (_, parent) in record.items() if parent)
    assert len(record) == 2, "one run below one parent, whatever happened"
    assert stored(database, child) == logged(folder / "trials" / "0000"), "no point lost and none twice"
    return {end for end, _ in record.values()}


@pytest.mark.timeout(600)
def test_a_server_that_freezes_and_then_dies_for_a_while(tmp_path, scratch, chance):
    (tmp_path / "away.yaml").write_text(RUN)
    folder, server = tmp_path / "out" / "away", Server(tmp_path / "server")
    trial, away = folder / "trials" / "0000", []
    server.__enter__()
    try:
        words = [tmp_path / "away.yaml", "--out", tmp_path / "out", "--num-cpus", 2, "--tracking-uri", server.uri]
        with started(*words, *settings(rounds=900), scratch=scratch) as process:
            wanted = chance.randint(0, 30)
            until(lambda: rounds(trial) >= wanted, process)
            away.append(rounds(trial))
            os.killpg(server.process.pid, signal.SIGSTOP)
            time.sleep(60)  # longer than a request and its repetitions may take
            os.killpg(server.process.pid, signal.SIGCONT)
            away.append(rounds(trial))
            time.sleep(chance.uniform(0, 4))
            server.__exit__()
            time.sleep(chance.uniform(1, 5))
            assert process.poll() is None, "it was away while the run went on"
            server.__enter__()
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, out + err
            assert not gone(process.pid)
        assert delivered(server, folder, "away") == {"FINISHED"}
    finally:
        server.__exit__()
    assert "orchestrator.sync" not in out, "nothing is owed"
    seconds = [line["metrics"]["time/train"] for line in lines(trial)]
    frozen, rest = seconds[away[0] : away[1]], seconds[away[1] :]
    normal = [statistics.median(part) for part in np.array_split(rest, 4)]  # a machine is not always equally fast
    print(f"a round took {statistics.median(frozen):.4f} s while MLflow was frozen ({len(frozen)}), else {normal}")
    assert len(frozen) > 100, "rounds went on"
    assert statistics.median(frozen) < 1.05 * max(normal)


@pytest.mark.timeout(400)
def test_a_server_that_does_not_come_back_gets_the_rest_later(tmp_path, scratch, chance):
    (tmp_path / "later.yaml").write_text(RUN)
    folder, server = tmp_path / "out" / "later", Server(tmp_path / "server")
    trial = folder / "trials" / "0000"
    words = [tmp_path / "later.yaml", "--out", tmp_path / "out", "--num-cpus", 2, "--tracking-uri", server.uri]
    with server, started(*words, scratch=scratch) as process:
        wanted = chance.randint(0, 150)
        until(lambda: rounds(trial) >= wanted, process)
        server.__exit__()
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
    assert [t["status"] for t in summary(folder)] == ["FINISHED"]
    assert "lines and endings wait in the directory" in out
    (command,) = (line for line in out.splitlines() if "orchestrator.sync" in line)
    early = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True)
    assert (early.returncode, early.stderr) == (1, "")
    assert "still owes" in early.stdout
    with server:
        later = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True)
        assert later.returncode == 0, later.stdout + later.stderr
        assert delivered(server, folder, "later") == {"FINISHED"}
        subprocess.run(shlex.split(command), cwd=ROOT, check=True)
        assert delivered(server, folder, "later") == {"FINISHED"}, "to say it twice changes nothing"
