"""Parts of a model: what some methods exchange while the rest stays with the client, or train while it is frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.base import Client, Model, Objective
from algorithms.params import Layout, Params


def joined(*parts: Params) -> Params:
    """Return the tensors of several parts as one Params, in the order given."""
    layout = Layout(*(sum((part.layout[i] for part in parts), ()) for i in range(2)))
    return Params(layout, torch.cat([part.flat for part in parts]), torch.cat([part.buffers for part in parts]))


def layers(model: Params) -> list[list[str]]:
    """Return the names of each layer's weights: a matrix or bank of filters, and the biases and norms that follow."""
    found: list[list[str]] = []
    for name, shape in model.layout.weights:
        if len(shape) > 1 or not found:
            found.append([])
        found[-1].append(name)
    return found


def modules(names: list[str]) -> tuple[str, ...]:
    """Return the prefixes of the modules to which these tensors belong, each once."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] + "." for name in names))


def batch_norms(model: Params) -> tuple[str, ...]:
    """Return the prefixes of all batch norms: the modules that have running statistics."""
    return modules([name for name, _ in model.layout.buffers])


def together(client: Client, objective: Objective, shared: Params) -> Params:
    """Train what was received and `client.state.own` as one model; keep the client's own part and return the model."""
    own = client.state.own
    w = client.fit(objective, w=joined(shared, own)).w
    client.state.own = w.where(own.__contains__)
    return w


def alone(
    client: Client,
    objective: Objective,
    frozen: Model,
    part: Params,
    epochs: int | None = None,
    lr: float | None = None,
) -> Params:
    """Train one part of a model while all the rest is frozen."""

    def within(client: Client, x: Tensor, y: Tensor, part: Model) -> Tensor:
        return objective(client, x, y, {**frozen, **part})

    return client.fit(within, epochs=epochs, lr=lr, part=part).part


def classifier(client: Client, body: Model, head: Params, epochs: int) -> Params:
    """Train a classifier while the body is frozen: on features made once, unless the images change with each epoch."""

    def on_images(client: Client, x: Tensor, y: Tensor, head: Model) -> Tensor:
        return client.loss(client.logits({**body, **head}, x), y)

    def on_features(client: Client, h: Tensor, y: Tensor, head: Model) -> Tensor:
        return client.loss(client.classify(head, h), y)

    if client.augmented or not epochs:
        return client.fit(on_images, epochs=epochs, head=head).head
    return client.fit(on_features, data=(client.embed(body), client.y), epochs=epochs, head=head).head
