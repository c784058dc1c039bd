"""A long run with many clients: memory, shared memory, temporary files and round times do not grow."""

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from chaos import called, lines, members, rounds, started, summary

pytestmark = pytest.mark.chaos

RUN = """\
data: {name: DATA, clients: 1000, alpha: 1.0}
model: cnn_small
algorithm: fedavg
local: {lr: 0.05, batch: 16}
rounds: 200
clients_per_round: 10
evaluate: {every: 50}
failures: {checkpoint_s: 1}
"""
WARM, PAGE = 50, os.sysconf("SC_PAGE_SIZE")


def resident(session):
    """Return the bytes in memory of all processes of a session; a page that some share counts for each."""
    total = 0
    for pid, _ in members(session):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def shared(session):
    """Return the bytes of shared memory that Ray's object store has touched; its file in /dev/shm has no name."""
    (raylet,) = called(session, "raylet")
    return 1024 * int(re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{raylet}/status").read_text())[1])


def size(folder):
    """Return the bytes on disk of the files below a directory."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.mark.timeout(600)
def test_a_thousand_clients_for_two_hundred_rounds(tmp_path, scratch):
    rng = np.random.default_rng(0)
    arrays = {f"x_{k}": rng.integers(0, 256, (n, 8, 8), np.uint8) for k, n in (("train", 20_000), ("test", 500))}
    arrays |= {f"y_{k}": rng.integers(0, 10, n) for k, n in (("train", 20_000), ("test", 500))}
    np.savez(tmp_path / "noise.npz", **arrays)
    (tmp_path / "soak.yaml").write_text(RUN.replace("DATA", str(tmp_path / "noise.npz")))
    folder = tmp_path / "out" / "soak"
    trial, seen = folder / "trials" / "0000", []
    pause = threading.Event()
    with started(tmp_path / "soak.yaml", "--out", tmp_path / "out", "--num-cpus", 2, scratch=scratch) as process:
        while process.poll() is None:
            if 0 < (done := rounds(trial)) < 200:
                memory = resident(process.pid), shared(process.pid)
                seen.append((done, *memory, size(scratch), size(trial / "checkpoint")))
            pause.wait(0.5)
        out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert summary(folder)[0]["status"] == "FINISHED"

    steady = np.array([row for row in seen if row[0] >= WARM], dtype=float)
    assert len(steady) >= 10
    slopes = [np.polyfit(steady[:, 0], steady[:, column], 1)[0] / 2**20 for column in range(1, 5)]
    seconds = [line["metrics"]["time/train"] for line in lines(trial)]
    first, last = (np.percentile(part, [50, 95]) for part in (seconds[10:60], seconds[-50:]))
    print("MB a round: memory {:.3f}, shared memory {:.3f}, temporary files {:.3f}, checkpoint {:.3f}".format(*slopes))
    print(f"median and p95 of a round: {first} s in the first 50, {last} s in the last 50")
    assert slopes[0] < 1
    assert steady[:, 2].max() < 300 * 2**20, "objects of past rounds are freed"
    assert steady[:, 3].max() < 50 * 2**20
    assert slopes[3] < 1
    assert last[0] < 1.5 * first[0]
    assert len({key for line in lines(trial) for key in line["metrics"]}) <= 60
