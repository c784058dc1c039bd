"""A paper's table at a glance: every cell's published number against ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.pictures.style import FAINT, INK, canvas, legend, look, name, plain, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """A cell for which there are both numbers."""

    method: str
    published: float
    ours: float
    spread: float | None


@styled
def against(points: Sequence[Point], unit: str, within: float, title: str) -> Figure:
    """Draw ours over what is published; on the line they are equal, in the band they count as the same."""
    figure, axes = canvas(3.4)
    name(axes, title, f"published{unit}", f"ours{unit}")
    ends = [value for p in points for value in (p.published, p.ours)]
    margin = max(0.06 * (max(ends) - min(ends)), within)
    low, high = min(ends) - margin, max(ends) + margin
    axes.fill_between([low, high], [low - within, high - within], [low + within, high + within], color=FAINT, alpha=0.6)
    axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
    for i, method in enumerate(dict.fromkeys(p.method for p in points)):
        own, shown = look(i), [p for p in points if p.method == method]
        axes.errorbar(
            [p.published for p in shown], [p.ours for p in shown], yerr=[p.spread or 0.0 for p in shown],
            color=own.colour, marker=own.marker, linestyle="", markersize=5.5, elinewidth=0.8, capsize=2,
            label=plain(method, 30),
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    legend(axes)
    return figure
