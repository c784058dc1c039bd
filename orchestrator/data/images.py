"""Data sets that are directories of images."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.readers import Arrays, DataError, Folder, Images

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def tiny_imagenet(folder: Folder, classes: int = 200, per_class: int = 500) -> Arrays:
    """Read the directories of tiny-imagenet-200, classes in the order of their sorted names."""
    names = sorted(set(folder.read("wnids.txt").decode().split()))
    if len(names) != classes:
        raise DataError(f"{folder.path / 'wnids.txt'} is damaged: {len(names)} classes, expected {classes}")
    train = []
    for name in names:
        images = _listing(folder.path / "train" / name / "images")
        if len(images) != per_class:
            raise DataError(f"{folder.path / 'train' / name} has {len(images)} images, expected {per_class}")
        train += images
    number = {name: c for c, name in enumerate(names)}
    rows = [line.split("\t")[:2] for line in folder.read("val/val_annotations.txt").decode().splitlines() if line]
    if not rows or any(len(row) < 2 or row[1] not in number for row in rows):
        raise DataError(f"{folder.path / 'val/val_annotations.txt'} is damaged: it names no class of wnids.txt")
    size = _header(train[0])[1]
    return Arrays(
        _decode(train, "RGB", size),
        np.repeat(np.arange(classes, dtype=np.int64), per_class),
        _decode([folder.path / "val" / "images" / file for file, _ in rows], "RGB", size),
        np.array([number[name] for _, name in rows], dtype=np.int64),
    )


def image_folder(path: Path) -> Arrays:
    """Read train/<class>/* and test/<class>/*, all brought to the size of the first; grey if all of them are."""
    names = _folders(path / "train")
    if unknown := sorted(set(_folders(path / "test")) - set(names)):
        raise DataError(f"{path / 'test'} has classes that train has not: {', '.join(unknown)}")
    files = {kind: [_listing(path / kind / name) for name in names] for kind in ("train", "test")}
    for name, found in zip(names, files["train"], strict=True):
        if not found:
            raise DataError(f"{path / 'train' / name} holds no images")
    train, test = (list(chain.from_iterable(found)) for found in files.values())
    if not train or not test:
        raise DataError(f"{path} needs images in train/<class>/ and test/<class>/")
    size = _header(train[0])[1]
    mode = "L" if all(_header(file)[0] in ("1", "L") for file in train + test) else "RGB"
    y_train, y_test = (np.repeat(np.arange(len(names)), [len(found) for found in files[kind]]) for kind in files)
    return Arrays(
        _decode(train, mode, size, resize=True),
        y_train.astype(np.int64),
        _decode(test, mode, size, resize=True),
        y_test.astype(np.int64),
    )


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _listing(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    return [file for file in files if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]


@contextmanager
def open_image(path: Path) -> Iterator[Any]:
    """Open an image file, or say which one is not readable."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # every decoder raises its own kinds
        raise DataError(f"{path} is not a readable image: {error}") from error


def _header(path: Path) -> tuple[str, tuple[int, int]]:
    with open_image(path) as image:
        return image.mode, image.size


def _decode(paths: Sequence[Path], mode: str, size: tuple[int, int], resize: bool = False) -> Images:
    x = np.empty((len(paths), len(mode), size[1], size[0]), np.uint8)
    for row, path in zip(x, paths, strict=True):
        with open_image(path) as image:
            if image.size != size and not resize:
                raise DataError(f"{path} is {image.size}, the others are {size}")
            pixels = image.convert(mode)
            pixels = pixels if pixels.size == size else pixels.resize(size)
            row[...] = np.asarray(pixels).reshape(size[1], size[0], len(mode)).transpose(2, 0, 1)
    return x
