"""Who holds which rows: the training, validation and local test sets of every client."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.datasets import Dataset
from orchestrator.data.maps import VOID, Maps
from orchestrator.data.partition import (
    PARTITIONS,
    SERVER,
    TESTS,
    VALIDATION,
    Rows,
    by_user,
    draw,
    foreground,
    long_tail,
    stream,
    whole,
)
from orchestrator.data.readers import DataError, Labels

TEST_ALLOCS = ("floor", "ceil_owned")


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of each client in ascending order, and the class counts [clients, classes] of its training rows.

    Where every pixel has a label, counts are of pixels, and a client knows the classes of its foreground alone: every
    other one is background to it, which is the last class.
    """

    train: tuple[Rows, ...]
    validation: tuple[Rows, ...]
    test: tuple[Rows, ...]
    counts: Rows
    server: Rows = field(default_factory=lambda: np.zeros(0, np.int64))  #: rows of what the server owns, if anything
    foreground: Rows = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: [clients, classes that it knows]

    @property
    def server_id(self) -> int:
        """The number by which the server goes where it does a client's work: the one after the last client's."""
        return len(self.train)

    def rows(self, id: int) -> Rows:
        """Return the training rows of a client, or those of the server."""
        return self.server if id == self.server_id else self.train[id]

    @property
    def global_counts(self) -> Rows:
        """The training samples of each class, all clients together."""
        return np.asarray(self.counts.sum(0))

    @property
    def empty_tests(self) -> int:
        """How many clients have training data but no local test sample."""
        return sum(len(rows) > 0 and len(tests) == 0 for rows, tests in zip(self.train, self.test, strict=True))

    def owned(self, client: int) -> Rows:
        """List the classes of which a client has training samples."""
        return np.flatnonzero(self.counts[client]).astype(np.int64)

    def relabelling(self, client: int) -> Maps:
        """Return what each label of a pixel becomes for a client."""
        table = np.full(VOID + 1, self.counts.shape[1] - 1, np.uint8)
        table[self.foreground[client]], table[VOID] = self.foreground[client], VOID
        return table

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over the rows and counts of all clients: equal for methods that differ in what the server owns."""
        sha = hashlib.sha256()
        for name, array in self._flat().items():
            sha.update(f"{name}{array.shape}".encode())
            sha.update(array.astype("<i8").tobytes())
        return sha.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write everything as one .npz of plain arrays."""
        draft = Path(f"{path}.draft-{os.getpid()}")
        with draft.open("wb") as file:
            np.savez(file, digest=np.array(self.digest), server=self.server, **self._flat())  # type: ignore[arg-type]
        draft.replace(path)  # a reader sees the whole file or none

    @classmethod
    def read(cls, path: str | Path) -> "Split":
        """Read what save wrote, and check it."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                parts: dict[str, Any] = {
                    name: archive[name] for name in ("counts", "server", "foreground") if name in archive
                }
                for kind in ("train", "validation", "test"):
                    parts[kind] = tuple(np.split(archive[kind], archive[f"{kind}_ends"][:-1]))
                split, digest = cls(**parts), str(archive["digest"])
        except Exception as error:  # a broken zip file can raise anything
            raise DataError(f"{path} cannot be read as a split: {type(error).__name__}: {error}") from error
        if split.digest != digest:
            raise DataError(f"{path} is damaged: its content does not match its digest")
        return split

    def _flat(self) -> dict[str, Rows]:
        flat = {"counts": self.counts} | ({"foreground": self.foreground} if self.foreground.size else {})
        for kind in ("train", "validation", "test"):
            rows: tuple[Rows, ...] = getattr(self, kind)
            flat[kind] = np.concatenate(rows)
            flat[f"{kind}_ends"] = np.cumsum([len(part) for part in rows], dtype=np.int64)
        return flat


def split(
    dataset: Dataset,
    *,
    clients: int,
    partition: str = "per_class",
    alpha: float = 0.5,
    imbalance: float = 1.0,
    test_alloc: str = "floor",
    validation: float = 0.0,
    seed: int = 0,
    server_images: int = 0,
    classes_per_client: int = 1,
) -> Split:
    """Cut the training set long-tailed, divide it among clients and give each a local test set of its own mixture.

    The server gets `server_images` of each class, without taking any from the clients.
    """
    if partition not in (*PARTITIONS, "by_user", "foreground"):
        raise DataError(f"partition must be one of {', '.join(PARTITIONS)}, by_user or foreground, not {partition!r}")
    if test_alloc not in TEST_ALLOCS:
        raise DataError(f"test_alloc must be one of {', '.join(TEST_ALLOCS)}, not {test_alloc!r}")
    if not 0 <= validation < 1:
        raise DataError(f"validation must be at least 0 and less than 1, not {validation}")
    if partition == "by_user" and dataset.users is None:
        raise DataError(f"partition by_user keeps each user's images together, but {dataset.name} names no users")
    if dataset.segmented and partition != "foreground":
        why = f"{dataset.name} has a label for every pixel, so that an image has many classes"
        raise DataError(f"{why}, but partition {partition} goes by its only one: use task segmentation, and foreground")
    if dataset.segmented:
        return _of_pixels(dataset, clients, imbalance, validation, seed, classes_per_client)
    if partition == "foreground":
        raise DataError(f"partition foreground is of labels of pixels, but {dataset.name} has one label an image")
    y = dataset.y_train
    kept = long_tail(y, dataset.classes, imbalance)
    train, held = [], []
    if dataset.users is not None and partition == "by_user":
        dealt = by_user(dataset.users[kept], clients, seed)
    else:
        dealt = PARTITIONS[partition](y[kept], clients, alpha, seed)
    for k, rows in enumerate(dealt):
        rows = kept[rows]
        sizes = np.bincount(y[rows], minlength=dataset.classes)
        out = rows[draw(y[rows], whole(sizes * validation), stream(seed, VALIDATION, k))]
        train.append(np.setdiff1d(rows, out, assume_unique=True))
        held.append(out)
    counts = np.stack([np.bincount(y[rows], minlength=dataset.classes) for rows in train]).astype(np.int64)
    tests = local_tests(dataset.y_test, counts, test_alloc, seed)
    made = Split(tuple(train), tuple(held), tests, counts)
    if not server_images:
        return made
    return replace(made, server=auxiliary(y, np.full(dataset.classes, server_images), kept, train, seed))


def check(name: str, images: int | None, classes: int, clients: int, classes_per_client: int) -> None:
    """Refuse what cannot be divided, as far as that is known without images."""
    if not 1 <= classes_per_client <= classes:
        raise DataError(f"classes_per_client must be 1 to {classes}, the classes of {name}, not {classes_per_client}")
    if images is not None and clients > images:
        raise DataError(f"{images} images cannot be divided among {clients} clients: use 1 to {images} clients")


def _of_pixels(
    dataset: Dataset, clients: int, imbalance: float, validation: float, seed: int, classes_per_client: int
) -> Split:
    """Divide images at random; client k knows the classes k, k + 1, ... and is tested on all test images (MuPFL)."""
    classes = dataset.classes
    check(dataset.name, None, classes, clients, classes_per_client)
    known = (np.arange(clients)[:, None] + np.arange(classes_per_client)) % classes
    train, held = [], []
    for k, rows in enumerate(foreground(len(dataset.y_train), clients, imbalance, seed)):
        nothing = np.zeros(len(rows), np.int64)
        out = rows[draw(nothing, whole(np.array([len(rows) * validation])), stream(seed, VALIDATION, k))]
        train.append(np.setdiff1d(rows, out, assume_unique=True))
        held.append(out)
    everything = np.arange(len(dataset.y_test))
    made = Split(
        tuple(train), tuple(held), (everything,) * clients, np.zeros((clients, classes + 1), np.int64), foreground=known
    )
    for k, rows in enumerate(train):
        pixels = np.zeros(VOID + 1, np.int64)
        for row in rows:  # one by one, as bincount makes eight bytes of each
            pixels += np.bincount(dataset.y_train[row].ravel(), minlength=VOID + 1)
        np.add.at(made.counts[k], made.relabelling(k)[:classes], pixels[:classes])
    return made


def auxiliary(y: Labels, sizes: Rows, kept: Rows, train: Sequence[Rows], seed: int) -> Rows:
    """Draw sizes[c] rows of each class c, from what the long tail left out and then from what the clients have."""
    rng, chosen = stream(seed, SERVER), np.zeros(0, np.int64)
    for source in (np.setdiff1d(np.arange(len(y)), kept), np.sort(np.concatenate(train))):
        lacking = sizes - np.bincount(y[chosen], minlength=len(sizes))
        chosen = np.concatenate([chosen, source[draw(y[source], lacking, rng)]])
    return np.sort(chosen)


def local_tests(y: Labels, counts: Rows, test_alloc: str, seed: int) -> tuple[Rows, ...]:
    """Draw each client's test rows in the proportions of its training counts; clients may share rows."""
    available = np.bincount(y, minlength=counts.shape[1])
    scaled, total = counts * len(y), int(counts.sum())
    sizes = -(-scaled // total) if test_alloc == "ceil_owned" else scaled // total
    sizes = np.minimum(sizes, available)
    for k in np.flatnonzero((sizes.sum(1) == 0) & (counts.sum(1) > 0)):
        # a client with data is tested on something: its most frequent class that can be tested at all
        testable = np.where(available > 0, counts[k], 0)
        sizes[k, testable.argmax()] = int(testable.max() > 0)
    return tuple(draw(y, size, stream(seed, TESTS, k)) for k, size in enumerate(sizes))


def describe(dataset: Dataset, split: Split) -> dict[str, Any]:
    """Sum up the data of a run for its record."""
    sizes = np.array([len(rows) for rows in split.train])
    return {
        "name": dataset.name,
        "digest": dataset.digest,
        "classes": dataset.classes,
        "train": int(sizes.sum()),
        "validation": sum(len(rows) for rows in split.validation),
        "class_counts": split.global_counts.tolist(),
        "clients": len(sizes),
        "client_sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "empty_tests": split.empty_tests,
        "server": len(split.server),
        "split": split.digest,
    } | ({"class_names": list(dataset.names), "foreground": split.foreground.tolist()} if dataset.segmented else {})
