"""Torchvision's networks for larger images, cut into body and head."""

from collections import OrderedDict

from torch import nn

from orchestrator.models.experts import Layers, fork, of_experts
from orchestrator.models.network import Network, Shape
from orchestrator.models.resnet import initialise
from orchestrator.models.vision import torchvision


def resnet50(shape: Shape, classes: int, experts: int = 1) -> Network:
    """Torchvision's ResNet-50."""
    return _bottlenecks("resnet50", shape, classes, experts)


def resnext50(shape: Shape, classes: int, experts: int = 1) -> Network:
    """Torchvision's ResNeXt-50 32x4d."""
    return _bottlenecks("resnext50_32x4d", shape, classes, experts)


def mobilenet_v3_small(shape: Shape, classes: int) -> Network:
    """Torchvision's MobileNetV3-small; its hidden classifier layer belongs to the body."""
    network = torchvision().models.mobilenet_v3_small(num_classes=classes)
    first, *blocks, last = network.features
    take_channels(first, "0", shape[0])
    hidden, act, _, head = network.classifier  # without its dropout: the body must be a function of its input
    # Stages end where the map shrinks. What follows the last block is trained together with it, so it is part of it.
    top = nn.Sequential(blocks[10], last, network.avgpool, nn.Flatten(), hidden, act)
    body = nn.Sequential(
        OrderedDict[str, nn.Module](
            stem=first,
            stage1=nn.Sequential(*blocks[:1]),
            stage2=nn.Sequential(*blocks[1:3]),
            stage3=nn.Sequential(*blocks[3:8]),
            stage4=nn.Sequential(*blocks[8:10], top),
        )
    )
    return Network(
        body,
        head,
        dim=head.in_features,
        last_stage="body.stage4.",
        last_block="body.stage4.2.",
        activations=inside_blocks(body),
    )


def inside_blocks(body: nn.Module) -> tuple[str, ...]:
    """Name the activation after each depthwise convolution of a MobileNet."""
    # The output of a block is none: it ends without an activation, so that half of it is below zero.
    return tuple(
        f"{name}.2"  # what follows the convolution and its batch norm
        for name, module in body.named_modules(prefix="body")
        if isinstance(module, nn.Sequential) and isinstance(module[0], nn.Conv2d) and module[0].groups > 1
    )


def _bottlenecks(name: str, shape: Shape, classes: int, experts: int) -> Network:
    """Take the last layer off a torchvision ResNet, to be the head.

    Several experts share all but the last two stages, and their own are three quarters as wide.
    """
    whole = getattr(torchvision().models, name)(num_classes=classes)
    take_channels(whole, "conv1", shape[0])
    layers = OrderedDict[str, nn.Module](whole.named_children())  # in the order in which they are run
    head = layers.pop("fc")
    if experts > 1:
        blocks = [len(list(layers.pop(f"layer{i}").children())) for i in (3, 4)]
        pool, block = layers.pop("avgpool"), type(whole.layer1[0])

        def own() -> Layers:
            whole.inplanes = 128 * block.expansion  # what layer2 puts out
            stages = [whole._make_layer(block, 192 << i, blocks[i], stride=2) for i in range(2)]
            return Layers(layer3=stages[0], layer4=stages[1], pool=pool, flat=nn.Flatten())

        body = fork(layers, own, experts)
        initialise(body)
        return of_experts(body, 384 * block.expansion, classes, ("layer1", "layer2"), ("layer3", "layer4"))
    layers["flat"] = nn.Flatten()
    return Network(
        nn.Sequential(layers),
        head,
        dim=whole.fc.in_features,
        last_stage="body.layer4.",
        last_block="body.layer4.2.",
        activations=tuple(f"body.layer{i}" for i in range(1, 5)),
    )


def take_channels(module: nn.Module, name: str, channels: int) -> None:
    """Exchange the first convolution for one that takes so many channels."""
    old = module.get_submodule(name)
    assert isinstance(old, nn.Conv2d)
    if old.in_channels != channels:
        new = nn.Conv2d(channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=False)  # type: ignore[arg-type]
        initialise(new)
        module.set_submodule(name, new)
