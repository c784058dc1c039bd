"""A contender: Apple's pfl, one process per core. `.peers/bin/python benchmarks/run_pfl.py TASK.npz`."""

# ruff: noqa: E402

import itertools
import os
import socket
import subprocess
import sys
from typing import Any

CORES = len(os.sched_getaffinity(0))

if "PFL_WORKER_RANK" not in os.environ:  # the process that was started starts the others; pfl reads this when imported
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port + rank}" for rank in range(CORES))
    for rank in range(1, CORES):
        environment = {**os.environ, "PFL_WORKER_RANK": str(rank)}
        subprocess.Popen([sys.executable, *sys.argv], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    os.environ["PFL_WORKER_RANK"] = "0"

import torch
import torch.nn.functional as F
from gate import Gate
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import Task, has_norms, read
from torch import Tensor, nn

FIRST = os.environ["PFL_WORKER_RANK"] == "0"


class Trained(nn.Module):
    """A network as pfl wants it, which counts its steps and samples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.did = network, torch.zeros(2, dtype=torch.int64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss on a batch."""
        self.did += torch.tensor([1, len(y)])
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return something: pfl insists on an evaluation in the first round, which is not measured."""
        return {"samples": Weighted(len(y), len(y))}


class Paced(TrainingProcessCallback):
    """Lets all processes wait together until the harness asks for the next round."""

    def __init__(self, gate: Gate | None, model: Trained) -> None:
        self.gate, self.model = gate, model

    def go(self) -> bool:
        """Return whether there is another round, when it is wanted."""
        wanted = torch.tensor(self.gate is not None and self.gate.opens(lambda: read(self.model.network)))
        torch.distributed.broadcast(wanted, 0)
        return bool(wanted)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Tell that the round is over, and wait for the next."""
        torch.distributed.all_reduce(self.model.did)
        if self.gate:
            steps, samples = self.model.did.tolist()
            self.gate.answer(steps=steps, samples=samples)
        self.model.did.zero_()
        return not self.go(), Metrics()


def main() -> None:
    """Run rounds as the harness wants them."""
    gate = Gate() if FIRST else None
    torch.set_num_threads(1)
    task = Task(sys.argv[1])
    model = Trained(task.model().train())
    visits = [visit for round in zip(task.clients, task.seeds, strict=True) for visit in zip(*round, strict=True)]
    norms = has_norms(model)

    def data(visit: int) -> Dataset:
        client, seed = visits[visit]
        rows = task.order(client, seed, norms)
        return Dataset([values[rows] for values in task.data(client)])

    numbers = itertools.cycle(range(len(visits)))
    sizes = {i: task.size(client) for i, (client, _) in enumerate(visits)}
    users = FederatedDataset(data, lambda: next(numbers), user_id_to_weight=sizes)
    paced = Paced(gate, model)
    if paced.go():
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=len(task.clients),
                evaluation_frequency=10**9,
                train_cohort_size=len(task.clients[0]),
                val_cohort_size=0,
            ),
            SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
            PyTorchModel(
                model,
                lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=task.momentum),
                torch.optim.SGD(model.parameters(), lr=1.0),
            ),
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch),
            callbacks=[paced],
        )


if __name__ == "__main__":
    main()
