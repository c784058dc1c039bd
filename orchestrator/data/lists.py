"""Data sets that are published as lists of image files, and are too large to be held in memory."""

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from orchestrator.data.files import ImageFiles, listed
from orchestrator.data.readers import Arrays, DataError, Folder, Labels

IMAGENET = "imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"  #: usual names of what holds train and val
INATURALIST = "inaturalist", "iNaturalist", "inat2017"
PHOTOS = "train_val_images"


def imagenet_lt(classes: int = 1000, side: int = 256) -> Callable[[Folder], Arrays]:
    """Make a reader of ImageNet-LT's lists, lines of a path and a class; val may be flat or sorted, here and there."""

    def read(folder: Folder) -> Arrays:
        (train, y_train), (test, y_test) = (
            _lines(folder, f"ImageNet_LT_{kind}.txt", classes) for kind in ("train", "test")
        )
        root = _holding(folder.path, "train", IMAGENET)
        wnids = {c: PurePosixPath(name).parent.name for name, c in zip(train, y_train.tolist(), strict=True)}
        flat = _moved(test, [""] * len(test))
        deep = _moved(test, [wnids.get(c, "") for c in y_test.tolist()])
        test = next((names for names in (test, flat, deep) if (root / names[0]).is_file()), test)
        return _arrays(root, train, y_train, test, y_test, side)

    return read


def inaturalist(train: str, side: int = 256) -> Callable[[Folder], Arrays]:
    """Make a reader of the federated splits of iNaturalist 2017: image_id or image_path, class, and perhaps user_id."""

    def read(folder: Folder) -> Arrays:
        root = _holding(folder.path, PHOTOS, INATURALIST)
        (names, y, users), (tests, y_test, _) = (_table(folder, file) for file in (train, "test.csv"))
        known = np.unique(y)
        if strange := sorted(set(y_test.tolist()) - set(known.tolist())):
            raise DataError(f"{folder.path / 'test.csv'} has classes that {train} has not: {_some(strange)}")
        found = _located(root, [*names, *tests])
        y, y_test = (np.searchsorted(known, labels).astype(np.int64) for labels in (y, y_test))
        arrays = _arrays(root, found[: len(y)], y, found[len(y) :], y_test, side)
        return arrays._replace(users=np.unique(users, return_inverse=True)[1].astype(np.int64) if users else None)

    return read


def _moved(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Put each file into a folder of the first directory of its path."""
    paths = map(PurePosixPath, names)
    return [str(PurePosixPath(path.parts[0], folder, path.name)) for path, folder in zip(paths, folders, strict=True)]


def _arrays(
    root: Path, train: Sequence[str], y_train: Labels, test: Sequence[str], y_test: Labels, side: int
) -> Arrays:
    files, n = listed(root, [*train, *test], (side, side)), len(train)
    _ = files.cache  # a place that cannot be written is told here, and not in the log of an actor
    return Arrays(ImageFiles(files, range(n)), y_train, ImageFiles(files, range(n, len(files))), y_test)


def _holding(lists: Path, name: str, usual: Iterable[str]) -> Path:
    """Find the directory with the images: that of the lists, the one above, or one of a usual name in either."""
    places = [place / inside for place in (lists, lists.absolute().parent) for inside in ("", *usual)]
    for place in places:
        if (place / name).is_dir():
            return place
    raise DataError(
        f"{lists} has the lists, but there is no directory {name} with the images in {', '.join(map(str, places))}"
    )


def _lines(folder: Folder, file: str, classes: int) -> tuple[list[str], Labels]:
    names, labels = [], []
    for number, line in enumerate(_text(folder, file).splitlines(), start=1):
        name, _, label = line.strip().rpartition(" ")
        if line.strip():
            if not (name and label.isdecimal() and int(label) < classes):
                where = f"{folder.path / file}:{number}"
                raise DataError(f"{where}: {line[:80]!r} is not a path and a class of 0..{classes - 1}")
            names.append(name)
            labels.append(int(label))
    if not names:
        raise DataError(f"{folder.path / file} is empty")
    return names, np.array(labels, np.int64)


def _table(folder: Folder, file: str) -> tuple[list[str], Labels, list[str]]:
    """Return the images of a table, their classes and, if it has the column, their users."""
    path, rows = folder.path / file, csv.DictReader(io.StringIO(_text(folder, file), newline=""))
    header = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = header
    image = next((name for name in ("image_path", "image_id") if name in header), None)
    missing = ["image_id or image_path"] * (image is None) + ["class"] * ("class" not in header)
    if missing or image is None:
        raise DataError(f"{path} lacks the column {' and '.join(missing)}; its first line is {','.join(header)!r}")
    names, labels, users = [], [], []
    for row in rows:
        name, label = row[image], row["class"]
        if not (name and label and label.isdecimal()):
            raise DataError(f"{path}:{rows.line_num}: {name!r} and {label!r} are not an image and a class number")
        names.append(os.path.join(PHOTOS, name.removeprefix(f"{PHOTOS}/")) if image == "image_path" else name)
        labels.append(int(label))
        if "user_id" in header:
            if not row["user_id"]:
                raise DataError(f"{path}:{rows.line_num}: {name!r} has no user_id")
            users.append(row["user_id"])
    if not names:
        raise DataError(f"{path} is empty")
    return names, np.array(labels, np.int64), users


def _located(root: Path, names: list[str]) -> list[str]:
    """Replace what is only the name of a photo by its path below <super category>/<species>/."""
    bare = {os.path.splitext(name)[0]: "" for name in names if "/" not in name}
    for folder, _, files in os.walk(root / PHOTOS) if bare else ():
        within = os.path.relpath(folder, root)
        bare |= {stem: f"{within}/{file}" for file in files if (stem := os.path.splitext(file)[0]) in bare}
    if lost := [name for name, path in bare.items() if not path]:
        raise DataError(f"{len(lost):,} images are not in {root / PHOTOS}: {_some(lost)}")
    return [name if "/" in name else bare[os.path.splitext(name)[0]] for name in names]


def _text(folder: Folder, file: str) -> str:
    try:
        return folder.read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{folder.path / file} is damaged: {error}") from error


def _some(things: Sequence[object]) -> str:
    return ", ".join(map(str, things[:5])) + ", ..." * (len(things) > 5)
