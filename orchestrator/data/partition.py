"""The long-tailed cut, and the partitions among clients: by Dirichlet draws, by users, or of maps of labels."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.readers import DataError, Labels

Rows = npt.NDArray[np.int64]

TRIES = 1000
LONG_TAIL, PARTITION, VALIDATION, TESTS, SERVER = range(5)  # one random stream per purpose


def stream(seed: int, *purpose: int) -> np.random.Generator:
    """Make the random numbers of one purpose, independent of those of every other."""
    if seed < 0:
        raise DataError(f"seed must not be negative, not {seed}")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=purpose)))


def whole(x: npt.NDArray[np.floating[Any]]) -> Rows:
    """Round down, but take 49.999999999999993 for the 50 it stands for."""
    return np.asarray(np.floor(x * (1 + 1e-12)), np.int64)


def shuffle_by_class(y: Labels, rng: np.random.Generator) -> Rows:
    """Order all rows class after class, at random within each class."""
    # sorting raw bits, because only these are promised to stay the same in every version of numpy
    return np.lexsort((np.asarray(rng.bit_generator.random_raw(len(y))), y)).astype(np.int64)


def draw(y: Labels, sizes: Rows, rng: np.random.Generator) -> Rows:
    """Draw sizes[c] rows of each class c, or all it has if these are fewer, in ascending order."""
    counts = np.bincount(y, minlength=len(sizes))
    rank = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(shuffle_by_class(y, rng)[rank < np.repeat(sizes, counts)])


def long_tail(y: Labels, classes: int, imbalance: float) -> Rows:
    """Keep n_max * imbalance ** (-c / (classes - 1)) rows of class c, the same rows whatever the seed of the run."""
    _check(imbalance)
    if imbalance == 1:
        return np.arange(len(y), dtype=np.int64)
    n_max = len(y) // classes
    sizes = [n_max * imbalance ** (-c / max(classes - 1, 1)) for c in range(classes)]
    return draw(y, np.maximum(whole(np.array(sizes)), 1), stream(0, LONG_TAIL))


def per_class(y: Labels, clients: int, alpha: float, seed: int = 0) -> list[Rows]:
    """Divide each class by a Dirichlet draw of its own; a client may stay empty."""
    rng = _begin(y, clients, alpha, seed)
    counts = _shares(np.bincount(y), clients, alpha, math.inf, rng, tries=1)[0]
    return [np.sort(rows) for rows in _deal(y, counts, rng)]


def per_class_capped(y: Labels, clients: int, alpha: float, seed: int = 0, min_size: int = 10) -> list[Rows]:
    """Divide as per_class, but give nothing more to a client with its fair share, and nobody less than min_size."""
    rng = _begin(y, clients, alpha, seed)
    counts = _capped(np.bincount(y), clients, alpha, min_size, rng)
    return [np.sort(rows) for rows in _deal(y, counts, rng)]


def grouped_equal(y: Labels, clients: int, alpha: float, seed: int = 0) -> list[Rows]:
    """Divide by the capped rule within groups of ten clients, lay all end to end and cut it into equal parts."""
    rng = _begin(y, clients, alpha, seed)
    order, dealt = shuffle_by_class(np.zeros_like(y), rng), []
    for first in range(0, clients, 10):
        last = min(first + 10, clients)
        chunk = order[len(y) * first // clients : len(y) * last // clients]
        group = y[chunk]
        min_size = len(chunk) // (2 * (last - first))
        counts = _capped(np.bincount(group), last - first, alpha, min_size, rng)
        dealt += [chunk[rows] for rows in _deal(group, counts, rng)]
    row = np.concatenate(dealt)
    return [np.sort(row[len(y) * k // clients : len(y) * (k + 1) // clients]) for k in range(clients)]


PARTITIONS: dict[str, Callable[[Labels, int, float, int], list[Rows]]] = {
    "per_class": per_class,
    "per_class_capped": per_class_capped,
    "grouped_equal": grouped_equal,
}


def by_user(users: Labels, clients: int, seed: int = 0) -> list[Rows]:
    """Deal users to clients in turns, in random order: the images of each stay together."""
    known, users = np.unique(users, return_inverse=True)
    if not 1 <= clients <= len(known):
        raise DataError(f"{len(known)} users cannot be divided among {clients} clients: use 1 to {len(known)} clients")
    order = shuffle_by_class(np.zeros_like(known), stream(seed, PARTITION))
    client = np.empty(len(known), np.int64)
    client[order] = np.arange(len(known)) % clients
    return [np.flatnonzero(client[users] == k).astype(np.int64) for k in range(clients)]


def foreground(n: int, clients: int, imbalance: float, seed: int = 0) -> list[Rows]:
    """Divide n images at random into parts whose sizes fall exponentially, the first `imbalance` times the last.

    MuPFL says neither how large its subsets of Cityscapes are nor what its IF is of: that it is of their sizes is ours.
    """
    _check(imbalance)
    if not 1 <= clients <= n:
        raise DataError(f"{n} images cannot be divided among {clients} clients: use 1 to {n} clients")
    shares = np.cumsum([imbalance ** (-k / max(clients - 1, 1)) for k in range(clients)])
    order = np.argsort(stream(seed, PARTITION).bit_generator.random_raw(n), kind="stable")
    ends = whole(shares / shares[-1] * n + 0.5)
    return [np.sort(rows).astype(np.int64) for rows in np.split(order, ends[:-1])]


def _check(imbalance: float) -> None:
    if not (1 <= imbalance < math.inf):
        raise DataError(f"imbalance must be a finite number of at least 1, not {imbalance}")


def _begin(y: Labels, clients: int, alpha: float, seed: int) -> np.random.Generator:
    if not 1 <= clients <= len(y):
        raise DataError(f"{len(y)} samples cannot be divided among {clients} clients: use 1 to {len(y)} clients")
    if not 1e-6 <= alpha < math.inf:
        raise DataError(f"alpha must be a finite number of at least 1e-6, not {alpha}")
    return stream(seed, PARTITION)


def _shares(sizes: Rows, clients: int, alpha: float, cap: float, rng: np.random.Generator, tries: int) -> Rows:
    """Draw how many samples of each class each client gets, several times: [tries, clients, classes]."""
    shape = (len(sizes), tries, clients)
    # gamma(a) = gamma(a + 1) * u ** (1 / a), as logarithms: a tiny alpha cannot underflow to a draw of zeros
    weights = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    counts, held = np.zeros(shape, np.int64), np.zeros(shape[1:], np.int64)
    for weight, count, size in zip(weights, counts, sizes, strict=True):
        weight[held >= cap] = -math.inf
        edges = np.cumsum(np.exp(weight - weight.max(-1, keepdims=True)), -1)
        # Divided by its own last value, the last edge is exactly 1 and no sample falls to a client of share 0; rounded,
        # for floored edges would hand the last client a sample of nearly every class.
        count[...] = edges / edges[:, -1:] * size + 0.5
        count[:, 1:] -= count[:, :-1].copy()
        held += count
    return counts.transpose(1, 2, 0)


def _capped(sizes: Rows, clients: int, alpha: float, min_size: int, rng: np.random.Generator) -> Rows:
    total, batch = int(sizes.sum()), 10
    if min_size * clients <= total:
        for _ in range(TRIES // batch):
            counts = _shares(sizes, clients, alpha, total / clients, rng, batch)
            enough = counts.sum(2).min(1) >= min_size
            if enough.any():
                return np.asarray(counts[enough.argmax()])
    raise DataError(
        f"no draw in {TRIES} with alpha={alpha} gave each of {clients} clients at least {min_size} of {total} samples: "
        "use a larger alpha, fewer clients, more data, or the partition per_class"
    )


def _deal(y: Labels, counts: Rows, rng: np.random.Generator) -> list[Rows]:
    """Give each client as many rows as counted, class after class."""
    order = shuffle_by_class(y, rng)
    owner = np.concatenate([np.repeat(np.arange(len(counts)), column) for column in counts.T])
    return np.split(order[np.argsort(owner, kind="stable")], np.cumsum(counts.sum(1))[:-1])
