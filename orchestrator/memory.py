"""How much memory a client actor needs, estimated from its network and its batches before anything is started."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from orchestrator import evaluate, memo, segmentation
from orchestrator.data import Dataset, ImageFiles
from orchestrator.experiment import Experiment
from orchestrator.models import Network

FLOAT = 4  #: bytes
LIBRARIES = 400 * 2**20  #: bytes of a process that has torch, Ray and our modules (370 MB on Linux without a GPU)
#: Weights are held by the network, as they came, as they were at the start, and as they are trained; the gradient in
#: parts and as one vector.
COPIES = 6


def weights(network: nn.Module) -> int:
    """Return the bytes of all tensors of a network."""
    return FLOAT * sum(int(t.numel()) for t in network.state_dict().values())


def kept_for_backward(network: nn.Module, shape: tuple[int, ...], batch: int) -> int:
    """Return the bytes that a forward pass leaves for the backward pass, found without computing anything."""
    network, own = copy.deepcopy(network).to("meta"), set[int]()
    x = torch.empty(batch, *shape, device="meta")
    for tensor in (*network.parameters(), *network.buffers()):
        own.add(tensor.untyped_storage()._cdata)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = network(x)  # held, so that no two storages have the same address
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def passed_forward(network: nn.Module, shape: tuple[int, ...], batch: int) -> int:
    """Return the bytes that a forward pass alone holds at one time: a layer's two ends, and a shortcut past it."""
    network, ends = copy.deepcopy(network).to("meta").eval(), [(0, 0)]

    def note(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        ends.append((sum(t.nbytes for t in given if isinstance(t, Tensor)), result.nbytes))

    for layer in network.modules():
        if not any(layer.children()):
            layer.register_forward_hook(note)
    with torch.no_grad():
        network(torch.empty(batch, *shape, device="meta"))
    return max(map(sum, ends)) + max(out for _, out in ends)


def shared_while_scoring(network: Network, shape: tuple[int, ...], images: int, clients: int) -> int:
    """Return the bytes of maps, features and logits that a worker keeps for other clients at the most."""
    network = copy.deepcopy(network).to("meta").eval()
    stem, stage = network.halves()
    with torch.no_grad():
        map_ = stem(torch.empty(images, *shape, device="meta"))
        features = stage(map_)
        logits = network.head(features)
    return int(min(memo.MOST, clients * sum(t.nbytes for t in (map_, features, logits))))


def of_actor(experiment: Experiment, network: Network, dataset: Dataset, gpu: bool) -> int:
    """Estimate the bytes of one actor: its process, copies of the weights, a batch or a block, and on a GPU the data.

    On a CPU the images are shared by all actors of a machine, and those in files are never held whole.
    """
    memories = any(part.card.keeps for part in experiment.chain().parts)
    batch = 2 * kept_for_backward(network, dataset.shape, experiment.local.batch)  # and as much again for gradients
    block = segmentation.BLOCK if dataset.segmented else evaluate.BLOCK
    scoring = passed_forward(network, dataset.shape, block)
    scoring += shared_while_scoring(network, dataset.shape, block, experiment.data.clients)
    batch = max(batch, scoring)
    held = [int(x.nbytes) for x in (dataset.x_train, dataset.x_test) if gpu and not isinstance(x, ImageFiles)]
    copies = COPIES + bool(experiment.local.momentum) + memories
    return int(LIBRARIES + copies * weights(network) + batch + sum(held))
