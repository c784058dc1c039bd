"""What a sweep costs besides its trials: `python benchmarks/sweep_scale.py [TRIALS]` (default 100; 300 for memory).

1. TRIALS short trials (digits, 4 clients, FedAvg; made about a second long by their number of rounds): the time per
   trial beyond the trials' own, and the memory (PSS) of all processes over the course of the sweep.
2. Two such sweeps of a tenth of the size at the same time, with one MLflow store: nothing lost, nothing doubled.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlflow.tracking import MlflowClient

SWEEP = """
experiment:
  data: {{name: digits, clients: 4}}
  rounds: {rounds}
  clients_per_round: 2
  evaluate: {{every: {rounds}}}
  seed: !grid {seeds}
"""


def start(folder: Path, name: str, trials: int, rounds: int) -> subprocess.Popen[bytes]:
    """Start a sweep in a session of its own."""
    file = folder / f"{name}.yaml"
    file.write_text(SWEEP.format(rounds=rounds, seeds=list(range(trials))))
    words = [sys.executable, "-m", "orchestrator.tune", str(file), "--out", str(folder / "runs"), "--quiet"]
    return subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)


def memory(session: int) -> float:
    """Return the megabytes of all processes of a session, shared pages counted once."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session:
                rollup = (path / "smaps_rollup").read_text()
                total += int(rollup.split("\nPss:")[1].split()[0])
        except (OSError, IndexError):
            continue
    return total / 1024


def ended(folder: Path) -> int:
    """Return how many trials of a sweep have ended."""
    return sum('"FINISHED"' in path.read_text() for path in folder.glob("trials/*/status.json"))


def main() -> None:
    """Measure and print."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began, samples = time.monotonic(), list[tuple[int, float]]()
        sweep = start(folder, "many", trials, rounds=30)
        while sweep.poll() is None:
            time.sleep(2)
            samples.append((ended(folder / "runs" / "many"), memory(sweep.pid)))
        wall = time.monotonic() - began
        found = json.loads((folder / "runs" / "many" / "summary.json").read_text())["trials"]
        assert [t["status"] for t in found] == ["FINISHED"] * trials
        own = statistics.mean(t["seconds"] for t in found)
        slots = min(len(os.sched_getaffinity(0)), trials)  # a trial needs one CPU here
        print(f"{trials} trials of {own:.2f} s each, {slots} at a time, in {wall:.0f} s from the command to its end: ")
        print(f"  {wall * slots / trials - own:.2f} s a trial besides its rounds")
        for share in (0.1, 0.25, 0.5, 0.75, 0.95):
            at = [m for n, m in samples if abs(n / trials - share) < 0.05]
            print(f"  memory after {share:.0%} of the trials: {statistics.median(at):.0f} MB" if at else "")

        few = max(2, trials // 10)
        both = [start(folder, name, few, rounds=10) for name in ("left", "right")]
        assert [sweep.wait() for sweep in both] == [0, 0]
        client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
        for name in ("left", "right"):
            experiment = client.get_experiment_by_name(name)
            assert experiment is not None
            runs = client.search_runs([experiment.experiment_id])
            children = [r for r in runs if "mlflow.parentRunId" in r.data.tags]
            assert len(runs) == few + 1
            assert all(r.info.status == "FINISHED" for r in runs)
            for child in children:
                steps = [m.step for m in client.get_metric_history(child.info.run_id, "time/train")]
                assert steps == list(range(1, 11)), steps
        print(f"two sweeps of {few} trials at once in one store: all runs and all points there, each once")


if __name__ == "__main__":
    main()
