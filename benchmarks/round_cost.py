"""What a round of each method costs, relative to a FedAvg round: `python benchmarks/round_cost.py [NAME ...]`.

Workload W1 in one process and thread. A round of the method is measured right after a FedAvg round of the same clients,
as CPU time without evaluation; the median over rounds of these ratios is shown. Phases of other lengths than the
experiment's rounds (what comes before or after training) are shown together, in FedAvg rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS

import algorithms
from algorithms.base import Algorithm
from orchestrator.catalogue import entries
from orchestrator.data import Dataset, load
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.evaluate import Scores
from orchestrator.worker import Worker

OUT = Path(__file__).parent / "round_cost.md"
#: Methods that W1's network does not suit; FedAvg is then measured on the same one.
MODELS = {"ldae": "cnn_ecl", "ride": "cnn_ecl", "fedalign": {"name": "resnet8", "width": 8}}
#: What the numbers come from, where they are far from 1, with the defaults of each method.
NOTES = """
- ditto trains two models; paco reads every image twice, balancefl asks a teacher; ride and ldae have three experts.
- ldae draws the clients of a round once for each expert: three times the clients on a network of 1.4 times the cost.
- fedrep trains the classifier for ten passes, on features made once, before the body.
- mupfl and creff match 1,000 synthetic features in 100 steps a round; then each client of mupfl makes 30 passes over
  them (480 steps, beside the 5 of its own epoch), and the server of creff 300 to train its classifier. Beside the ten
  local epochs of their papers this is a tenth of what it is beside one.
- After training, finetune and ecl visit all 50 clients, five times those of a round, for ten passes: 50 rounds; ecl
  trains most of it on features. fedafa does it with ten steps of attack for each made feature. crt trains its
  classifier for 200 rounds, each of which needs the features of all images but no gradient of the body.
"""
HEAD = """| method | a round | rest of the run |
|---|---|---|"""


@cache
def images(root: str | None) -> Dataset:
    """Load the data once."""
    return load("fashion_mnist", root)


class Trained(Driver):
    """A driver that scores nothing: what is measured is training."""

    def evaluate(self, also: tuple[Algorithm, ...] = ()) -> list[Scores]:
        """Return no scores."""
        return [Scores(self.split, self.dataset.y_train, self.dataset.y_test)]

    def cost(self) -> float:
        """Run the next round; return its CPU seconds."""
        before = time.process_time()
        self.advance()
        return time.process_time() - before


def driver(algorithm: str, rounds: int, data: str | None, **changes: Any) -> Trained:
    """Return a run in this process."""
    experiment = WORKLOADS["W1"].experiment(rounds - 1, algorithm=algorithm, **changes)
    dataset = images(data)
    parts = split_for(experiment, dataset)
    return Trained(experiment, dataset, parts, InProcess(Worker(experiment, dataset, parts)))


def row(name: str, rounds: int, data: str | None) -> str:
    """Measure a method and return its row of the table."""
    changes = {"model": MODELS[name]} if name in MODELS else {}
    driver("fedavg", 2, data, **changes).cost()  # warms up
    base, run = driver("fedavg", 10**4, data, **changes), driver(name, rounds, data, **changes)
    ratios, rest, unit = [], 0.0, []
    while not run.done:
        paired = run.plan[run.round].rounds == rounds
        if paired or not unit:
            unit.append(base.cost())
        spent = run.cost()
        if paired:
            ratios.append(spent / unit[-1])
        else:
            rest += spent
    shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
    return f"| {name} | {shown} | {rest / statistics.median(unit):.1f} |"


def main() -> None:
    """Print the table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="methods of the catalogue (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds (default: 5)")
    parser.add_argument("--data", help="the directory of the data sets (default: as the orchestrator finds them)")
    asked = parser.parse_args()
    unknown = set(asked.names) - set(algorithms.names())
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; see `python -m orchestrator.tune --list`")
    print(HEAD, flush=True)
    rows = []
    for name, _ in entries():
        if not asked.names or name in asked.names:
            rows.append(row(name, asked.rounds, asked.data))
            print(rows[-1], flush=True)
    if not asked.names:
        about = (
            f"{(__doc__ or '').partition(chr(10) * 2)[2]}\ntorch {torch.__version__}, {asked.rounds} paired rounds.\n\n"
        )
        OUT.write_text(f"# Round costs\n\n{about}" + "\n".join([HEAD, *rows, NOTES]))


if __name__ == "__main__":
    main()
