"""Pictures that algorithms give of themselves as plain data, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.pictures.style import (
    MAP,
    legend,
    look,
    name,
    name_ticks,
    plain,
    roomy,
    styled,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from algorithms.pictures import Bars, Heatmap, Lines, Picture, Points

MARKED = 30  #: more values than this get no marker each


def numbers(values: Any) -> Any:
    """Return numbers as an array, NaN where there is none."""
    return np.array(values, dtype=float)


@styled
def draw_declared(picture: Picture) -> Figure:
    """Draw what an algorithm gives of itself."""
    draw = {"Heatmap": _heatmap, "Lines": _lines, "Bars": _bars, "Points": _points}[type(picture).__name__]
    figure, axes = roomy(3.4 if draw is _heatmap else 2.6)
    name(axes, picture.title, picture.x, picture.y)
    draw(axes, picture)  # type: ignore[operator]
    if len(getattr(picture, "series", ())) > 1:
        legend(axes)
    return figure


def heat(axes: Axes, values: Any, rows: Any, columns: Any, colour: str) -> None:
    """Draw a matrix as colours, with its numbers where there is room for them."""
    image = axes.imshow(values, cmap=MAP, aspect="auto", interpolation="nearest")
    axes.grid(False)
    name_ticks(axes, "y", rows)
    name_ticks(axes, "x", columns)
    axes.get_figure().colorbar(image, ax=axes, label=plain(colour))  # type: ignore[union-attr]
    if values.shape[1] <= 12 and values.size <= 150:
        finite = values[np.isfinite(values)]
        middle = (finite.min() + finite.max()) / 2 if len(finite) else 0.0
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "black" if value > middle else "white"
                axes.text(j, i, f"{value:.2g}", ha="center", va="center", color=ink, fontsize=7.5)


def _heatmap(axes: Axes, picture: Heatmap) -> None:
    values = numbers(picture.values).reshape(len(picture.rows), len(picture.columns))
    heat(axes, values, picture.rows, picture.columns, picture.colour)


def _lines(axes: Axes, picture: Lines) -> None:
    at = numbers(picture.at)
    for i, (label, values) in enumerate(picture.series.items()):
        own = look(i)
        marker = own.marker if len(at) <= MARKED else ""
        axes.plot(at, numbers(values), color=own.colour, linestyle=own.line, marker=marker, label=plain(label))
    if np.all(at == np.round(at)):
        whole_numbers(axes)


def bars(axes: Axes, groups: Any, series: Any, errors: Any = None, looks: Any = None) -> None:
    """Draw bars side by side in each group."""
    width = 0.8 / max(1, len(series))
    for i, (label, values) in enumerate(series.items()):
        own = look(i if looks is None else looks[label])
        at = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        axes.bar(
            at, numbers(values), width, color=own.colour, hatch=own.hatch, edgecolor="white", linewidth=0.4,
            label=plain(label), yerr=None if errors is None else numbers(errors[label]), ecolor="#444444", capsize=2,
        )  # fmt: skip
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.6, len(groups) - 0.4)  # a bar that is missing keeps its place
    name_ticks(axes, "x", groups)


def _bars(axes: Axes, picture: Bars) -> None:
    bars(axes, picture.groups, picture.series)
    axes.axhline(0, color="#444444", linewidth=0.8)


def _points(axes: Axes, picture: Points) -> None:
    many = sum(len(values) for values in picture.series.values()) > 2000
    for i, (label, values) in enumerate(picture.series.items()):
        own, pairs = look(i), numbers(values).reshape(-1, 2)
        axes.scatter(
            pairs[:, 0], pairs[:, 1], s=16, color=own.colour, marker=own.marker, alpha=0.8, linewidths=0,
            label=plain(label), rasterized=many,
        )  # fmt: skip
