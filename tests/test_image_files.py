"""Data sets of image files: their published layouts, the pixels, the cache of decoded images, and runs on them."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny
from PIL import Image
from ray.experimental import get_object_locations
from test_pool import wait_for

from orchestrator.actors import Pool
from orchestrator.augment import AUGMENTS, centre, resampling
from orchestrator.data import DataError, Dataset, ImageFiles, load
from orchestrator.data import sources as where
from orchestrator.data.files import SUM, decode, listed
from orchestrator.data.lists import imagenet_lt, inaturalist
from orchestrator.data.sources import SOURCES
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.experiment import Experiment, dump
from orchestrator.models import torchvision
from orchestrator.sweep_file import dump_sweep, filled_in, read
from orchestrator.worker import Worker
from orchestrator.yaml_file import InputError

RESIZE, CENTRE = (getattr(torchvision().transforms.functional, name) for name in ("resize", "center_crop"))
SIDE, CROP = 20, 16  # what is stored of the small images here, and what networks see of that
WNIDS = ["n01440764", "n01443537", "n01484850", "n01491361"]
PER_CLASS = [12, 9, 6, 5]
RECORD = SUM + 3 * SIDE**2


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A machine without any data and with a cache of its own: what a test finds, it has made."""
    for variable in ("ORCHESTRATOR_DATA", "ORCHESTRATOR_CACHE_GB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(where, "DEBIAN", tmp_path / "debian")


def picture(path: Path, label: int, seed: int, size=(30, 24), mode="RGB") -> None:
    """Save a picture of one colour per class, with noise."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-40, 40, (size[1], size[0], 3)) + np.array([60 * label, 200 - 50 * label, 120])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.clip(0, 255).astype(np.uint8)).convert(mode).save(path)


def write_imagenet(root: Path, lists: str = ".", images: str = ".", val: str = "flat", named: str = "sorted") -> Path:
    """Make a small ImageNet-LT, val as its archive unpacks and named as published, or flat and sorted otherwise."""
    train, test = [], []
    for label, (wnid, n) in enumerate(zip(WNIDS, PER_CLASS, strict=True)):
        for i in range(n):
            train.append(f"train/{wnid}/{wnid}_{i}.JPEG {label}")
            picture(root / images / f"train/{wnid}/{wnid}_{i}.JPEG", label, 100 * label + i, (30 + i, 24))
        for i in range(3):
            file = f"ILSVRC2012_val_{3 * label + i + 1:08}.JPEG"
            test.append(f"val/{wnid}/{file} {label}" if named == "sorted" else f"val/{file} {label}")
            mode = "L" if i == 2 else "RGB"  # ImageNet has grey images, too
            picture(
                root / images / "val" / (wnid if val == "sorted" else "") / file, label, 1000 + 3 * label + i, mode=mode
            )
    (root / lists).mkdir(parents=True, exist_ok=True)
    (root / lists / "ImageNet_LT_train.txt").write_text("\n".join(train) + "\n")
    (root / lists / "ImageNet_LT_test.txt").write_text("\n".join(test) + "\n")
    return root


def write_inaturalist(root: Path, column: str = "image_id", size: str = "120k") -> Path:
    """Make a small federated split of iNaturalist 2017; its class numbers have gaps."""
    rows = {"train": [], "test": []}
    for label, species in ((3, "Aves/Corvus corax"), (7, "Plantae/Acer rubrum"), (900, "Aves/Pica pica")):
        for i in range(4):
            name = f"{label:04x}{i:028x}"
            picture(root / "train_val_images" / species / f"{name}.jpg", label % 4, 10 * label + i)
            image = name if column == "image_id" else f"{species}/{name}.jpg"
            kind = "test" if i == 3 else "train"
            rows[kind].append(f"{i % 2},{image},{label},5" if kind == "train" else f"{image},{label},5")
    folder = root / f"inaturalist-user-{size}"
    folder.mkdir(parents=True)
    header = f"{column},class,label"
    (folder / f"federated_train_user_{size}.csv").write_text("\n".join([f"user_id,{header}", *rows["train"]]) + "\n")
    (folder / "test.csv").write_text("\n".join([header, *rows["test"]]) + "\n")
    return root


@pytest.fixture
def small(monkeypatch):
    """Let small copies pass for the published sets."""
    lt, inat = SOURCES["imagenet_lt"], SOURCES["inaturalist_user_160k"]
    (layout,) = lt.layouts
    lt = replace(lt, layouts=(replace(layout, read=imagenet_lt(4, SIDE)),), sizes=(sum(PER_CLASS), 12), crop=CROP)
    layouts = tuple(replace(each, read=inaturalist(next(iter(each.files)), SIDE), sizes=None) for each in inat.layouts)
    monkeypatch.setitem(SOURCES, "imagenet_lt", lt)
    monkeypatch.setitem(SOURCES, "inaturalist_user_160k", replace(inat, layouts=layouts, crop=CROP))


def directly(path: str, side: int = SIDE) -> np.ndarray:
    """Decode an image as torchvision's Resize and CenterCrop do."""
    with Image.open(path) as image:
        return np.asarray(CENTRE(RESIZE(image.convert("RGB"), side), [side, side])).transpose(2, 0, 1)


# ---- published layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["sorted", "flat"])
@pytest.mark.parametrize("val", ["flat", "sorted"])
@pytest.mark.parametrize(
    ("lists", "images"), [(".", "."), (".", "imagenet"), ("ImageNet_LT", "."), ("ImageNet_LT", "ILSVRC/Data/CLS-LOC")]
)
def test_imagenet_lt_is_read_by_its_lists(tmp_path, small, lists, images, val, named):
    write_imagenet(tmp_path / "data", lists, images, val, named)
    data = load("imagenet_lt", tmp_path / "data")
    assert np.bincount(data.y_train).tolist() == PER_CLASS
    assert data.y_test.tolist() == np.repeat(range(4), 3).tolist()
    assert (data.classes, data.shape, data.augment) == (4, (3, CROP, CROP), "resized_crop_flip")
    assert data.x_train.shape == (sum(PER_CLASS), 3, SIDE, SIDE)
    assert len(data.x_test) == 12
    for files, labels in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        for i, path in enumerate(files.listing.path(row) for row in files.rows):
            assert WNIDS[labels[i]] in path or "val" in path
            assert np.array_equal(files[[i]][0], decode(path, (SIDE, SIDE)))
    assert data.x_test.listing.path(data.x_test.rows[4]).endswith("ILSVRC2012_val_00000005.JPEG")


def test_the_published_sizes_are_those_of_the_lists():
    assert SOURCES["imagenet_lt"].sizes == (115_846, 50_000)
    assert [next(iter(layout.files)) for layout in SOURCES["inaturalist_user_160k"].layouts] == [
        "federated_train_user_120k.csv", "federated_train_user_160k.csv"
    ]  # fmt: skip
    assert [layout.sizes for layout in SOURCES["inaturalist_user_160k"].layouts] == [(120_300, 35_641), None]


def test_a_part_of_inaturalist_does_not_pass_for_the_whole(tmp_path, small, monkeypatch):
    write_inaturalist(tmp_path / "data")
    whole = SOURCES["inaturalist_user_160k"]
    layouts = tuple(replace(layout, sizes=(120_300, 35_641)) for layout in whole.layouts)
    monkeypatch.setitem(SOURCES, "inaturalist_user_160k", replace(whole, layouts=layouts))
    with pytest.raises(DataError, match=r"training and test images, expected \(120300, 35641\)"):
        load("inaturalist_user_160k", tmp_path / "data")


def test_of_many_missing_images_one_is_named_and_all_are_counted(tmp_path, small):
    write_imagenet(tmp_path / "data")
    for path in (tmp_path / "data").glob("train/n01440764/*"):
        path.unlink()
    said = rf"_0\.JPEG, which the list names, cannot be read: No such.*; {PER_CLASS[0]} of {sum(PER_CLASS) + 12} files"
    with pytest.raises(DataError, match=said):
        load("imagenet_lt", tmp_path / "data")


@pytest.mark.parametrize("column", ["image_id", "image_path"])
@pytest.mark.parametrize("size", ["120k", "160k"])
def test_inaturalist_is_read_by_its_tables(tmp_path, small, column, size):
    write_inaturalist(tmp_path / "data", column, size)
    data = load("inaturalist_user_160k", tmp_path / "data")
    assert data.classes == 3, "counted, not known"
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.y_test.tolist() == [0, 1, 2]
    assert data.users.tolist() == [0, 1, 0] * 3
    path = data.x_test.listing.path(data.x_test.rows[1])
    assert path == str(tmp_path / f"data/train_val_images/Plantae/Acer rubrum/0007{3:028x}.jpg")
    assert np.array_equal(data.x_test[[1]][0], decode(path, (SIDE, SIDE)))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("ImageNet_LT_train.txt", "train/a.JPEG\n", r"ImageNet_LT_train\.txt:1: 'train/a\.JPEG' is not a path and a"),
        ("ImageNet_LT_train.txt", "train/a.JPEG 4\n", r"is not a path and a class of 0\.\.3"),
        ("ImageNet_LT_train.txt", "\n", r"ImageNet_LT_train\.txt is empty"),
        ("ImageNet_LT_test.txt", b"\xff\xfe", r"ImageNet_LT_test\.txt is damaged"),
        ("ImageNet_LT_test.txt", None, r"lacks ImageNet_LT_test\.txt"),
        ("train/n01440764/n01440764_3.JPEG", None, r"n01440764_3\.JPEG, which the list names, cannot be read: No such"),
        ("val/ILSVRC2012_val_00000002.JPEG", None, r"val_00000002\.JPEG, which the list names, cannot be read"),
        ("ImageNet_LT_train.txt", "train/n01440764/n01440764_0.JPEG 0\n", r"holds \(1, 12\) training and test images"),
    ],
)
def test_a_wrong_imagenet_lt_says_what_is_wrong(tmp_path, small, file, content, complaint):
    path = write_imagenet(tmp_path / "data") / file
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint) as caught:
        load("imagenet_lt", tmp_path / "data")
    for words in (str(tmp_path / "data"), "image-net.org", "OpenLongTailRecognition", "ORCHESTRATOR_DATA"):
        assert words in str(caught.value)


def test_lists_without_images_say_where_these_were_looked_for(tmp_path, small):
    write_imagenet(tmp_path / "data" / "ImageNet_LT")
    (tmp_path / "data" / "ImageNet_LT" / "train").rename(tmp_path / "train_elsewhere")
    with pytest.raises(DataError, match=r"has the lists, but there is no directory train .*data/imagenet,"):
        load("imagenet_lt", tmp_path / "data")
    write_inaturalist(tmp_path / "inat")
    (tmp_path / "inat" / "train_val_images").rename(tmp_path / "photos")
    with pytest.raises(DataError, match=r"no directory train_val_images with the images .*inat_comp"):
        load("inaturalist_user_160k", tmp_path / "inat")


TRAIN = "federated_train_user_120k.csv"


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        (TRAIN, "user_id,photo,class\n0,a,1\n", rf"{TRAIN} lacks the column image_id or image_path; its first line is"),
        (TRAIN, "user_id,photo\n", r"lacks the column image_id or image_path and class"),
        ("test.csv", "image_id,label\n", r"test\.csv lacks the column class; its first line is 'image_id,label'"),
        (TRAIN, "user_id,image_id,class\n0,a,x\n", rf"{TRAIN}:2: 'a' and 'x' are not an image and a class number"),
        (TRAIN, "user_id,image_id,class\n0\n", rf"{TRAIN}:2: None and None are not"),
        (TRAIN, "user_id,image_id,class\n0,a,1\n,b,1\n", rf"{TRAIN}:3: 'b' has no user_id"),
        (TRAIN, "user_id,image_id,class\n", rf"{TRAIN} is empty"),
        ("test.csv", "image_id,class\na,4\n", rf"test\.csv has classes that {TRAIN} has not: 4"),
        ("test.csv", "image_id,class\nnone,3\n", r"1 images are not in .*train_val_images: none"),
        ("test.csv", "image_path,class\nAves/x.jpg,3\n", r"train_val_images/Aves/x\.jpg, which the list names, cannot"),
        ("test.csv", None, r"lacks test\.csv"),
    ],
)
def test_a_wrong_inaturalist_says_what_is_wrong(tmp_path, small, file, content, complaint):
    path = write_inaturalist(tmp_path / "data") / "inaturalist-user-120k" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=complaint) as caught:
        load("inaturalist_user_160k", tmp_path / "data")
    assert "federated_vision_datasets" in str(caught.value)


def test_clients_of_inaturalist_have_whole_users(tmp_path, small):
    path = write_inaturalist(tmp_path / "data") / "inaturalist-user-120k" / TRAIN
    experiment = tiny(data={"name": "inaturalist_user_160k", "clients": 2, "partition": "by_user"}, clients_per_round=2)
    data = load("inaturalist_user_160k", tmp_path / "data")
    parts = split_for(experiment, data)
    assert sorted(rows.tolist() for rows in parts.train) == [[0, 2, 3, 5, 6, 8], [1, 4, 7]]
    with pytest.raises(DataError, match="2 users cannot be divided among 3 clients"):
        split_for(tiny(data={"name": data.name, "clients": 3, "partition": "by_user"}), data)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.split(",", 1)[1] for line in lines))
    nobody = load("inaturalist_user_160k", tmp_path / "data")
    assert nobody.users is None
    assert nobody.digest != data.digest
    with pytest.raises(DataError, match="names no users"):
        split_for(experiment, nobody)


# ---- pixels ------------------------------------------------------------------------------------------------------


def write_files(root: Path, n: int = 8, suffix: str = ".png") -> list[str]:
    for i in range(n):
        picture(root / f"{i}{suffix}", i % 4, i, (40 + 20 * (i % 3), 40))
    return [f"{i}{suffix}" for i in range(n)]


def files_of(root: Path, n: int = 8, side: int = SIDE) -> ImageFiles:
    return ImageFiles(listed(root, write_files(root, n), (side, side)), range(n))


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_rows_are_what_decoding_step_by_step_gives(tmp_path, suffix):
    names = write_files(tmp_path, 8, suffix)
    files = ImageFiles(
        listed(tmp_path, names, (30, 30)), range(8)
    )  # less than half as large: JPEG's shortcut is not taken
    expected = np.stack([directly(str(tmp_path / name), 30) for name in names])
    assert np.array_equal(files[range(8)], expected)
    assert np.array_equal(files[np.array([5, 0, 5])], expected[[5, 0, 5]])
    assert np.array_equal(files[torch.tensor([3])], expected[[3]])
    assert files[[]].shape == (0, 3, 30, 30)
    assert files.shape == (8, 3, 30, 30)
    with pytest.raises(IndexError, match=r"rows 0\.\.8 of 8 images"):
        files[[0, 8]]


def test_a_large_jpeg_is_decoded_at_a_fraction_and_looks_the_same(tmp_path):
    x, y = np.meshgrid(np.linspace(0, 255, 640), np.linspace(0, 255, 512))
    Image.fromarray(np.stack([x, y, (x + y) / 2], -1).astype(np.uint8)).save(tmp_path / "a.jpg", quality=95)
    path = str(tmp_path / "a.jpg")
    assert np.abs(decode(path, (64, 64)).astype(int) - directly(path, 64)).max() <= 4


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "RGBA"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode):
    file = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    picture(file, 1, 0, mode=mode)
    assert np.array_equal(decode(str(file), (SIDE, SIDE)), directly(str(file)))


def test_a_missing_or_broken_image_is_told_by_its_path(tmp_path):
    files = files_of(tmp_path)
    content = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"3\.png is not a readable image \(.*\): replace it by a whole copy"):
        files[range(8)]
    (tmp_path / "3.png").unlink()
    with pytest.raises(DataError, match=r"3\.png is missing: put the images there, on every machine"):
        files[range(8)]


def test_the_digest_sees_names_sizes_labels_and_resolution_but_no_pixels(tmp_path):
    files = files_of(tmp_path / "a")
    y = np.arange(8) % 2

    def digest(files, y=y):
        return Dataset("a", files, y, files, y, 2, (0.5,) * 3, (0.5,) * 3).digest

    found = {digest(files), digest(files, 1 - y), digest(ImageFiles(replace(files.listing, size=(21, 21)), files.rows))}
    found.add(digest(ImageFiles(files.listing, range(1, 8)), y[1:]))
    swapped = [f"{i}.png" for i in (1, 0, *range(2, 8))]
    found.add(digest(ImageFiles(listed(tmp_path / "a", swapped, (SIDE, SIDE)), range(8))))
    assert len(found) == 5
    other = tmp_path / "b"
    (tmp_path / "a").rename(other)
    for file in other.iterdir():
        file.write_bytes(bytes(file.stat().st_size))  # nothing reads it
    same = ImageFiles(listed(other, [f"{i}.png" for i in range(8)], (SIDE, SIDE)), range(8))
    assert digest(same) == digest(files)
    with (other / "0.png").open("ab") as file:
        file.write(b"x")
    assert digest(ImageFiles(listed(other, [f"{i}.png" for i in range(8)], (SIDE, SIDE)), range(8))) not in found


# ---- the cache ---------------------------------------------------------------------------------------------------


def reopened(files: ImageFiles) -> ImageFiles:
    """The same files as another process sees them."""
    return pickle.loads(pickle.dumps(files))


def kept(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").iterdir()
    return path


def test_what_is_kept_is_what_was_decoded(tmp_path):
    files = files_of(tmp_path / "x")
    first = files[range(8)]
    for i in range(8):
        (tmp_path / "x" / f"{i}.png").unlink()  # so nothing can be decoded again
    assert np.array_equal(reopened(files)[range(8)], first)
    assert kept(tmp_path).stat().st_size == 8 * RECORD


def test_training_and_test_images_share_one_file(tmp_path, small):
    write_imagenet(tmp_path / "data")
    data = load("imagenet_lt", tmp_path / "data")
    first = data.x_train[[0, 1]], data.x_test[[0, 1]]
    again = pickle.loads(pickle.dumps(data))
    assert again.x_train.listing is again.x_test.listing
    assert all(np.array_equal(a, b) for a, b in zip(first, (again.x_train[[0, 1]], again.x_test[[0, 1]]), strict=True))
    assert kept(tmp_path).name.startswith(f"data-{SIDE}x{SIDE}-")


@pytest.mark.parametrize("at", [0, SUM, SUM + 700, RECORD - 1])
def test_a_damaged_row_is_decoded_again_and_mended(tmp_path, at):
    files = files_of(tmp_path / "x")
    expected, path = files[range(8)], kept(tmp_path)
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[3 * RECORD + at] ^= 1
    path.write_bytes(broken)
    assert np.array_equal(reopened(files)[range(8)], expected)
    assert path.read_bytes() == whole
    path.write_bytes(whole[: 2 * RECORD + at])  # cut short under a reader's feet
    assert np.array_equal(files[range(8)], expected)
    path.write_bytes(whole[RECORD : 2 * RECORD] + whole[RECORD:])  # a whole row in the wrong place
    assert np.array_equal(files[range(8)], expected)


def test_a_changed_image_is_not_taken_from_the_cache(tmp_path):
    first = files_of(tmp_path / "x")[[0]]
    path = tmp_path / "x" / "0.png"
    Image.fromarray(np.full((40, 40, 3), 7, np.uint8)).save(path)
    os.utime(path, (1, 1))
    again = ImageFiles(listed(tmp_path / "x", [f"{i}.png" for i in range(8)], (SIDE, SIDE)), range(8))[[0]]
    assert again.max() == 7 != first.max()


@pytest.mark.parametrize("rows", [0, 3])
def test_the_budget_bounds_what_is_kept(monkeypatch, tmp_path, rows):
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", str((rows + 0.5) * RECORD / 1e9 if rows else 0))
    files = files_of(tmp_path / "x")
    expected = files[range(8)]
    assert np.array_equal(reopened(files)[range(8)], expected)
    places = files.listing.cache.places
    assert (places >= 0).sum() == rows
    if not rows:
        assert not (tmp_path / "cache").exists()
        return
    assert kept(tmp_path).stat().st_size == rows * RECORD
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", str(5 * RECORD / 1e9))
    more = ImageFiles(replace(files.listing, budget=5 * RECORD), files.rows)
    assert np.array_equal(more[range(8)], expected)
    assert (more.listing.cache.places >= 0).sum() == 5
    assert (more.listing.cache.places == places)[places >= 0].all(), "what a smaller budget keeps, a larger one does"


def test_without_a_budget_half_of_what_is_free_is_taken(monkeypatch, tmp_path):
    assert (files_of(tmp_path / "x").listing.cache.places >= 0).all()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=21 * RECORD))
    assert (files_of(tmp_path / "y").listing.cache.places >= 0).sum() == 2, "beside the eight of the other set"


def limit(monkeypatch, rows: int) -> None:
    """Let all files of decoded images together have room for so many."""
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", str((rows + 0.5) * RECORD / 1e9))


def sizes(tmp_path: Path) -> dict[str, float]:
    """How many images have a place in the file of each set."""
    return {path.name.split("-")[0]: path.stat().st_size / RECORD for path in (tmp_path / "cache").iterdir()}


def forgotten(tmp_path: Path, name: str) -> None:
    """Let a set's file look as if it had last been used eight days ago."""
    (path,) = (tmp_path / "cache").glob(f"{name}-*")
    os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)


def test_all_sets_share_one_budget(monkeypatch, tmp_path):
    limit(monkeypatch, 11)
    for _ in range(2):
        for name in ("first", "second", "third"):
            files = files_of(tmp_path / name)
            assert np.array_equal(files[range(8)], files[range(8)])
            del files
        assert sizes(tmp_path) == {"first": 8, "second": 3, "third": 0}, "what was used this week is not pushed out"


def test_what_is_long_unused_makes_room_but_not_while_somebody_has_it_open(monkeypatch, tmp_path):
    limit(monkeypatch, 11)
    first, second = files_of(tmp_path / "first"), files_of(tmp_path / "second", 2)
    expected = first[range(8)]
    second[range(2)]
    del second
    for name in ("first", "second"):
        forgotten(tmp_path, name)
    assert (files_of(tmp_path / "third").listing.cache.places >= 0).sum() == 3
    assert sizes(tmp_path) == {"first": 8, "third": 3}
    for path in (tmp_path / "first").iterdir():
        path.unlink()
    assert np.array_equal(first[range(8)], expected), "it is still there"
    del first
    forgotten(tmp_path, "first")
    assert (files_of(tmp_path / "third").listing.cache.places >= 0).all()
    assert sizes(tmp_path) == {"third": 8}


def test_a_smaller_budget_holds_for_what_there_was_before(monkeypatch, tmp_path):
    files_of(tmp_path / "first")[range(8)]
    files_of(tmp_path / "second")[range(8)]
    limit(monkeypatch, 9)
    files_of(tmp_path / "second")[range(8)]
    assert sizes(tmp_path) == {"first": 8, "second": 1}
    limit(monkeypatch, 5)
    files_of(tmp_path / "second")[range(8)]
    assert sizes(tmp_path) == {"second": 5}


def test_pixels_of_changed_images_are_removed_unless_somebody_reads_them(monkeypatch, tmp_path):
    limit(monkeypatch, 11)
    old, other = files_of(tmp_path / "x"), files_of(tmp_path / "x", 3, SIDE // 2)
    old[range(8)], other[range(3)]
    os.utime(tmp_path / "x" / "5.png", (1, 1))
    again = [f"{i}.png" for i in range(8)]
    assert (ImageFiles(listed(tmp_path / "x", again, (SIDE, SIDE)), range(8)).listing.cache.places >= 0).sum() == 2
    assert len(list((tmp_path / "cache").iterdir())) == 3
    del old
    assert (ImageFiles(listed(tmp_path / "x", again, (SIDE, SIDE)), range(8)).listing.cache.places >= 0).all()
    assert len(list((tmp_path / "cache").iterdir())) == 2, "those of another size are not concerned"


def test_processes_that_begin_at_once_share_the_budget(monkeypatch, tmp_path):
    limit(monkeypatch, 70)
    several = []
    for i in range(3):
        (tmp_path / f"{i}.pickle").write_bytes(pickle.dumps(files_of(tmp_path / f"set{i}", 32)))
        several.append(process(READ_ALL, tmp_path / f"{i}.pickle"))
    assert [one.communicate() and one.returncode for one in several] == [0, 0, 0]
    assert sorted(sizes(tmp_path).values()) == [6, 32, 32]


@pytest.mark.parametrize("value", ["much", "1e999"])
def test_a_budget_that_is_no_number_is_refused(monkeypatch, tmp_path, value):
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", value)
    with pytest.raises(DataError, match="ORCHESTRATOR_CACHE_GB must be a number of gigabytes, not"):
        files_of(tmp_path / "x")


READ_ALL = """
import hashlib, pickle, sys
files = pickle.load(open(sys.argv[1], "rb"))
for _ in range(5):
    pixels = files[range(len(files))]
print(hashlib.sha256(pixels.tobytes()).hexdigest())
"""


def process(code: str, *words: object) -> subprocess.Popen:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, words)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)


def test_processes_that_read_and_write_at_once_all_see_the_same(tmp_path):
    files = files_of(tmp_path / "x", 64)
    (tmp_path / "files.pickle").write_bytes(pickle.dumps(files))
    several = [process(READ_ALL, tmp_path / "files.pickle") for _ in range(3)]
    found = {one.communicate()[0] for one in several}
    assert [one.returncode for one in several] == [0, 0, 0]
    assert len(found) == 1
    assert np.array_equal(files[range(64)], np.stack([decode(files.listing.path(i), (SIDE, SIDE)) for i in range(64)]))
    assert kept(tmp_path).stat().st_size == 64 * RECORD


def test_a_place_that_cannot_be_written_costs_time_and_one_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "file" / "cache"))
    files = files_of(tmp_path / "x")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = files[range(8)]
        assert np.array_equal(files[range(8)], first)
    (one,) = told
    assert re.search(r"cannot be kept in .*/file/cache: .*; name another place by ORCHESTRATOR_CACHE", str(one.message))


def test_a_place_that_cannot_be_written_is_told_when_the_set_is_loaded(monkeypatch, tmp_path, small):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "file" / "cache"))
    write_imagenet(tmp_path / "data")
    with pytest.warns(UserWarning, match="decoded images cannot be kept"):
        load("imagenet_lt", tmp_path / "data")


def test_a_full_disk_costs_time_and_a_warning(tmp_path):
    code = """
import pickle, resource, signal, sys, warnings
files = pickle.load(open(sys.argv[1], "rb"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
files.listing.cache
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("default")
    first = files[range(8)]
    assert (files[range(8)] == first).all()
print(len(told), told[0].message)
"""
    files = files_of(tmp_path / "x")
    (tmp_path / "files.pickle").write_bytes(pickle.dumps(files))
    told = process(code, tmp_path / "files.pickle").communicate()[0]
    assert re.match(
        r"1 no more decoded images are kept: .*File too large; make room, or set ORCHESTRATOR_CACHE_GB", told
    )


# ---- memory ------------------------------------------------------------------------------------------------------

MEMORY = """
import json, pickle, sys
from pathlib import Path
import numpy as np
from orchestrator.data.files import ImageFiles, decode, listed

def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024

root, n = Path(sys.argv[1]), int(sys.argv[2])
decode(str(root / "0/0.png"), (32, 32))
before = own()
files = ImageFiles(listed(root, [f"{i % 100}/{i}.png" for i in range(n)], (32, 32)), range(n))
made = own()
sent = len(pickle.dumps(files))
for rows in np.split(np.random.default_rng(0).permutation(n), n // 1000):
    files[rows]
print(json.dumps({"made": made - before, "read": own() - before, "sent": sent}))
"""


def test_a_hundred_thousand_files_cost_a_few_megabytes(tmp_path, monkeypatch):
    """All pixels are 307 MB, of which the cache may keep 100 on the disk, and the process none."""
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", "0.1")
    n = 100_000
    for folder in range(100):
        picture(tmp_path / "x" / str(folder) / f"{folder}.png", folder % 4, folder, (32, 32))
    for i in range(100, n):
        os.link(tmp_path / f"x/{i % 100}/{i % 100}.png", tmp_path / f"x/{i % 100}/{i}.png")
    found = json.loads(process(MEMORY, tmp_path / "x", n).communicate()[0])
    assert found["sent"] < 40 * n, found
    assert found["made"] < 40e6, found
    assert found["read"] < 60e6, found
    kept = sum(512 * path.stat().st_blocks for path in (tmp_path / "cache").rglob("*"))
    assert 50e6 < kept < 110e6, kept


# ---- augmentation ------------------------------------------------------------------------------------------------


def batch(b=12, side=SIDE, channels=3):
    return torch.randn(b, channels, side, side, generator=torch.Generator().manual_seed(1))


def augmented(name, x, size=(CROP, CROP), seed=2, black=None):
    black = torch.full((x.shape[1], 1, 1), -2.0) if black is None else black
    return AUGMENTS[name](x, torch.Generator().manual_seed(seed), size, black)


@pytest.mark.parametrize("name", list(AUGMENTS))
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_seed_makes_the_same_batch_of_the_wanted_size(name, channels):
    x = batch(channels=channels)
    before = x.clone()
    made = augmented(name, x)
    assert made.shape == (12, channels, CROP, CROP)
    assert torch.equal(made, augmented(name, x))
    assert torch.equal(x, before)
    assert not torch.equal(made, augmented(name, x, seed=3))
    assert made.is_contiguous()


def test_the_centre_of_256_is_224():
    assert centre(torch.arange(256.0).expand(1, 1, 256, 256), (224, 224))[0, 0, 0, [0, -1]].tolist() == [16, 239]


@pytest.mark.parametrize(("side", "wanted"), [(20, 16), (7, 16), (16, 16), (1, 5), (20, 3)])
def test_a_box_is_resized_as_torch_resizes_a_crop(side, wanted):
    x, start = batch(1), torch.tensor([float(SIDE - side)])
    matrix = resampling(start, torch.tensor([float(side)]), SIDE, wanted)
    crop = x[:, :, SIDE - side :, SIDE - side :]
    expected = F.interpolate(crop, (wanted, wanted), mode="bilinear", antialias=True)
    torch.testing.assert_close(matrix[:, None] @ x @ matrix[:, None].mT, expected, rtol=1e-4, atol=1e-5)


def test_by_hand_two_pixels_become_three():
    matrix = resampling(torch.tensor([1.0]), torch.tensor([2.0]), 4, 3)[0]
    torch.testing.assert_close(matrix, torch.tensor([[0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0]]))


def test_boxes_are_of_the_published_sizes_and_every_other_one_is_mirrored():
    n, side = 4000, 64
    down, across = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    made = augmented("resized_crop_flip", torch.stack([down, across]).expand(n, -1, -1, -1), (32, 32))
    # Away from the edges a resized ramp is a ramp: its slope tells the box's side, its middle where the box is.
    slopes = torch.stack([made[:, 0, 20, 16] - made[:, 0, 10, 16], made[:, 1, 16, 20] - made[:, 1, 16, 10]]) / 10
    height, width = slopes.abs() * 32
    area, ratio = height * width / side**2, width / height
    assert 0.07 < area.min() < 0.1
    assert 0.9 < area.max() <= 1.001
    assert 0.7 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.42
    assert abs(float(area.mean()) - 0.49) < 0.05  # a bit less than 0.54: large boxes fit less often
    assert (slopes[0] > 0).all()
    assert abs(float((slopes[1] < 0).float().mean()) - 0.5) < 0.03
    middle = made[:, :, 15:17, 15:17].mean((2, 3)).T
    for at, length in zip(middle, (height, width), strict=True):
        assert (at - length / 2 > -0.5).all()
        assert (at + length / 2 < side + 0.5).all()


def test_a_flip_is_a_flip():
    across = torch.arange(float(SIDE)).expand(1, 1, SIDE, SIDE)
    for seed in range(20):
        made, mirrored = (augmented("resized_crop_flip", x, seed=seed) for x in (across, -across))
        rises = bool((made.diff(dim=3) > 0).all())
        assert rises != bool((made.diff(dim=3) < 0).all())
        torch.testing.assert_close(made, -mirrored)
    seen = {bool((augmented("resized_crop_flip", across, seed=seed).diff(dim=3) > 0).all()) for seed in range(20)}
    assert seen == {True, False}


def test_cutout_blanks_one_square_of_what_crop_and_flip_make():
    x = batch(200, 32)
    plain, cut = augmented("crop_flip", x, (32, 32)), augmented("crop_flip_cutout", x, (32, 32))
    holes = (cut != plain).any(1)
    sizes = set()
    for image, hole in zip(cut, holes, strict=True):
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        assert (image[:, hole] == 0).all()
        assert hole.sum() == len(rows) * len(columns), "a rectangle"
        assert 8 <= len(rows) <= 16
        assert 8 <= len(columns) <= 16
        assert len(rows) == 16 or rows[0] == 0 or rows[-1] == 31, "smaller only at an edge"
        sizes.add((len(rows), len(columns)))
    assert (16, 16) in sizes
    assert len(sizes) > 10


def test_cutout_is_chosen_by_the_experiment():
    run = finish(driver(tiny(local={"lr": 0.05, "batch": 16, "augment": "crop_flip_cutout"})))
    assert (
        run.fingerprint() != finish(driver(tiny(local={"lr": 0.05, "batch": 16, "augment": "crop_flip"}))).fingerprint()
    )


# ---- experiments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["imagenet_lt", "inaturalist_user_160k"])
def test_a_set_used_as_published_is_not_cut(name):
    assert Experiment.model_validate({"data": {"name": name}}).data.imbalance == 1
    assert Experiment.model_validate({"data": {"name": name, "imbalance": 1}}).model.name == "resnet50"
    with pytest.raises(InputError, match=f"data.imbalance: '{name}' has class sizes of its own .* leave imbalance out"):
        read(text=f"data: {{name: {name}, imbalance: 10}}")
    assert Experiment().data.imbalance == 10
    with pytest.raises(InputError, match=r"data.imbalance: must be .* 1"):
        read(text="data: {imbalance: 0.5}")


def test_a_sweep_over_sets_that_are_cut_and_not_is_written_out_and_read_again():
    for text in (
        "search: {}\nexperiment: {data: {name: !grid [digits, imagenet_lt]}}",
        "search: {}\nexperiment: {algorithm: fedavg}\ncases: [{data: {name: digits}}, {data: {name: imagenet_lt}}]",
        "data: {name: imagenet_lt}",
        "data:",
    ):
        written = dump_sweep(filled_in(read(text=text)))
        assert dump_sweep(read(text=written)) == written
        assert ("imbalance: 10" in written) == ("imagenet_lt" not in text and text != "data:")
    one = Experiment.model_validate({"data": {"name": "imagenet_lt"}})
    assert read(text=dump(one)).experiment["data"]["imbalance"] == 1


LOCAL = {"lr": 0.02, "batch": 5, "epochs": 2}


def on_files(**changes) -> Experiment:
    return tiny(
        data={"name": "imagenet_lt", "clients": 4, "alpha": 1.0, "validation": 0.2},
        **{"model": {"name": "resnet8", "width": 4}, "local": LOCAL, **changes},
    )


def here(experiment: Experiment, dataset: Dataset) -> Driver:
    parts = split_for(experiment, dataset)
    return Driver(experiment, dataset, parts, InProcess(Worker(experiment, dataset, parts)))


def in_memory(dataset: Dataset) -> Dataset:
    """The same images as one array; networks see the middle, as there is nothing to crop from."""
    train, test = (files[range(len(files))] for files in (dataset.x_train, dataset.x_test))
    cut = slice((SIDE - CROP) // 2, (SIDE + CROP) // 2)
    return replace(dataset, x_train=train[:, :, cut, cut], x_test=test[:, :, cut, cut], crop=None)


def test_a_run_has_the_same_bits_with_and_without_cache_and_on_one_or_two_actors(
    monkeypatch, tmp_path, small, ray_cluster
):
    write_imagenet(tmp_path / "data")
    experiment = on_files()
    found = {}
    for gigabytes in ("1", "0"):
        monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", gigabytes)
        dataset = load("imagenet_lt", tmp_path / "data")
        found[gigabytes] = finish(here(experiment, dataset)).fingerprint()
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", "1")
    dataset = load("imagenet_lt", tmp_path / "data")
    found["again"] = finish(here(experiment, dataset)).fingerprint()
    for actors in (1, 2):
        parts, pool = split_for(experiment, dataset), Pool(actors, 1.0, 0.0)
        try:
            pool.load(experiment, ray.put(dataset), parts)
            found[actors] = finish(Driver(experiment, dataset, parts, pool)).fingerprint()
        finally:
            pool.close()
    assert len(set(found.values())) == 1, found


def test_actors_get_names_and_open_the_files_themselves(monkeypatch, tmp_path, small, ray_cluster):
    """What goes through Ray is far smaller than the pixels, which all actors read from one file."""
    (layout,) = SOURCES["imagenet_lt"].layouts
    large = replace(SOURCES["imagenet_lt"], layouts=(replace(layout, read=imagenet_lt(4, 256)),))
    monkeypatch.setitem(SOURCES, "imagenet_lt", large)
    write_imagenet(tmp_path / "data")
    dataset, experiment = load("imagenet_lt", tmp_path / "data"), on_files(local=LOCAL, clients_per_round=4)
    put = ray.put(dataset)
    assert get_object_locations([put])[put]["object_size"] < 20_000 < len(dataset.x_train) * 3 * 256**2
    parts, pool = split_for(experiment, dataset), Pool(2, 1.0, 0.0)
    try:
        pool.load(experiment, put, parts)
        run = Driver(experiment, dataset, parts, pool)

        def reading() -> int:
            run.evaluate()
            opened = [Path(f"/proc/{where['pid']}/fd").iterdir() for where in pool.where.values()]
            return sum(str(kept(tmp_path)) in map(os.path.realpath, links) for links in opened)

        wait_for(lambda: reading() == 2)
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "paco", "bpfed", "creff", "mupfl"])
def test_files_and_memory_give_the_same_bits(tmp_path, small, name):
    """What is read ahead, or block by block, is what would have been there at once."""
    write_imagenet(tmp_path / "data")
    files = load("imagenet_lt", tmp_path / "data")
    prior = {"loss": "balanced_softmax", "prior": "global"} if name == "paco" else {}
    steps = {"match_steps": 3, "features_per_class": 5, "grad_repeats": 2}
    quick = {"creff": steps | {"head_epochs": 2}, "mupfl": steps | {"classifier_epochs": 2}}.get(name, {})
    for augment in ("none", "crop_flip"):
        experiment = on_files(algorithm={name: quick}, local=LOCAL | prior | {"augment": augment}, rounds=1)
        assert finish(here(experiment, files)).server.model == finish(here(experiment, in_memory(files))).server.model


def test_batches_read_ahead_are_those_of_a_plain_loop(tmp_path, small):
    write_imagenet(tmp_path / "data")
    run = here(on_files(), load("imagenet_lt", tmp_path / "data"))
    worker, id = run.engine.worker, run.selectable[0]
    rows, rng = run.split.train[id], torch.Generator().manual_seed(9)
    seen = list(worker.client(id, 0, {}, run.origin, 9).batches(2, batch=3))
    for _ in range(2):
        for part in torch.randperm(len(rows), generator=rng).split(3):
            if len(part) > 1:  # as batch norm needs
                pixels = torch.from_numpy(run.dataset.x_train[rows[part.numpy()]])
                x, y = seen.pop(0)
                assert torch.equal(x, worker.augment((pixels.float() / 255 - worker.mean) / worker.std, rng))
                assert y.tolist() == run.dataset.y_train[rows[part.numpy()]].tolist()
    assert not seen


def test_a_client_hands_out_images_by_number(tmp_path, small):
    write_imagenet(tmp_path / "data")
    run = here(on_files(), load("imagenet_lt", tmp_path / "data"))
    id = run.selectable[0]
    client = run.engine.worker.client(id, 0, {}, run.origin, 1)
    for (x, y), views in ((next(client.batches(1)), ()), (next(client.batches(1, views=2)), (2,))):
        assert x.shape == (*views, len(y), 3, CROP, CROP)
    assert client.embed(run.origin).shape[0] == client.n
    assert "x" not in vars(client), "so far nothing has needed all of them"
    assert torch.equal(client.images(torch.tensor([2, 0])), client.x[[2, 0]])
    pixels = run.dataset.x_train[run.split.train[id]][:, :, 2:18, 2:18]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (run.dataset.mean, run.dataset.std))
    assert torch.equal(client.x, (torch.from_numpy(pixels).float() / 255 - mean) / std)
    held = here(tiny(), digits()).engine.worker.client(0, 0, {}, run.origin, 1)
    assert torch.equal(held.images(torch.tensor([2, 0])), held.x[[2, 0]])


def test_a_broken_image_ends_a_run_with_its_path(monkeypatch, tmp_path, small, ray_cluster):
    write_imagenet(tmp_path / "data")
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", "0")
    dataset, experiment = load("imagenet_lt", tmp_path / "data"), on_files(clients_per_round=4)
    parts, pool = split_for(experiment, dataset), Pool(1, 1.0, 0.0)
    pool.load(experiment, ray.put(dataset), parts)
    run = Driver(experiment, dataset, parts, pool)
    try:
        test = tmp_path / "data" / "val" / "ILSVRC2012_val_00000001.JPEG"
        whole = test.read_bytes()
        test.write_bytes(whole[:100])
        with pytest.raises(DataError, match=r"val_00000001\.JPEG is not a readable image"):
            run.evaluate()
        test.write_bytes(whole)
        for file in (tmp_path / "data" / "train").rglob("*.JPEG"):
            file.unlink()
        with pytest.raises(
            RuntimeError, match=r"client \d, round 0, FedAvg\.local: .*\.JPEG is missing: put the images"
        ):
            run.advance()
    finally:
        pool.close()
