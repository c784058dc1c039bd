"""A data set, by the name of a known one or by the path of your own."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from algorithms import nearest
from orchestrator.data.files import ImageFiles
from orchestrator.data.images import image_folder
from orchestrator.data.maps import VOID, label_maps
from orchestrator.data.readers import Arrays, DataError, Images, Labels, archive, npz
from orchestrator.data.sources import SEGMENTED, SOURCES, VARIABLE, find, places

DATASETS: tuple[str, ...] = ("digits", *SOURCES)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as bytes [N, C, H, W] with their labels, and what is needed to feed them to a model."""

    name: str
    x_train: Images | ImageFiles
    y_train: Labels
    x_test: Images | ImageFiles
    y_test: Labels
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str = "none"
    crop: int | None = None  #: side of what a network sees of an image; None: all of it
    names: tuple[str, ...] = ()  #: of the classes, where they are known
    users: Labels | None = None  #: whose each training image is, where that is known

    @property
    def segmented(self) -> bool:
        """Whether every pixel has a label, in maps of bytes [N, H, W] of which 255 is void."""
        return self.y_train.ndim == 3

    @property
    def outputs(self) -> int:
        """How many classes a network tells apart: of pixels one more than there are, the background."""
        return self.classes + self.segmented

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what a network sees of an image."""
        channels, height, width = self.x_train.shape[1:]
        return channels, self.crop or height, self.crop or width

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over shapes and bytes of the arrays, users too if known; over names and sizes of image files."""
        sha = hashlib.sha256()
        users = [] if self.users is None else [self.users]
        for array in (self.x_train, self.y_train, self.x_test, self.y_test, *users):
            if isinstance(array, ImageFiles):
                sha.update(array.digest.encode())
                continue
            sha.update(f"{array.dtype.kind}{array.dtype.itemsize}{array.shape}".encode())
            sha.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return sha.hexdigest()


def load(name: str, root: str | Path | None = None, *, download: bool = True) -> Dataset:
    """Load a known set by name, or your own by path: an .npz file or a folder of train and test images."""
    try:
        if name in SOURCES:
            source = SOURCES[name]
            arrays = find(name, root, download)
            return _dataset(name, arrays, source.names, source.mean, source.std, source.augment, source.crop)
        arrays, names = (_digits(), ()) if name == "digits" else _own(name, root)
    except (OSError, RuntimeError) as error:  # a path that is too long, not ours to read, or in the home of nobody
        raise DataError(f"data set {name!r} cannot be read: {error}; correct its name or the data root") from error
    assert isinstance(arrays.x_train, np.ndarray)
    return _dataset(name, arrays, names, *_moments(arrays.x_train))


def outline(name: str) -> Dataset:
    """Return a known data set without its images: what can be planned before they are there."""
    source = SOURCES[name]
    held = (0, 0) if source.in_files else source.sizes or (0, 0)
    x_train, x_test = (np.broadcast_to(np.uint8(0), (n, *source.shape)) for n in held)  # as large, without memory
    y: Labels = np.zeros((0, *source.shape[1:] * (name in SEGMENTED)), np.int64)
    return Dataset(name, x_train, y, x_test, y, source.classes, source.mean, source.std, source.augment)


def _dataset(
    name: str,
    arrays: Arrays,
    names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: str = "none",
    crop: int | None = None,
) -> Dataset:
    labels = arrays.y_train if arrays.y_train.ndim == 1 else arrays.y_train[arrays.y_train != VOID]
    classes = len(SOURCES[name].names) if name in SEGMENTED else int(labels.max()) + 1
    return Dataset(name, *arrays[:4], classes, mean, std, augment, crop, names[:classes], arrays.users)


def _digits() -> Arrays:
    """Cut scikit-learn's 8 x 8 digits: the first 120 images of each class are for training, the rest for testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8), y.astype(np.int64)
    train = np.zeros(len(y), bool)
    for c in range(10):
        train[np.flatnonzero(y == c)[:120]] = True
    return Arrays(x[train], y[train], x[~train], y[~train])


def _own(name: str, root: str | Path | None) -> tuple[Arrays, tuple[str, ...]]:
    paths = [place / Path(name).expanduser() for place in (*places(root), Path())]
    for path in paths:
        if path.suffix == ".npz" and path.is_file():
            found = archive(path)
            if found["y_train"].ndim != 3:
                return npz(path, found), ()
            return label_maps(path, found), tuple(map(str, found.get("names", np.zeros(0)).ravel()))
        if path.is_dir():
            return image_folder(path), ()
    near, where = nearest(name.lower().replace("-", "_"), DATASETS), ", ".join(str(path.absolute()) for path in paths)
    raise DataError(
        f"no data set {name!r} ({near}), and no .npz file or image folder at {where}. "
        f"Its directory may be the data root or {VARIABLE}."
    )


def _moments(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel in whole numbers, so that every machine finds the same."""
    mean, std = [], []
    for channel in range(x.shape[1]):
        seen = [int(n) for n in np.bincount(x[:, channel].ravel(), minlength=256)]
        n = sum(seen)
        first, second = (sum(count * value**power for value, count in enumerate(seen)) for power in (1, 2))
        mean.append(first / n / 255)
        std.append(math.sqrt(n * second - first * first) / n / 255 or 1.0)  # a constant channel is not divided by 0
    return tuple(mean), tuple(std)
