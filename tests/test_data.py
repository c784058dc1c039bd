"""Data sets: the published layouts read back, and every kind of missing or damaged file named."""

import gzip
import hashlib
import os
import pickle
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orchestrator.data import DATASETS, DataError, Dataset, load
from orchestrator.data import sources as where
from orchestrator.data.datasets import _moments
from orchestrator.data.images import tiny_imagenet
from orchestrator.data.partition import long_tail
from orchestrator.data.readers import Folder
from orchestrator.data.sources import SOURCES
from orchestrator.models import default_model

REFERENCE = {  # images of training and test, then the published total of the long-tailed cut at imbalance 100
    "digits": (1200, 597, None),
    "cifar10": (50_000, 10_000, 12_406),
    "fashion_mnist": (60_000, 10_000, 14_886),
}
HOMES = [Path(os.environ.get("ORCHESTRATOR_DATA", "none")), Path(__file__).parents[2] / "shared" / "data"]
REAL: list[tuple[str, Path | None]] = [("digits", None)]
REAL += [("cifar10", home) for home in HOMES if (home / "cifar-10-batches-bin").is_dir()][:1]
REAL += [("fashion_mnist", where.DEBIAN)] * (where.DEBIAN / "fashion-mnist").is_dir()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A machine without any data: what a test finds, it has made."""
    monkeypatch.delenv("ORCHESTRATOR_DATA", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(where, "DEBIAN", tmp_path / "debian")


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---- the real sets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "root"), REAL)
def test_a_real_set_is_what_was_published(name, root):
    data = load(name, root, download=False)
    train, test, tail = REFERENCE[name]
    assert data.x_train.shape == (train, *data.shape)
    assert data.x_test.shape == (test, *data.shape)
    assert data.x_train.dtype == data.x_test.dtype == np.uint8
    assert data.y_train.dtype == data.y_test.dtype == np.int64
    assert np.bincount(data.y_train).tolist() == [train // 10] * 10 == [train // data.classes] * data.classes
    assert set(data.y_test) == set(range(10))
    mean, std = _moments(data.x_train)
    assert np.allclose(mean, data.mean, atol=5e-4)
    assert np.allclose(std, data.std, atol=5e-4)
    assert tail is None or len(long_tail(data.y_train, 10, 100)) == tail


def test_digits_are_cut_by_file_order_and_scaled():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = load("digits")
    zeros = np.flatnonzero(y == 0)
    assert data.shape == (1, 8, 8)
    assert data.augment == "none"
    assert np.array_equal(data.x_train[data.y_train == 0][119, 0], np.rint(x[zeros[119]].reshape(8, 8) * 255 / 16))
    assert np.array_equal(data.x_test[data.y_test == 0][0, 0], np.rint(x[zeros[120]].reshape(8, 8) * 255 / 16))
    assert data.x_train.max() == 255


def test_known_names_say_how_they_are_trained():
    large, segmented = {"imagenet_lt", "inaturalist_user_160k"}, {"camvid", "cityscapes"}
    assert DATASETS[:5] == ("digits", "fashion_mnist", "cifar10", "cifar100", "tiny_imagenet")
    assert set(DATASETS[5:]) == large | segmented
    small = {"cifar10", "cifar100", "tiny_imagenet"}
    for augment, names in (("crop_flip", small), ("resized_crop_flip", large), ("flip", segmented)):
        assert {name for name, source in SOURCES.items() if source.augment == augment} == names
    assert {name for name, source in SOURCES.items() if source.as_published} == large
    assert {default_model(name) for name in large} == {"resnet50"}


# ---- published layouts, made small -------------------------------------------------------------------------------


def shrink(monkeypatch, name: str, sizes: tuple[int, int], folder: Path) -> None:
    """Let a small copy pass for the published set: its sizes and, where there were any, its checksums."""
    source = SOURCES[name]
    layouts = []
    for layout in source.layouts:
        sums = dict(layout.files)
        for file, checksum in sums.items():
            if checksum and (folder / file).is_file():
                kind = checksum.split(":")[0]
                sums[file] = f"{kind}:{hashlib.new(kind, (folder / file).read_bytes()).hexdigest()}"
        layouts.append(replace(layout, files=sums))
    monkeypatch.setitem(SOURCES, name, replace(source, sizes=sizes, layouts=tuple(layouts)))


def python2_pickle(x: np.ndarray, labels: bytes, y: list[int]) -> bytes:
    """A batch as Python 2 pickled it in 2009: protocol 2, byte strings for text."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + number(x.shape[0]) + number(x.shape[1]) + b"\x86" + dtype + b"\x89"
    array += text(x.tobytes()) + b"tb"
    rows = b"](" + b"".join(number(c) for c in y) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(labels) + rows + b"u."


def write_cifar(folder: Path, layout: str, classes: int) -> tuple[np.ndarray, list[int]]:
    """All images of a small CIFAR, training first; its last file is the test set, two images a file."""
    folder.mkdir(parents=True)
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if classes == 10 else ["train", "test"]
    x = pixels(2 * len(files), 3072)
    y = [(7 * i + 3) % classes for i in range(len(x))]
    for i, file in enumerate(files):
        rows, labels = x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]
        if layout == "py":
            content = python2_pickle(rows, b"labels" if classes == 10 else b"fine_labels", labels)
            (folder / file).write_bytes(content)
        else:
            coarse = [19] * (classes == 100)
            content = b"".join(bytes([*coarse, c]) + row.tobytes() for c, row in zip(labels, rows, strict=True))
            (folder / f"{file}.bin").write_bytes(content)
    return x.reshape(-1, 3, 32, 32), y


@pytest.mark.parametrize(
    ("name", "layout", "folder"),
    [
        ("cifar10", "bin", "cifar-10-batches-bin"),
        ("cifar10", "py", "cifar-10-batches-py"),
        ("cifar10", "bin", "."),
        ("cifar100", "py", "cifar-100-python"),
        ("cifar100", "bin", "cifar-100-binary"),
    ],
)
def test_cifar_is_read_in_both_layouts(monkeypatch, tmp_path, name, layout, folder):
    root = tmp_path / "data"
    x, y = write_cifar(root / folder, layout, int(name[5:]))
    shrink(monkeypatch, name, (len(y) - 2, 2), root / folder)
    data = load(name, root, download=False)
    assert np.array_equal(np.concatenate([data.x_train, data.x_test]), x)
    assert [*data.y_train, *data.y_test] == y
    assert data.augment == "crop_flip"
    assert data.mean == SOURCES[name].mean


@pytest.mark.parametrize("layout", ["bin", "py"])
def test_a_wrong_checksum_names_the_file(tmp_path, layout):
    folder = tmp_path / f"cifar-10-batches-{layout}"
    write_cifar(folder, layout, 10)
    with pytest.raises(DataError, match=r"data_batch_1(\.bin)? is damaged: its (sha1|md5) is") as caught:
        load("cifar10", tmp_path, download=False)
    assert str(tmp_path) in str(caught.value)
    assert "ORCHESTRATOR_DATA" in str(caught.value)


def test_one_changed_byte_is_noticed(monkeypatch, tmp_path):
    write_cifar(tmp_path / "x", "bin", 10)
    shrink(monkeypatch, "cifar10", (10, 2), tmp_path / "x")
    path = tmp_path / "x" / "data_batch_4.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_4\.bin is damaged"):
        load("cifar10", tmp_path / "x", download=False)


def test_an_incomplete_set_names_what_it_lacks(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    write_cifar(folder, "bin", 10)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin lacks data_batch_3\.bin"):
        load("cifar10", tmp_path, download=False)


def test_a_pickle_that_wants_to_run_something_does_not(monkeypatch, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for file in ("train", "test"):
        (tmp_path / file).write_bytes(pickle.dumps({b"data": Evil()}))
    shrink(monkeypatch, "cifar100", (1, 1), tmp_path)
    with pytest.raises(DataError, match=r"train is not a CIFAR batch: .*mkdir"):
        load("cifar100", tmp_path, download=False)
    assert not (tmp_path / "executed").exists()


def test_cifar_of_the_wrong_size_is_refused(monkeypatch, tmp_path):
    write_cifar(tmp_path / "a", "bin", 100)
    with pytest.raises(DataError, match=r"holds \(2, 2\) training and test images, expected \(50000, 10000\)"):
        load("cifar100", tmp_path / "a", download=False)
    (tmp_path / "a" / "train.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"train\.bin is damaged: 3 bytes"):
        load("cifar100", tmp_path / "a", download=False)


def write_mnist(folder: Path, zipped: bool, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    x, y = pixels(2 * n, 28, 28), (np.arange(2 * n) % 10).astype(np.uint8)
    for kind, rows in (("train", slice(0, n)), ("t10k", slice(n, None))):
        images = struct.pack(">4I", 0x803, n, 28, 28) + x[rows].tobytes()
        labels = struct.pack(">2I", 0x801, n) + y[rows].tobytes()
        for name, content in ((f"{kind}-images-idx3-ubyte", images), (f"{kind}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return x, y


@pytest.mark.parametrize("folder", ["FashionMNIST/raw", "fashion-mnist", "."])
@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_read_zipped_and_plain(monkeypatch, tmp_path, folder, zipped):
    x, y = write_mnist(tmp_path / "data" / folder, zipped)
    shrink(monkeypatch, "fashion_mnist", (4, 4), tmp_path)
    monkeypatch.setenv("ORCHESTRATOR_DATA", str(tmp_path / "data"))
    data = load("fashion_mnist", download=False)
    assert data.shape == (1, 28, 28)
    assert np.array_equal(np.concatenate([data.x_train, data.x_test])[:, 0], x)
    assert np.array_equal(np.concatenate([data.y_train, data.y_test]), y)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not begin like"),
        (struct.pack(">2I", 0x803, 4) + bytes(4), "does not begin like"),
        (struct.pack(">2I", 0x801, 4) + bytes(3), "do not hold an array"),
        (struct.pack(">2I", 0x801, 3) + bytes(3), "3 labels for 4 images"),
        (struct.pack(">2I", 0x801, 4) + bytes([0, 1, 2, 10]), r"labels 0\.\.10 are outside 0\.\.9"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, content, complaint):
    write_mnist(tmp_path / "a", zipped=False)
    (tmp_path / "a" / "t10k-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"t10k-labels-idx1-ubyte.*{complaint}"):
        load("fashion_mnist", tmp_path / "a", download=False)


def test_a_truncated_gzip_is_named(tmp_path):
    write_mnist(tmp_path / "a", zipped=True)
    path = tmp_path / "a" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="train-images-idx3-ubyte cannot be read"):
        load("fashion_mnist", tmp_path / "a", download=False)


def test_the_explicit_root_comes_first_then_the_variable_then_debian(monkeypatch, tmp_path):
    found = {}
    for place in ("debian", "variable", "root"):
        write_mnist(tmp_path / place / "fashion-mnist", zipped=True)
        path = tmp_path / place / "fashion-mnist" / "train-labels-idx1-ubyte"
        path.write_bytes(struct.pack(">2I", 0x801, 4) + bytes([len(found)] * 4))
        found[place] = len(found)
    shrink(monkeypatch, "fashion_mnist", (4, 4), tmp_path)
    assert load("fashion_mnist", download=False).y_train[0] == found["debian"]
    monkeypatch.setenv("ORCHESTRATOR_DATA", str(tmp_path / "variable"))
    assert load("fashion_mnist", download=False).y_train[0] == found["variable"]
    assert load("fashion_mnist", tmp_path / "root", download=False).y_train[0] == found["root"]
    assert load("fashion_mnist", tmp_path / "nothing", download=False).y_train[0] == found["variable"]


@pytest.mark.parametrize("name", list(SOURCES))
def test_a_missing_set_says_where_it_looked_and_what_to_do(monkeypatch, tmp_path, name):
    monkeypatch.setenv("ORCHESTRATOR_DATA", str(tmp_path / "variable"))
    with pytest.raises(DataError) as caught:
        load(name, tmp_path / "root", download=False)
    for place in ("root", "variable", "debian", "torch/datasets"):
        assert str(tmp_path / place) in str(caught.value)
    others = {"fashion_mnist": "apt-get install dataset-fashion-mnist", "camvid": "save them as camvid_90x120.npz"}
    assert others.get(name, "unpack") in str(caught.value)


def test_a_failed_download_is_our_own_error(monkeypatch):
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("urllib.request._opener", None)  # which would remember these proxies for good
    with pytest.raises(DataError, match="the download failed"):
        load("cifar100")


def test_tiny_imagenet_is_read_by_directories(tmp_path):
    images = pixels(8, 6, 6, 3)
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    for i, (wnid, name) in enumerate((w, n) for w in ("n01", "n02") for n in ("a", "b")):
        folder = tmp_path / "train" / wnid / "images"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i]).save(folder / f"{wnid}_{name}.JPEG", quality=100, subsampling=0)
    (tmp_path / "val" / "images").mkdir(parents=True)
    Image.fromarray(images[4, :, :, 0]).save(tmp_path / "val" / "images" / "val_0.JPEG", quality=100)  # grey
    Image.fromarray(images[5]).save(tmp_path / "val" / "images" / "val_1.JPEG", quality=100)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t6\t6\nval_1.JPEG\tn01\t0\t0\t6\t6\n")
    arrays = tiny_imagenet(Folder(tmp_path), classes=2, per_class=2)
    assert arrays.x_train.shape == (4, 3, 6, 6)
    assert np.abs(arrays.x_train.astype(int) - images[:4].transpose(0, 3, 1, 2)).mean() < 3  # JPEG is lossy
    assert arrays.y_train.tolist() == [0, 0, 1, 1]
    assert arrays.x_test.shape == (2, 3, 6, 6)
    assert arrays.y_test.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"wnids\.txt is damaged: 2 classes, expected 200"):
        load("tiny_imagenet", tmp_path, download=False)
    (tmp_path / "train" / "n02" / "images" / "n02_b.JPEG").unlink()
    with pytest.raises(DataError, match="n02 has 1 images, expected 2"):
        tiny_imagenet(Folder(tmp_path), classes=2, per_class=2)


def write_cityscapes(folder: Path, train: int, val: int) -> Path:
    """Some street scenes and maps of their labels, all of them road."""
    for kind, n in (("train", train), ("val", val)):
        for i in range(n):
            for what, suffix, image in (
                ("leftImg8bit", "leftImg8bit", pixels(8, 16, 3, seed=i)),
                ("gtFine", "gtFine_labelIds", np.full((8, 16), 7, np.uint8)),
            ):
                write_image(folder / what / kind / "ulm" / f"ulm_{i:06}_000019_{suffix}.png", image)
    return folder


def test_a_partly_unpacked_cityscapes_is_refused(monkeypatch, tmp_path):
    folder = write_cityscapes(tmp_path / "cityscapes", 2, 1)
    with pytest.raises(DataError, match=r"cityscapes holds \(2, 1\) training and test images, expected \(2975, 500\)"):
        load("cityscapes", tmp_path)
    shrink(monkeypatch, "cityscapes", (2, 1), folder)
    data = load("cityscapes", tmp_path)
    assert (len(data.x_train), len(data.x_test), data.y_train.shape) == (2, 1, (2, 256, 512))


def test_a_wrong_cityscapes_says_what_is_wrong(monkeypatch, tmp_path):
    folder = write_cityscapes(tmp_path / "cityscapes", 2, 1)
    shrink(monkeypatch, "cityscapes", (2, 1), folder)
    missing = folder / "gtFine/train/ulm/ulm_000001_000019_gtFine_labelIds.png"
    missing.unlink()
    with pytest.raises(DataError, match=f"1 of 3 images have no labels, the first {missing}"):
        load("cityscapes", tmp_path)
    next((folder / "leftImg8bit/val/ulm").iterdir()).unlink()
    with pytest.raises(DataError, match=r"leftImg8bit/val holds no <city>/\*_leftImg8bit\.png") as caught:
        load("cityscapes", tmp_path)
    assert "gtFine_trainvaltest.zip" in str(caught.value)


# ---- bring your own ----------------------------------------------------------------------------------------------


def write_npz(path: Path, **changes: np.ndarray) -> Path:
    arrays = {
        "x_train": pixels(4, 5, 6), "y_train": np.array([0, 1, 2, 1]),
        "x_test": pixels(2, 5, 6, seed=1), "y_test": np.array([2, 0]),
    }  # fmt: skip
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})
    return path


@pytest.mark.parametrize("order", ["NHW", "NHWC", "NCHW"])
def test_npz_images_of_every_axis_order_come_out_the_same(tmp_path, order):
    x = {kind: pixels(n, 1 if order == "NHW" else 3, 5, 6) for kind, n in (("x_train", 4), ("x_test", 2))}
    stored = {"NHW": lambda a: a[:, 0], "NHWC": lambda a: a.transpose(0, 2, 3, 1), "NCHW": lambda a: a}[order]
    write_npz(tmp_path / "own.npz", **{kind: stored(a) for kind, a in x.items()})
    data = load("own.npz", tmp_path)
    assert np.array_equal(data.x_train, x["x_train"])
    assert np.array_equal(data.x_test, x["x_test"])
    assert (data.classes, data.augment, data.name) == (3, "none", "own.npz")
    assert np.allclose(data.mean, x["x_train"].mean((0, 2, 3)) / 255)
    assert np.allclose(data.std, x["x_train"].std((0, 2, 3)) / 255)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"y_test": None}, "lacks the array y_test"),
        ({"x_train": pixels(4, 5, 6).astype(float)}, "x_train must be uint8"),
        ({"x_train": pixels(4, 30)}, "x_train must be uint8"),
        ({"x_train": pixels(4, 5, 6, 7)}, "1 to 4 channels"),
        ({"x_test": pixels(2, 6, 6)}, "training images are"),
        ({"x_train": pixels(5, 5, 6)}, "y_train must be 5 whole numbers"),
        ({"y_train": np.array([0.0, 1.0, 2.0, 1.0])}, "y_train must be 4 whole numbers"),
        ({"y_train": np.array([1, 2, 3, 2])}, "every class from 0 up"),
        ({"y_train": np.array([0, 1, 2, 10**15])}, "every class from 0 up"),
        ({"y_test": np.array([3, 0])}, r"y_test: labels 0\.\.3 are outside 0\.\.2"),
        ({"y_test": np.array([-1, 0])}, "y_test: labels -1"),
        ({"y_train": np.array([0, 1, 2, None])}, "plain arrays"),  # only a pickle can hold these
    ],
)
def test_a_wrong_npz_says_what_is_wrong(tmp_path, changes, complaint):
    path = write_npz(tmp_path / "own.npz", **changes)
    with pytest.raises(DataError, match=complaint) as caught:
        load(str(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "own.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(DataError, match="cannot be read"):
        load("own.npz", tmp_path)


def write_image(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_folder_takes_the_size_of_its_first_image(monkeypatch, tmp_path, channels):
    x = [pixels(4, 5, 3, seed=i)[..., :channels].squeeze() for i in range(4)]
    for i, file in enumerate(("train/cat/0.png", "train/dog/0.png", "train/dog/1.bmp", "test/dog/x.png")):
        write_image(tmp_path / "pets" / file, x[i])
    write_image(tmp_path / "pets" / "test" / "dog" / "y.png", pixels(9, 9))  # grey and larger
    (tmp_path / "pets" / "train" / "dog" / "Thumbs.db").write_bytes(b"no image")
    monkeypatch.setenv("ORCHESTRATOR_DATA", str(tmp_path))
    data = load("pets")
    assert data.shape == (channels, 4, 5)
    assert data.y_train.tolist() == [0, 1, 1]
    assert data.y_test.tolist() == [1, 1]
    assert np.array_equal(data.x_train[2], x[2].reshape(4, 5, channels).transpose(2, 0, 1))
    assert np.array_equal(data.x_test[0], x[3].reshape(4, 5, channels).transpose(2, 0, 1))


def test_a_wrong_image_folder_says_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="needs images in train/<class>/ and test/<class>/"):
        load(str(tmp_path))
    write_image(tmp_path / "train" / "cat" / "0.png", pixels(4, 4))
    write_image(tmp_path / "test" / "cow" / "0.png", pixels(4, 4))
    with pytest.raises(DataError, match="classes that train has not: cow"):
        load(str(tmp_path))
    (tmp_path / "train" / "cow").mkdir()
    with pytest.raises(DataError, match="cow holds no images"):
        load(str(tmp_path))
    write_image(tmp_path / "train" / "cow" / "0.png", pixels(40, 40))
    content = (tmp_path / "train" / "cow" / "0.png").read_bytes()
    (tmp_path / "train" / "cow" / "0.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cow/0\.png is not a readable image"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cifar1", "did you mean 'cifar10'?"),
        ("ImageNet-LT", "did you mean 'imagenet_lt'?"),
        ("my_photos", "known: camvid, cifar10, cifar100, cityscapes, digits, fashion_mnist, imagenet_lt"),
    ],
)
def test_an_unknown_name_tells_the_nearest_or_all_and_where_it_was_looked_for(tmp_path, name, said):
    with pytest.raises(DataError, match=re.escape(f"no data set '{name}' ({said}")) as caught:
        load(name, tmp_path)
    assert str(tmp_path / name) in str(caught.value)


# ---- Dataset -----------------------------------------------------------------------------------------------------


def test_the_digest_sees_every_array_and_every_shape():
    x, y = pixels(4, 1, 2, 3), np.array([0, 1, 0, 1])
    data = Dataset("a", x, y, x[:2], y[:2], 2, (0.5,), (0.5,))
    other = x.copy()
    other[3, 0, 1, 2] ^= 1
    changed = [
        replace(data, x_train=other),
        replace(data, y_train=1 - y),
        replace(data, x_test=other[2:]),
        replace(data, y_test=1 - y[:2]),
        replace(data, x_train=x.reshape(4, 1, 3, 2)),
    ]
    assert data.digest == replace(data, name="b", x_train=np.asfortranarray(x)).digest
    assert len({data.digest, *(one.digest for one in changed)}) == 6


def test_a_constant_channel_has_deviation_one():
    assert _moments(np.full((2, 1, 2, 2), 51, np.uint8)) == ((0.2,), (1.0,))


@pytest.mark.parametrize(("name", "root"), [("m" * 5000, None), ("~nobody-here/x", None), ("x", "~nobody-here")])
def test_a_path_that_leads_nowhere_is_told_in_words(name, root):
    with pytest.raises(DataError, match=r"cannot be read: .*; correct its name or the data root"):
        load(name, root)
