"""What sixteen values of a hyperparameter that only touches predictions cost: `python benchmarks/shared_work.py`.

A sweep of ECL's weight of the experts against one run of ECL (Fashion-MNIST-LT, 50 clients, 20 rounds of FedAvg
before), each from the command to its end, in directories of their own.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXPERIMENT = """
experiment:
  data: {{name: fashion_mnist, clients: 50, alpha: 0.5, imbalance: 100}}
  algorithm: [fedavg, {{ecl: {{expert_logit_weight: {weight}}}}}]
  rounds: 20
  clients_per_round: 10
  evaluate: {{every: 20}}
"""


def seconds(folder: Path, name: str, weight: str) -> float:
    """Run a sweep; return the wall time of the whole command."""
    (folder / f"{name}.yaml").write_text(EXPERIMENT.format(weight=weight))
    words = ["-m", "orchestrator.tune", str(folder / f"{name}.yaml"), "--out", str(folder / f"runs-{name}"), "--quiet"]
    began = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = seconds(folder, "one", "0.5")
        many = seconds(folder, "many", f"!grid {[round(i / 15, 3) for i in range(16)]}")
        summary = json.loads((folder / "runs-many" / "many" / "summary.json").read_text())
        assert [t["status"] for t in summary["trials"]] == ["FINISHED"] * 16
        assert sum(not t["reused"] for t in summary["trials"]) == 1
        print(f"one run {one:.0f} s, sixteen values {many:.0f} s: {many / one:.2f} times one run")


if __name__ == "__main__":
    main()
