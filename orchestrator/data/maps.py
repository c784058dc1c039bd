"""Data sets that have a label for every pixel: semantic segmentation."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.files import ImageFiles, listed
from orchestrator.data.readers import Arrays, DataError, Folder, archive, channels_first

VOID = 255  #: the label of a pixel that is neither learned nor tested
Maps = npt.NDArray[np.uint8]

CAMVID = (
    "Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist",
)  # fmt: skip

#: The classes of Cityscapes that are tested, by the ids that its label files have.
CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
SIZE = 256, 512  #: height and width in which Cityscapes is kept, a quarter of the published ones


def label_maps(path: Path, found: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Take four arrays of which the labels are maps [N, H, W]; 255 is void, and so is the label named `void`."""
    void, parts = np.asarray(found.get("void", VOID)), list[Any]()
    if void.size != 1 or not np.issubdtype(void.dtype, np.integer):
        raise DataError(f"{path}: void must be one whole number, not {void.dtype} of shape {void.shape}")
    for kind in ("train", "test"):
        x, y = channels_first(found[f"x_{kind}"], f"{path}: x_{kind}"), found[f"y_{kind}"]
        wanted = len(x), *x.shape[2:]
        if not np.issubdtype(y.dtype, np.integer) or y.shape != wanted:
            raise DataError(f"{path}: y_{kind} must be whole numbers of shape {wanted}, not {y.dtype} {y.shape}")
        if y.min() < 0 or y.max() > VOID:
            raise DataError(f"{path}: y_{kind} has labels {y.min()}..{y.max()}; use 0 to 254, and 255 for void")
        parts += [x, np.where(y == void.item(), VOID, y).astype(np.uint8)]
    if parts[0].shape[1:] != parts[2].shape[1:]:
        raise DataError(f"{path}: training images are {parts[0].shape[1:]}, test images {parts[2].shape[1:]}")
    present, tested = (np.setdiff1d(y, [VOID]).tolist() for y in (parts[1], parts[3]))
    if not present or present != list(range(len(present))):
        raise DataError(f"{path}: y_train must use every class from 0 up, not {present[:20]}")
    if unknown := sorted(set(tested) - set(present)):
        raise DataError(f"{path}: y_test has labels that y_train has not: {unknown[:20]}")
    return Arrays(*parts)


def camvid(folder: Folder) -> Arrays:
    """Read CamVid, reduced to 90 x 120 pixels; its label 11 is void."""
    path = folder.path / "camvid_90x120.npz"
    return label_maps(path, archive(path) | {"void": np.array(11)})


def cityscapes(folder: Folder) -> Arrays:
    """Read the fine annotations of Cityscapes; its validation set is the test, and images stay in their files."""
    names: list[str] = []
    ends = [0]
    for kind in ("train", "val"):
        found = sorted((folder.path / "leftImg8bit" / kind).glob("*/*_leftImg8bit.png"))
        if not found:
            raise DataError(f"{folder.path / 'leftImg8bit' / kind} holds no <city>/*_leftImg8bit.png")
        names += [str(path.relative_to(folder.path / "leftImg8bit")) for path in found]
        ends.append(len(names))
    maps = [f"gtFine/{name.replace('_leftImg8bit', '_gtFine_labelIds')}" for name in names]
    if missing := [name for name in maps if not (folder.path / name).is_file()]:
        raise DataError(f"{len(missing)} of {len(maps)} images have no labels, the first {folder.path / missing[0]}")
    meaning = np.full(256, VOID, np.uint8)
    meaning[list(CITYSCAPES)] = range(len(CITYSCAPES))
    images = listed(folder.path, [f"leftImg8bit/{name}" for name in names], SIZE)
    y = ImageFiles(listed(folder.path, maps, SIZE, meaning), range(len(maps)))[np.arange(len(maps))][:, 0]
    parts: list[Any] = []
    for begin, end in pairwise(ends):
        parts += [ImageFiles(images, range(begin, end)), y[begin:end]]
    return Arrays(*parts)
