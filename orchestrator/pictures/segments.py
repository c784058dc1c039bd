"""Segmented images side by side: input, truth and predictions (MuPFL Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.pictures.style import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOID = 255
BACKGROUND, NOTHING = "#d9d9d9", "#ffffff"
#: A colour for each class, the most frequent ones of road scenes far apart; after the last they come again, darker.
COLOURS = (
    "#56B4E9", "#8c564b", "#F0E442", "#6a5acd", "#CC79A7", "#009E73", "#D55E00", "#bcbd22", "#0072B2", "#e31a1c",
    "#E69F00", "#17becf", "#7f7f7f", "#c5b0d5", "#98df8a", "#f7b6d2", "#393b79", "#637939", "#843c39", "#222222",
)  # fmt: skip
EACH = 1.45  #: inches of an image's width


def colours(classes: int) -> list[str]:
    """Return the colour of each class, and of the background after them."""
    from matplotlib.colors import to_hex, to_rgb

    found = []
    for c in range(classes):
        red, green, blue = (0.65 ** (c // len(COLOURS)) * part for part in to_rgb(COLOURS[c % len(COLOURS)]))
        found.append(to_hex((red, green, blue)))
    return [*found, BACKGROUND]


def painted(labels: Any, palette: list[str]) -> Any:
    """Return a map of labels as an image."""
    from matplotlib.colors import to_rgb

    table = np.full((VOID + 1, 3), to_rgb(NOTHING))
    table[: len(palette)] = [to_rgb(colour) for colour in palette]
    return table[labels]


def side_by_side(shown: Mapping[str, Any], classes: int) -> Figure:
    """Draw images, their labels, and what a run's models make of them: the shared one, and some clients' own."""
    columns: dict[str, Any] = {"truth": shown["truth"]}
    if "generic" in shown:
        columns["generic model"] = shown["generic"][0]
    for i, client in enumerate(shown["clients"].tolist()):
        columns[f"truth of client {client}"] = shown["known"][i]
        if "personal" in shown:
            columns[f"model of client {client}"] = shown["personal"][i]
    return _drawn(shown, columns, classes)


def of_methods(found: Mapping[str, Mapping[str, Any]], classes: int, model: str) -> Figure | None:
    """Draw what several methods' models make of the same images: the generic ones, or one client's personal ones."""
    able = [shown for shown in found.values() if model in shown]
    first = able[0] if able else {}
    same = {k: v for k, v in found.items() if model in v and np.array_equal(v["images"], first["images"])}
    if len(same) < 2:
        return None
    truth = first["truth"] if model == "generic" else first["known"][0]
    called = "truth" if model == "generic" else f"truth of client {first['clients'][0]}"
    return _drawn(first, {called: truth} | {label: shown[model][0] for label, shown in same.items()}, classes)


def _drawn(shown: Mapping[str, Any], maps: Mapping[str, Any], classes: int) -> Figure:
    """Draw images and maps of their labels side by side, a colour for each class and a legend of those to be seen."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    palette, names = colours(classes), [*map(str, shown["names"])] or [f"class {c}" for c in range(classes)]
    columns = {"image": shown["images"].transpose(0, 2, 3, 1), **maps}
    count, (height, width) = len(shown["images"]), shown["truth"].shape[1:]
    seen = np.unique(np.concatenate([np.ravel(labels) for labels in maps.values()]))
    colour = dict(enumerate(palette)) | {VOID: NOTHING}
    called = dict(enumerate([*names, "background"])) | {VOID: "void"}
    per_line = max(1, int(EACH * len(columns) / 1.15))
    lines = -(-len(seen) // per_line)
    inches = count * EACH * height / width, 0.24, 0.12 + 0.19 * lines
    figure = Figure((EACH * len(columns), sum(inches)))
    grid = figure.subplots(count, len(columns), squeeze=False)
    figure.subplots_adjust(0.004, inches[2] / sum(inches), 0.996, 1 - inches[1] / sum(inches), 0.02, 0.02)
    for axes, (title, contents) in zip(grid.T, columns.items(), strict=True):
        axes[0].set_title(plain(title, 24), fontsize=8, loc="center", pad=3)
        for one, content in zip(axes, contents, strict=True):
            grey = title == "image" and content.shape[2] != 3
            image = content[:, :, 0] if grey else content if title == "image" else painted(content, palette)
            one.imshow(image, cmap="gray" if grey else None, interpolation="nearest", aspect="auto")
            one.set_axis_off()
    patches = [
        Patch(facecolor=colour[c], edgecolor="#888888", linewidth=0.4, label=plain(called[c], 18))
        for c in seen.tolist()
    ]
    figure.legend(
        handles=patches, loc="lower center", ncols=per_line, borderaxespad=0.2, handlelength=1.1, fontsize=7.5
    )
    return figure
