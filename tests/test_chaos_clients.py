"""Clients that raise, hang, or take their process with them, in a real command."""

import json
import shutil
import time

import pytest
from chaos import finished, runs, summary
from test_tracking import ROOT

pytestmark = pytest.mark.chaos

TROUBLE = '''\
"""FedAvg with a client in trouble."""

import os
import signal
import time
from dataclasses import dataclass

from algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Trouble(FedAvg):
    """Client 2 has it."""

    kind: str = ""

    def local(self, client, w):
        """Train, or not."""
        if client.id == 2 and self.kind == "raises":
            raise ZeroDivisionError("nothing to divide by")
        if client.id == 2 and self.kind == "hangs":
            time.sleep(1e6)
        if client.id == 2 and self.kind == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().local(client, w)
'''

SWEEP = """\
experiment:
  data: {name: digits, clients: 4}
  algorithm: {trouble: {kind: !grid [raises, hangs, crashes, none]}}
  rounds: 2
  failures: {retries: 1, client_timeout_s: 3}
"""


def test_each_is_told_with_its_client_and_its_round(tmp_path, scratch):
    shutil.copytree(ROOT / "algorithms", tmp_path / "algorithms")
    (tmp_path / "algorithms" / "trouble.py").write_text(TROUBLE)
    (tmp_path / "trouble.yaml").write_text(SWEEP)
    began = time.monotonic()
    code, out, err = finished(
        "trouble.yaml", "--out", tmp_path / "out", "--num-cpus", 2,
        scratch=scratch, cwd=tmp_path, PYTHONPATH=str(ROOT),
    )  # fmt: skip
    print(f"{time.monotonic() - began:.1f} s", out, err)
    assert code == 1
    assert "Traceback" not in err
    folder = tmp_path / "out" / "trouble"
    raises, hangs, crashes, fine = summary(folder)
    assert [t["status"] for t in (raises, hangs, crashes, fine)] == ["FAILED"] * 3 + ["FINISHED"]
    assert "trial 0000 failed: client 2, round 0, Trouble.local: nothing to divide by" in out
    assert "trial 0001 failed: client" in out
    assert "trial 0002 failed: client" in out
    told = [json.loads((folder / "trials" / t["id"] / "status.json").read_text())["error"] for t in (raises, hangs)]
    assert 'trouble.py", line' in told[0]
    assert "[2] lost their actor 2 times in round 0" in told[1]
    assert "[2] lost their actor 2 times in round 0" in crashes["error"]
    ends = {id: end for id, (end, _) in runs(tmp_path / "out" / "mlflow.db", "trouble").items()}
    assert [ends[t["run_id"]] for t in (raises, hangs, crashes, fine)] == ["FAILED"] * 3 + ["FINISHED"]
    assert not [*scratch.iterdir()]
