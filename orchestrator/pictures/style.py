"""How our pictures look: readable in print, in grey and by the colour-blind; text is never taken for formulas."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

INK, FAINT, GRID = "#222222", "#d5dce4", "#e6e6e6"
WIDTH = 5.2  #: inches: a little more than a column, and readable on a telephone
ROOM = 66  #: characters of tick labels that such a width has room for
MAP = "cividis"  #: the same to all eyes, and monotone in grey


class Look(NamedTuple):
    """How a series is told from the others: by colour (of Okabe and Ito), marker, line, and the hatch of bars."""

    colour: str
    marker: str
    line: Any
    hatch: str


LOOKS = (
    Look("#0072B2", "o", "-", ""),
    Look("#D55E00", "s", "--", "///"),
    Look("#009E73", "^", "-.", "---"),
    Look("#CC79A7", "D", ":", "\\\\\\"),
    Look("#E69F00", "v", (0, (5, 1)), "xxx"),
    Look("#56B4E9", "P", (0, (3, 1, 1, 1)), "|||"),
    Look("#000000", "X", (0, (1, 1)), "+++"),
    Look("#999999", "*", (0, (7, 2)), "//|"),
)

STYLE: Any = {
    "text.parse_math": False,
    "font.family": ["DejaVu Sans", "Verdana", "sans-serif"],  # text stays text; where the first lacks, as wide a one
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
    "figure.dpi": 100,
    "savefig.dpi": 160,  # of what is kept as an image
    "svg.fonttype": "none",
    "svg.hashsalt": "fedtail",
}


def look(i: int) -> Look:
    """Return the look of the i-th series; after the last one the colours come again with other markers."""
    first, again = LOOKS[i % len(LOOKS)], LOOKS[(i + i // len(LOOKS)) % len(LOOKS)]
    return first._replace(marker=again.marker, line=again.line, hatch=again.hatch)


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function that draws under our style, whatever the caller's settings are."""

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # Verdana is for those who look at it
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # whoever looks at it may well have it
            return function(*args, **kwargs)

    return inside


def canvas(height: float = 2.6, right: float = 0.15) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; the margins are fixed, since finding them takes longer than drawing."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height))
    axes = figure.add_subplot()
    figure.subplots_adjust(0.66 / WIDTH, 0.47 / height, 1 - right / WIDTH, 1 - 0.3 / height)
    return figure, axes


def roomy(height: float = 2.6) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes that makes room for words of any length."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


@lru_cache(maxsize=32)
@styled
def svg(figure: Figure) -> str:
    """Return a figure as SVG, the same bytes for the same figure."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def plain(text: object, longest: int = 60) -> str:
    """Return text that any picture can hold: printable, and not too long."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def name(axes: Axes, title: str, x: str, y: str) -> None:
    """Give the axes their title and labels."""
    axes.set_title(plain(title, 75))
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))


def legend(axes: Axes) -> None:
    """Put the legend under the axes, where it hides nothing, and make the figure higher by it."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    figure: Any = axes.get_figure()
    widest = 0.55 + 0.07 * max(map(len, labels))  # inches: the line with its marker, and letters
    columns = max(1, min(len(labels), 3, int(figure.get_figwidth() / widest)))
    before, extra = figure.get_figheight(), 0.13 + 0.168 * -(-len(labels) // columns)
    after = before + extra
    figure.set_figheight(after)
    if figure.get_layout_engine() is None:
        old = figure.subplotpars
        figure.subplots_adjust(bottom=(old.bottom * before + extra) / after, top=1 - (1 - old.top) * before / after)
        figure.legend(handles, labels, loc="lower center", ncols=columns, borderaxespad=0.4)
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def whole_numbers(axes: Axes, which: str = "x") -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    getattr(axes, f"{which}axis").set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def logarithmic(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Scale an axis logarithmically if its values are positive and span more than a factor of 20."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if not values or min(values) <= 0 or max(values) / min(values) <= 20:
        return
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def name_ticks(axes: Axes, which: str, names: Sequence[object], most: int = 24) -> None:
    """Name the positions 0, 1, 2 and so on; of very many only every second, fifth, tenth and so on."""
    most = most if len(names) <= most else most // 2
    steps = (nice * 10**power for power in range(9) for nice in (1, 2, 5))
    at = range(0, len(names), next(step for step in steps if len(names) <= step * most))
    labels = [plain(names[i], 24) for i in at]
    place = axes.get_subplotspec()
    long = which == "x" and sum(map(len, labels)) > ROOM / (place.get_gridspec().ncols if place else 1)
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if long else {}
    getattr(axes, f"set_{which}ticks")(list(at), labels, **turned)
