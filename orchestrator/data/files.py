"""Images that stay in their files: decoded when their rows are asked for, and then kept by each machine."""

import fcntl
import hashlib
import math
import os
import shutil
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.readers import DataError, Images

PLACE, BUDGET = "ORCHESTRATOR_CACHE", "ORCHESTRATOR_CACHE_GB"
SCHEME = 1  #: to be raised whenever the same file is decoded to other pixels
SUM = 16  #: bytes of a checksum
IDLE = 7 * 24 * 3600.0  #: seconds after which a file that nobody reads may go where others lack room
Numbers = npt.NDArray[np.int64]
Size = tuple[int, int]  #: height and width


@dataclass(frozen=True, eq=False)
class Listing:
    """Image files below one directory, all to be brought to one size; a name costs no more than its letters."""

    root: str
    size: Size
    names: Images  #: the bytes of all names, one after another
    ends: Numbers  #: where each name ends
    sizes: Numbers  #: bytes of each file
    stamp: str  #: changes when any file does
    place: str  #: directory of the cache, on whatever machine the images are read
    budget: int | None  #: bytes that all caches there may take together; None: half of what is free without them
    labels: Images | None = None  #: what each byte of a map of labels stands for; None: files are pictures in colour

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        return 3 if self.labels is None else 1, *self.size

    def path(self, row: int) -> str:
        """Return the path of a file."""
        begin = self.ends[row - 1] if row else 0
        return os.path.join(self.root, self.names[begin : self.ends[row]].tobytes().decode())

    def digest(self, rows: range) -> str:
        """Return a SHA-256 over names and sizes of some files and the resolution to which they are brought."""
        begin = self.ends[rows.start - 1] if rows.start else 0
        here = slice(rows.start, rows.stop)
        sha = hashlib.sha256(f"{self.shape} {len(rows)} {self.labels}".encode())
        for numbers in (self.ends[here] - begin, self.sizes[here]):
            sha.update(numbers.astype("<i8").tobytes())
        sha.update(self.names[begin : self.ends[rows.stop - 1] if len(rows) else begin].tobytes())
        return sha.hexdigest()

    @cached_property
    def cache(self) -> "Cache":
        """The decoded images that this machine keeps."""
        return Cache(self)

    def read(self, row: int, into: Images) -> None:
        """Fill in the pixels of one image."""
        if not self.cache.read(row, into):
            into[...] = decode(self.path(row), self.size, self.labels)
            self.cache.write(row, into)

    def __reduce__(self) -> tuple[Any, ...]:
        # without the cache, which every process opens for itself
        return Listing, (
            *(self.root, self.size, self.names, self.ends),
            *(self.sizes, self.stamp, self.place, self.budget, self.labels),
        )


class ImageFiles:
    """A range of listed images that looks like an array of bytes [N, C, H, W] wherever rows are asked for."""

    dtype = np.dtype(np.uint8)

    def __init__(self, listing: Listing, rows: range) -> None:
        self.listing, self.rows = listing, rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Images, channels, height and width."""
        return len(self), *self.listing.shape

    @property
    def digest(self) -> str:
        """A SHA-256 over everything but the pixels."""
        return self.listing.digest(self.rows)

    def __getitem__(self, rows: Any) -> Images:
        return self.ask(rows)()

    def ask(self, rows: Any) -> Callable[[], Images]:
        """Begin to read some rows; what is returned waits for them."""
        wanted = np.asarray(rows, np.int64).reshape(-1)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()}..{wanted.max()} of {len(self)} images")
        pixels = np.empty((len(wanted), *self.shape[1:]), np.uint8)
        _ = self.listing.cache  # opened before several threads would open it
        reading = [
            _pool().submit(self.listing.read, self.rows[row], into)
            for row, into in zip(wanted.tolist(), pixels, strict=True)
        ]

        def read() -> Images:
            for one in reading:
                one.result()
            return pixels

        return read


class Cache:
    """Decoded images in one file with a fixed place for each, shared by all processes of a machine.

    It is read and written by position: a mapped page would kill the process where the disk is full or the file cut.
    """

    def __init__(self, listing: Listing) -> None:
        self.record = SUM + math.prod(listing.shape)
        self.places = np.full(len(listing), -1, np.int64)  #: of each row in the file; -1: it is not kept
        self.writable = False
        if listing.budget == 0:
            return
        versions, name = _names(listing)
        try:
            folder = Path(listing.place).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                weakref.finalize(self, os.close, self._file)
                _locked(self._file, fcntl.LOCK_SH)  # until it is closed: nobody removes it
                os.utime(self._file)
                room = _room(folder, name, versions, len(listing) * self.record, listing.budget)
                rows = room // self.record
                os.truncate(self._file, rows * self.record)  # its size is what it may take, long before it does
        except (OSError, RuntimeError) as error:  # RuntimeError: the home of nobody
            self._stop(f"decoded images cannot be kept in {listing.place}: {error}; name another place by {PLACE}")
            return
        # Always the same rows: under cyclic access the most recent ones would push out just what is needed next.
        order = np.random.Generator(np.random.Philox(0)).permutation(len(listing))
        self.places[order[:rows]] = np.arange(rows)
        self.writable = True

    def read(self, row: int, into: Images) -> bool:
        """Fill in the pixels of a row, and tell whether they were there and whole."""
        if self.places[row] < 0:
            return False
        found = bytearray(SUM)
        try:
            length = os.preadv(self._file, [found, into.data], self.places[row] * self.record)
        except OSError:
            return False
        return length == self.record and found == _checksum(row, into)

    def write(self, row: int, pixels: Images) -> None:
        """Keep the pixels of a row, if it is one of those to be kept; whoever else writes it writes the same."""
        if self.places[row] < 0 or not self.writable:
            return
        try:
            os.pwritev(self._file, [_checksum(row, pixels), pixels.data], self.places[row] * self.record)
        except OSError as error:
            self._stop(f"no more decoded images are kept: {error}; make room, or set {BUDGET}")

    def _stop(self, why: str) -> None:
        self.writable = False
        warnings.warn(f"{why}. Training goes on, but slower", stacklevel=2)


def listed(root: Path, names: Sequence[str], size: Size, labels: Images | None = None) -> Listing:
    """Look at every file once and list them; the environment says where decoded images are kept, and how many."""
    encoded = [name.encode() for name in names]
    with ThreadPoolExecutor(16) as pool:  # a file server answers many questions at a time
        parts = [names[i : i + 1024] for i in range(0, len(names), 1024)]
        looks = list(pool.map(lambda part: _look(root, part), parts))
    about = np.concatenate([np.zeros((0, 2), np.int64), *(found for found, _ in looks)])
    if lacking := [error for _, errors in looks for error in errors]:
        more = f"; {len(lacking):,} of {len(names):,} files are like this" if len(lacking) > 1 else ""
        raise DataError(f"{lacking[0].filename}, which the list names, cannot be read: {lacking[0].strerror}{more}")
    return Listing(
        root=str(root.absolute()),
        size=size,
        names=np.frombuffer(b"".join(encoded), np.uint8),
        ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
        sizes=np.ascontiguousarray(about[:, 0]),
        stamp=hashlib.sha256(about.tobytes()).hexdigest(),
        place=os.environ.get(PLACE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedtail"),
        budget=_budget(os.environ.get(BUDGET, "")),
        labels=labels,
    )


def decode(path: str, size: Size, labels: Images | None = None) -> Images:
    """Decode a picture to RGB [3, H, W], or a map of labels to [1, H, W], shrunk until one side fits and then cut."""
    from PIL import Image

    height, width = size
    try:
        with Image.open(path) as image:
            image.draft(None, (width, height))  # of a much larger JPEG only as many frequencies as are needed
            if labels is not None and image.mode not in ("L", "P"):
                raise DataError(f"{path} must have one byte a pixel, not the mode {image.mode}")
            fits = min(image.width * height, image.height * width)  # the smaller of both scales, without division
            w, h = (length * height * width // fits for length in image.size)
            left, top = round((w - width) / 2), round((h - height) / 2)
            box = left, top, left + width, top + height
            if labels is not None:  # between two labels there is nothing
                ids = np.asarray(image.resize((w, h), Image.Resampling.NEAREST).crop(box))
                return np.take(labels, ids)[None]
            return np.asarray(image.convert("RGB").resize((w, h), Image.Resampling.BILINEAR).crop(box)).transpose(
                2, 0, 1
            )
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: put the images there, on every machine that reads them") from error
    except Exception as error:  # every decoder raises its own kinds
        raise DataError(f"{path} is not a readable image ({error}): replace it by a whole copy") from error


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "images")


def _look(root: Path, names: Sequence[str]) -> tuple[Numbers, list[OSError]]:
    """Return size and time of change of each file, and why some have none."""
    about, errors = np.zeros((len(names), 2), np.int64), []
    for row, name in zip(about, names, strict=True):
        try:
            found = os.stat(root / name)
        except OSError as error:
            errors.append(error)
        else:
            row[:] = found.st_size, found.st_mtime_ns
    return about, errors


def _budget(gigabytes: str) -> int | None:
    if not gigabytes:
        return None
    try:
        return int(max(0.0, float(gigabytes)) * 1e9)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{BUDGET} must be a number of gigabytes, not {gigabytes!r}") from error


def _names(listing: Listing) -> tuple[str, str]:
    """Name the file of decoded images, after what the names of all its versions begin with."""
    from PIL import __version__

    (height, width), what = listing.size, hashlib.sha256(repr((listing.root, listing.shape, listing.labels)).encode())
    what.update(listing.names.data)
    what.update(listing.ends.data)
    version = hashlib.sha256(repr((SCHEME, __version__, listing.stamp)).encode())
    versions = f"{Path(listing.root).name}-{height}x{width}-{what.hexdigest()[:16]}-"
    return versions, f"{versions}{version.hexdigest()[:16]}.pixels"


def _room(folder: Path, name: str, versions: str, wanted: int, budget: int | None) -> int:
    """Return how many bytes a file may take beside the others, after removing what is old and nobody has open."""
    found = {path: about for path in folder.glob("*.pixels") if (about := _about(path))}
    if budget is None:
        budget = (shutil.disk_usage(folder).free + sum(about.st_blocks * 512 for about in found.values())) // 2
    found.pop(folder / name, None)
    used = sum(about.st_size for about in found.values())
    for path, about in sorted(found.items(), key=lambda one: (not one[0].name.startswith(versions), one[1].st_mtime)):
        outdated, idle = path.name.startswith(versions), about.st_mtime < time.time() - IDLE
        if (outdated or used + wanted * idle > budget) and _removed(path):
            used -= about.st_size
    return max(0, min(wanted, budget - used))


def _about(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # somebody has removed it
        return None


def _removed(path: Path) -> bool:
    """Remove a file unless somebody has it open, and tell whether it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if alone := _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink()
        return alone
    except OSError:
        return False
    finally:
        os.close(file)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time look at a directory and change it."""
    directory = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _locked(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except OSError:  # somebody else has it, or the file system knows no locks: then nothing is removed
        return False
    return True


def _checksum(row: int, pixels: Images) -> bytes:
    return hashlib.blake2b(pixels.data, digest_size=SUM, person=row.to_bytes(16, "little")).digest()
