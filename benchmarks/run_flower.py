"""A contender: Flower's simulation on Ray (flwr). `.peers/bin/python benchmarks/run_flower.py TASK.npz`."""

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from flower_client import client, ready
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from gate import Gate
from task import Task, read

PATH = os.path.abspath(sys.argv[1])
CORES = len(os.sched_getaffinity(0))
server = ServerApp()


class Paced(FedAvg):
    """Federated averaging of the clients of the task, in rounds that the harness asks for."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.gate, (self.task, self.model) = gate, ready(PATH)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait for the round, and address its clients."""

        def weights() -> torch.Tensor:
            self.model.load_state_dict(arrays.to_torch_state_dict())
            return read(self.model)

        if not self.gate.opens(weights):
            os._exit(0)  # a run cannot be left from inside
        nodes = sorted(grid.get_node_ids())
        chosen = zip(self.task.clients[server_round - 1], self.task.seeds[server_round - 1], strict=True)
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({"path": PATH, "client": k, "seed": seed})}),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[k],
            )
            for k, seed in chosen
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average, and tell that the round is over."""
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        numbers = [message.content["metrics"] for message in replies]
        moved = sum(4 * t.numel() for t in self.model.state_dict().values()) * len(replies)
        self.gate.answer(
            steps=sum(int(n["steps"]) for n in numbers),
            samples=sum(int(n["trained"]) for n in numbers),
            up=moved,
            down=moved,
        )
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    strategy = Paced(GATE)
    strategy.start(grid, ArrayRecord(strategy.model.state_dict()), num_rounds=len(strategy.task.clients))


if __name__ == "__main__":
    GATE = Gate()
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": CORES, "include_dashboard": False}}
    run_simulation(server, client, num_supernodes=len(Task(PATH).ends) - 1, backend_config=backend)
