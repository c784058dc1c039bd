"""The file formats: each reader turns files into images [N, C, H, W] and labels, or says which file is wrong."""

import gzip
import hashlib
import io
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy._core.multiarray import _reconstruct

if TYPE_CHECKING:
    from orchestrator.data.files import ImageFiles

ARRAYS = "x_train", "y_train", "x_test", "y_test"
Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class DataError(ValueError):
    """Data that is missing, damaged or cannot be divided as asked."""


class Absent(DataError):
    """Data of which there is nothing."""


class Arrays(NamedTuple):
    """The four arrays of a data set, of which images may stay in their files; and users, where they are known."""

    x_train: "Images | ImageFiles"
    y_train: Labels
    x_test: "Images | ImageFiles"
    y_test: Labels
    users: Labels | None = None  #: whose each training image is


@dataclass(frozen=True)
class Folder:
    """A directory whose files may be gzipped and, where a checksum ("sha1:..." or "md5:...") is known, are checked."""

    path: Path
    checksums: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Tell whether the file is here, plain or gzipped; a name that ends with a slash is a directory's."""
        if name.endswith("/"):
            return os.path.isdir(self.path / name)
        return os.path.isfile(self.path / name) or os.path.isfile(self.path / f"{name}.gz")

    def read(self, name: str) -> bytes:
        """Read, unpack and check one file."""
        path = self.path / name
        try:
            content = path.read_bytes() if path.is_file() else gzip.decompress((self.path / f"{name}.gz").read_bytes())
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing") from error
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if expected := self.checksums.get(name, ""):
            kind, _, digest = expected.partition(":")
            found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
            if found != digest:
                raise DataError(f"{path} is damaged: its {kind} is {found}, the published one {digest}")
        return content


def idx(folder: Folder, name: str, dimensions: int) -> Images:
    """Read an array of bytes in the idx format of MNIST and its kin."""
    content, header = folder.read(name), 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise DataError(f"{folder.path / name} is damaged: it does not begin like a {dimensions}-dimensional idx file")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) != header + int(np.prod(shape, dtype=object)):
        raise DataError(f"{folder.path / name} is damaged: {len(content)} bytes do not hold an array of shape {shape}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def mnist(folder: Folder) -> Arrays:
    """Read the four idx files of MNIST's layout, ten classes."""
    parts: list[Any] = []
    for kind in ("train", "t10k"):
        name = f"{kind}-labels-idx1-ubyte"
        x, y = idx(folder, f"{kind}-images-idx3-ubyte", 3), idx(folder, name, 1)
        if len(x) != len(y):
            raise DataError(f"{folder.path / name} has {len(y)} labels for {len(x)} images")
        parts += [x[:, None], _labels(y, 10, folder.path / name)]
    return Arrays(*parts)


def cifar_binary(train: Sequence[str], test: Sequence[str], classes: int) -> Callable[[Folder], Arrays]:
    """Make a reader of CIFAR's binary layout: label bytes (the last one counts), then three planes of 32 x 32."""
    width = 3073 if classes <= 10 else 3074

    def batch(folder: Folder, name: str) -> tuple[Images, Labels]:
        content = folder.read(name)
        if not content or len(content) % width:
            raise DataError(f"{folder.path / name} is damaged: {len(content)} bytes are not records of {width} bytes")
        rows = np.frombuffer(content, np.uint8).reshape(-1, width)
        return rows[:, -3072:].reshape(-1, 3, 32, 32), _labels(rows[:, -3073], classes, folder.path / name)

    return _batches(batch, train, test)


def cifar_python(train: Sequence[str], test: Sequence[str], classes: int) -> Callable[[Folder], Arrays]:
    """Make a reader of CIFAR's python layout: pickled dictionaries of `data` and `labels` or `fine_labels`."""

    def batch(folder: Folder, name: str) -> tuple[Images, Labels]:
        path, content = folder.path / name, folder.read(name)
        try:
            entries = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
            x = np.asarray(entries[b"data"])
            y = np.asarray(entries[b"labels" if classes <= 10 else b"fine_labels"])
        except Exception as error:  # a broken pickle can raise anything
            raise DataError(f"{path} is not a CIFAR batch: {type(error).__name__}: {error}") from error
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or y.shape != x.shape[:1]:
            raise DataError(f"{path} is not a CIFAR batch: data {x.dtype} {x.shape}, labels {y.shape}")
        return x.reshape(-1, 3, 32, 32), _labels(y, classes, path)

    return _batches(batch, train, test)


def archive(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the four arrays of an .npz, and what may be beside them: which label is `void`, and `names` of classes."""
    try:
        with np.load(path, allow_pickle=False) as content:
            if missing := [name for name in ARRAYS if name not in content]:
                raise DataError(f"{path} lacks the array {', '.join(missing)} (it has {', '.join(content)})")
            return {name: content[name] for name in (*ARRAYS, "void", "names") if name in content}
    except DataError:
        raise
    except Exception as error:  # a broken zip file can raise anything
        raise DataError(f"{path} cannot be read as an .npz of plain arrays: {error}") from error


def npz(path: Path, found: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Take four arrays: uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W], and a whole-number label of each."""
    parts: list[Any] = []
    for kind in ("train", "test"):
        x, y = channels_first(found[f"x_{kind}"], f"{path}: x_{kind}"), found[f"y_{kind}"]
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or len(y) != len(x):
            raise DataError(f"{path}: y_{kind} must be {len(x)} whole numbers, not {y.dtype} of shape {y.shape}")
        parts += [x, y]
    if parts[0].shape[1:] != parts[2].shape[1:]:
        raise DataError(f"{path}: training images are {parts[0].shape[1:]}, test images {parts[2].shape[1:]}")
    present = np.unique(parts[1])
    if not np.array_equal(present, np.arange(len(present))):
        raise DataError(f"{path}: y_train must use every class from 0 up, not {present[:20].tolist()}")
    return Arrays(parts[0], parts[1].astype(np.int64), parts[2], _labels(parts[3], len(present), f"{path}: y_test"))


class _ArraysOnly(pickle.Unpickler):
    """Reads containers, numbers and arrays; a pickle that names anything else is refused, not executed."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not an array")
        return self.allowed[module, name]


def _batches(
    batch: Callable[[Folder, str], tuple[Images, Labels]], train: Sequence[str], test: Sequence[str]
) -> Callable[[Folder], Arrays]:
    def read(folder: Folder) -> Arrays:
        parts: list[Any] = []
        for names in (train, test):
            x, y = zip(*(batch(folder, name) for name in names), strict=True)
            parts += [np.concatenate(x), np.concatenate(y)]
        return Arrays(*parts)

    return read


def _labels(y: npt.NDArray[Any], classes: int, where: Path | str) -> Labels:
    if len(y) and (y.min() < 0 or y.max() >= classes):
        raise DataError(f"{where}: labels {y.min()}..{y.max()} are outside 0..{classes - 1}")
    return y.astype(np.int64)


def channels_first(x: npt.NDArray[Any], where: str) -> Images:
    """Bring images to [N, C, H, W]."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or 0 in x.shape:
        raise DataError(f"{where} must be uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], not {x.dtype} {x.shape}")
    if x.ndim == 3:
        return x[:, None]
    if min(x.shape[1], x.shape[3]) > 4:
        raise DataError(f"{where} must have 1 to 4 channels, first or last, not {x.shape}")
    # the short axis is the channels; if both ends are as short, it is read as it is stored here: channels first
    return x if x.shape[1] <= x.shape[3] else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
