"""What a round of each method costs, relative to a FedAvg round: `python benchmarks/round_cost.py [ROUNDS]`.

Fashion-MNIST-LT (imbalance 100, alpha 0.2, 20 clients, 10 a round, one epoch, batch 64, LeNet), one process and thread.
A round of the method is measured right after a FedAvg round with the same clients, as CPU time without evaluation; the
median over the rounds of these ratios is shown. Post-hoc phases are shown in FedAvg rounds.
"""

import statistics
import sys
import time

import torch

from orchestrator.client import Worker
from orchestrator.data import load
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.experiment import Experiment

METHODS = {
    "fedavg": "fedavg",
    "fedprox": "fedprox",
    "ecl": ["fedavg", "ecl"],
    "ldae": "ldae",
    "ldae, equal budget": {"ldae": {"total_budget": True}},
    "fedloge": "fedloge",
    "bpfed": "bpfed",
    "mupfl": "mupfl",
    "mupfl without PKCF": {"mupfl": {"pkcf": False}},
}


def driver(algorithm: object, rounds: int) -> Driver:
    """Return a run in this process that evaluates nothing until its end."""
    experiment = Experiment.model_validate(
        {
            "data": {"name": "fashion_mnist", "clients": 20, "alpha": 0.2, "imbalance": 100},
            "model": "cnn_ecl",
            "algorithm": algorithm,
            "local": {"lr": 0.01, "batch": 64},
            "rounds": rounds,
            "clients_per_round": 10,
            "evaluate": {"every": 10**6},
        }
    )
    dataset = load("fashion_mnist")
    parts = split_for(experiment, dataset)
    return Driver(experiment, dataset, parts, InProcess(Worker(experiment, dataset, parts)))


def cost(run: Driver) -> float:
    """Return the CPU seconds of the next round, its evaluation left out."""
    before = time.process_time()
    line = run.advance()
    return time.process_time() - before - line["metrics"].get("time/evaluate", 0.0)


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"torch {torch.__version__}, {rounds} paired rounds\n\n| method | a round | rest of the run |\n|---|---|---|")
    for name, algorithm in METHODS.items():
        base, run = driver("fedavg", 10**6), driver(algorithm, rounds)
        cost(base)  # warm up
        ratios, rest, unit = [], 0.0, []
        while not run.done:
            turn = run.plan[run.round]
            unit.append(cost(base))
            spent = cost(run)
            if turn.rounds == rounds:
                ratios.append(spent / unit[-1])
            else:
                rest += spent
        print(f"| {name} | {statistics.median(ratios):.2f} | {rest / statistics.median(unit):.1f} |", flush=True)


if __name__ == "__main__":
    main()
