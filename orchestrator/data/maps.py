"""Data sets that have a label for every pixel: semantic segmentation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.images import open_image
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
    """Read the fine annotations of Cityscapes; its validation set is the test."""
    parts: list[Any] = []
    for kind in ("train", "val"):
        images = sorted((folder.path / "leftImg8bit" / kind).glob("*/*_leftImg8bit.png"))
        if not images:
            raise DataError(f"{folder.path / 'leftImg8bit' / kind} holds no <city>/*_leftImg8bit.png")
        labels = [
            folder.path / "gtFine" / kind / path.parent.name / path.name.replace("_leftImg8bit", "_gtFine_labelIds")
            for path in images
        ]
        if missing := [path for path in labels if not path.is_file()]:
            raise DataError(f"{len(missing)} of {len(labels)} images have no labels, the first {missing[0]}")
        parts += [_pixels(images), _ids(labels)]
    return Arrays(*parts)


def _pixels(paths: list[Path]) -> Maps:
    from PIL.Image import Resampling

    x = np.empty((len(paths), 3, *SIZE), np.uint8)
    for row, path in zip(x, paths, strict=True):
        with open_image(path) as image:
            row[...] = np.asarray(image.convert("RGB").resize(SIZE[::-1], Resampling.BILINEAR)).transpose(2, 0, 1)
    return x


def _ids(paths: list[Path]) -> Maps:
    from PIL.Image import Resampling

    table = np.full(256, VOID, np.uint8)
    table[list(CITYSCAPES)] = range(len(CITYSCAPES))
    y = np.empty((len(paths), *SIZE), np.uint8)
    for row, path in zip(y, paths, strict=True):
        with open_image(path) as image:
            if image.mode not in ("L", "P"):
                raise DataError(f"{path} must have one byte a pixel, not the mode {image.mode}")
            row[...] = table[np.asarray(image.resize(SIZE[::-1], Resampling.NEAREST))]
    return y
