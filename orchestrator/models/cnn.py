"""Small convolutional networks without batch-norm."""

from collections import OrderedDict

from torch import nn

from orchestrator.models.network import Network, Shape


def cnn_small(shape: Shape, classes: int) -> Network:
    """Two 3x3 convolutions and one hidden layer: cheap enough for 8x8 digits and for tests."""
    channels, height, width = shape
    body = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc=nn.Linear(32 * (height // 2) * (width // 2), 64),
            relu3=nn.ReLU(),
        )
    )
    return _network(body, 64, classes, last="body.fc.")


def cnn_ecl(shape: Shape, classes: int) -> Network:
    """ECL's network for Fashion-MNIST with the layer sizes of LeNet-5, which pads 28x28 images to 32x32."""
    channels, height, width = shape
    body = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 6, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
        )
    )
    return _network(body, 84, classes, last="body.fc2.")


def cnn_mupfl(shape: Shape, classes: int) -> Network:
    """MuPFL's network for Fashion-MNIST: two 5x5 convolutions, and the head right on the flattened maps."""
    channels, height, width = shape
    body = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
        )
    )
    dim = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return _network(body, dim, classes, last="body.conv2.")


def _network(body: nn.Module, dim: int, classes: int, last: str) -> Network:
    """Put a linear head on a body whose last stage and last block are one layer."""
    maps = ("body.relu1", "body.relu2")
    return Network(body, nn.Linear(dim, classes), dim=dim, last_stage=last, last_block=last, activations=maps)
