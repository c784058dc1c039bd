"""A task: what all contenders are given in one file, and the local training that the task is about.

The file names the clients of each round and the seed of each client's shuffling, so that all take the same SGD steps.
Nothing of the orchestrator is imported here: the peers live in an environment without it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from networks import NETWORKS
from torch import Tensor, nn


class Task:
    """The data of all clients in memory, the initial weights, and who trains in which round."""

    def __init__(self, path: str | Path, channels_last: bool = False) -> None:
        with np.load(path, allow_pickle=False) as file:
            found: dict[str, Any] = dict(file)
        self.network, self.batch = str(found["network"]), int(found["batch"])
        self.lr, self.momentum = float(found["lr"]), float(found["momentum"])
        self.clients, self.seeds = found["clients"].tolist(), found["seeds"].tolist()  # [round][place]
        self.classes, self.weights = int(found["classes"]), torch.from_numpy(found["weights"])
        self.channels_last, self.ends = channels_last, [0, *found["ends"].tolist()]
        self._images = {"train": found["x"], "test": found["x_test"]}
        self.y, self.y_test = torch.from_numpy(found["y"]), torch.from_numpy(found["y_test"])
        self.shape = found["x"].shape[1:]
        self._mean, self._std = (torch.from_numpy(found[name]).view(-1, 1, 1) for name in ("mean", "std"))

    def images(self, which: str) -> Tensor:
        """Return the images of a set as the network wants them."""
        x = (torch.from_numpy(self._images[which]).float() / 255 - self._mean) / self._std
        # Through a permutation: with one channel, PyTorch takes both formats for the same and copies nothing.
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if self.channels_last else x

    @cached_property
    def x(self) -> Tensor:
        """All training images."""
        return self.images("train")

    def size(self, client: int) -> int:
        """Return how many images a client has."""
        return self.ends[client + 1] - self.ends[client]

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's images and labels."""
        rows = slice(self.ends[client], self.ends[client + 1])
        return self.x[rows], self.y[rows]

    def model(self) -> nn.Module:
        """Return the network with its initial weights."""
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        network = NETWORKS[self.network](self.shape, self.classes).to(memory_format=form)  # type: ignore[call-overload]
        write(network, self.weights)
        return network

    def order(self, client: int, seed: int, norms: bool) -> Tensor:
        """Return the order in which a client's images are used; batch norm cannot train on a single last one."""
        order = torch.randperm(self.size(client), generator=torch.Generator().manual_seed(seed))
        return order[:-1] if norms and len(order) % self.batch == 1 else order

    def trained(self, client: int, norms: bool) -> int:
        """Return how many of a client's images are trained on."""
        return len(self.order(client, 0, norms))

    def train(self, model: nn.Module, client: int, seed: int, fused: bool = False) -> int:
        """Train a model on a client's data for one epoch; return the number of steps."""
        optimizer = torch.optim.SGD(model.parameters(), self.lr, momentum=self.momentum, fused=fused)
        x, y = self.data(client)
        order = self.order(client, seed, has_norms(model))
        batches = order.split(self.batch) if len(order) else ()
        model.train()
        for rows in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return len(batches)

    def accuracy(self, weights: Tensor) -> float:
        """Return the accuracy of weights on the test set; batch norm goes by the test images, since not all peers
        average its running statistics."""  # noqa: D209
        model = self.model().train()
        write(model, weights)
        with torch.no_grad():
            hits = [
                (model(x).argmax(1) == y).sum()
                for x, y in zip(self.images("test").split(500), self.y_test.split(500), strict=True)
            ]
        return float(torch.stack(hits).sum()) / len(self.y_test)


def has_norms(model: nn.Module) -> bool:
    """Tell whether a network has batch norm."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def tensors(model: nn.Module) -> list[Tensor]:
    """Return what makes up a model's weights: its parameters, then its running statistics."""
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def read(model: nn.Module, out: Tensor | None = None) -> Tensor:
    """Return a model's weights as one vector."""
    with torch.no_grad():
        return torch.cat([t.reshape(-1) for t in tensors(model)], out=out)


def write(model: nn.Module, weights: Tensor) -> None:
    """Set a model's weights from one vector."""
    found = tensors(model)
    with torch.no_grad():
        for tensor, values in zip(found, weights.split([t.numel() for t in found]), strict=True):
            tensor.copy_(values.view(tensor.shape))
