"""The networks of the five papers by name; each is a body and a head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

import torch

from orchestrator.models.cnn import cnn_ecl, cnn_mupfl, cnn_small
from orchestrator.models.experts import classify_by_cosine
from orchestrator.models.network import Network, Shape, prepare
from orchestrator.models.pixels import cnn_pixels, lraspp_mobilenet_v3_small
from orchestrator.models.resnet import resnet8, resnet18, resnet20, resnet32, resnet34
from orchestrator.models.vision import torchvision
from orchestrator.models.zoo import mobilenet_v3_small, resnet50, resnext50

__all__ = ["MODELS", "Model", "Network", "Shape", "build", "default_model", "torchvision"]


@dataclass(frozen=True)
class Model:
    """How a network is made, and what it can be made for."""

    make: Callable[..., Network]  #: from shape, classes and the options below
    smallest: int  #: the shortest side of an image that still leaves a pixel in the last map
    options: tuple[str, ...] = ()
    task: str = "classification"


#: Every network by its name.
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "cnn_small": Model(cnn_small, 2, ("experts",)),
        "cnn_ecl": Model(cnn_ecl, 12, ("width", "experts")),
        "cnn_mupfl": Model(cnn_mupfl, 16),
        "resnet8": Model(resnet8, 4, ("width", "experts")),
        "resnet20": Model(resnet20, 4, ("width", "experts")),
        "resnet32": Model(resnet32, 4, ("width", "experts")),
        "resnet18": Model(resnet18, 8, ("width", "experts")),
        "resnet34": Model(resnet34, 8, ("width", "experts")),
        "resnet50": Model(resnet50, 32, ("experts",)),
        "resnext50": Model(resnext50, 32, ("experts",)),
        "mobilenet_v3_small": Model(mobilenet_v3_small, 32),
        "cnn_pixels": Model(cnn_pixels, 4, ("width",), "segmentation"),
        "lraspp_mobilenet_v3_small": Model(lraspp_mobilenet_v3_small, 32, (), "segmentation"),
    }
)

MOST = {"width": 256, "experts": 100}  #: of each option: beyond it a network may not fit in a machine

_DEFAULTS = {
    "fashion_mnist": "cnn_ecl",
    "cifar10": "resnet8",
    "cifar100": "resnet32",
    "tiny_imagenet": "resnet32",
    "imagenet_lt": "resnet50",
    "inaturalist_user_160k": "resnet50",
    "cityscapes": "lraspp_mobilenet_v3_small",
}


def default_model(dataset_name: str, task: str = "classification") -> str:
    """Name the network usually trained on this data set."""
    return _DEFAULTS.get(dataset_name, "cnn_pixels" if task == "segmentation" else "cnn_small")


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    width: int | None = None,
    experts: int | None = None,
    cosine: float | None = None,
    seed: int = 0,
) -> Network:
    """Make a network for images of this shape, its weights drawn from the seed alone.

    With `cosine`, its classifier is the cosine one of this scale; its body is the same.
    """
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no model {name!r}; did you mean {near!r}? Known models: {', '.join(MODELS)}")
    model = MODELS[name]
    given = {"width": width, "experts": None if experts == 1 else experts}  # any network is one expert
    options = {option: value for option, value in given.items() if value is not None}
    for option, value in options.items():
        if option not in model.options:
            able = ", ".join(other for other in MODELS if option in MODELS[other].options)
            raise ValueError(f"model {name!r} takes no {option}; those that do: {able}")
        if not 1 <= value <= MOST[option]:
            raise ValueError(f"{option} of model {name!r} must be 1 to {MOST[option]}, not {value}")
    if min(shape[1:]) < model.smallest:
        side = model.smallest
        raise ValueError(f"model {name!r} needs images of at least {side}x{side}, not {shape[1]}x{shape[2]}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset every GPU's generator
        network = model.make(shape, classes, **options)
        if cosine is not None:
            classify_by_cosine(network, classes, cosine)
        prepare(network, shape)
    return network
