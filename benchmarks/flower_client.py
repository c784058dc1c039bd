"""The Flower contender's client: a module of its own, so that each Ray worker imports it and loads the data once."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Task, has_norms

client = ClientApp()


@cache
def ready(path: str) -> tuple[Task, torch.nn.Module]:
    """Load data and network once in each process."""
    torch.set_num_threads(1)
    task = Task(path)
    return task, task.model()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    asked = message.content["config"]
    task, model = ready(str(asked["path"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = task.train(model, int(asked["client"]), int(asked["seed"]))
    trained = task.trained(int(asked["client"]), has_norms(model))
    numbers = MetricRecord({"num-examples": task.size(int(asked["client"])), "steps": steps, "trained": trained})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": numbers}), reply_to=message)
