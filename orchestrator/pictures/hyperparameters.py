"""The pictures of a search: what each open hyperparameter does to the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.pictures.declared import heat, numbers
from orchestrator.pictures.run import Drawn
from orchestrator.pictures.style import INK, MAP, WIDTH, logarithmic, look, name, name_ticks, plain, roomy
from orchestrator.summary import Configuration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST = 8  #: configurations from which on an importance is estimated
DISCRETE = 12  #: so many different values make a grid
PANELS = 6  #: hyperparameters that get a panel of their own


@dataclass(frozen=True)
class Knob:
    """An open hyperparameter: its path, its value in each configuration, and where that lies on an axis."""

    path: str
    values: Sequence[Any]

    @property
    def label(self) -> str:
        """The last word of its path."""
        return self.path.rpartition(".")[2]

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def names(self) -> list[str]:
        """The different values in words, numbers in ascending order."""
        order = sorted(set(self.values)) if self.numeric else list(dict.fromkeys(map(_word, self.values)))
        return [_word(v) for v in order]

    @property
    def places(self) -> Any:
        """The number of each configuration's value among the different ones."""
        names = self.names
        return numbers([names.index(_word(v)) for v in self.values])

    @property
    def axis(self) -> Any:
        """Each configuration's value as a number: itself, or its place."""
        return numbers(self.values) if self.numeric else self.places

    @property
    def even(self) -> Any:
        """The values spread evenly: logarithms where they span more than a factor of 20."""
        values = self.axis
        return np.log(values) if self.numeric and values.min() > 0 and values.max() > 20 * values.min() else values


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else plain(value, 24)


def knobs(configurations: Sequence[Configuration]) -> list[Knob]:
    """Return the hyperparameters that differ between configurations and that all of them have."""
    params = [c.trials[0]["params"] for c in configurations]
    shared = [path for path in params[0] if path not in ("seed", "case") and all(path in p for p in params)]
    found = [Knob(path, [p[path] for p in params]) for path in shared]
    found = [knob for knob in found if len(knob.names) > 1]
    if found and len({p.get("case") for p in params}) > 1:  # methods, compared under settings that are open too
        found.insert(0, Knob("method", [_method(c) for c in configurations]))
    return found


def _method(configuration: Configuration) -> str:
    """Return which case a configuration is of: its algorithms, and its number among the cases."""
    first = configuration.trials[0]
    return f"{first['params'].get('case')}: {first['run'].method}"


def importance(knobs: Sequence[Knob], scores: Sequence[float]) -> list[float] | None:
    """Return how much worse a random forest guesses the scores when one hyperparameter is shuffled, as shares of 1."""
    if len(scores) < FEWEST or len(knobs) < 2 or np.ptp(scores) == 0:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    x = np.stack([knob.even for knob in knobs], axis=1)
    forest = RandomForestRegressor(n_estimators=100, random_state=0, n_jobs=1).fit(x, scores)
    found = permutation_importance(forest, x, scores, n_repeats=20, random_state=0, n_jobs=1).importances_mean
    found = np.clip(found, 0.0, None)
    return [float(v) for v in found / found.sum()] if found.sum() > 0 else None


def pictures(
    configurations: Sequence[Configuration], metric: str, axis: str, scale: float, direction: int
) -> Iterator[Drawn]:
    """Draw what a search has found; nothing where no hyperparameter is open."""
    opened = knobs(configurations)
    if not opened:
        return
    scores = numbers([scale * mean(c.values(metric)) for c in configurations])
    shares = importance(opened, scores.tolist())
    if shares is not None:
        caption = (
            "Importance of each hyperparameter: how much worse a random forest, fitted to all configurations, guesses "
            f"{metric} when that one is shuffled, as shares of their sum. It describes these trials, not the method."
        )
        yield Drawn("importance", caption, bars_of(opened, shares))
        order = sorted(range(len(opened)), key=lambda i: -shares[i])  # type: ignore[index]
        opened = [opened[i] for i in order]
    others = (
        " Each point is a configuration; squares are means over those that share a value." if len(opened) > 1 else ""
    )
    if len(scores) < FEWEST and len(opened) > 1:
        others += f" {len(scores)} configurations are too few to tell the importance of each; {FEWEST} are needed."
    yield Drawn("one", f"{metric} over each open hyperparameter.{others}", over_one(opened[:PANELS], scores, axis))
    if len(opened) > 1:
        a, b = opened[:2]
        mean_over = ", mean over the others; the best is framed" if _is_grid(a, b, scores) else "; the best is circled"
        yield Drawn("two", f"{metric} over {a.path} and {b.path}{mean_over}.", over_two(a, b, scores, axis, direction))
    if len(opened) > 2:
        caption = (
            "Every configuration is a line through its hyperparameters to what it reaches; the best is the thick one."
        )
        yield Drawn("parallel", caption, parallel(opened[:PANELS], scores, axis, direction))


def bars_of(opened: Sequence[Knob], shares: Sequence[float]) -> Figure:
    """Draw the importance of each hyperparameter."""
    figure, axes = roomy(0.9 + 0.28 * len(opened))
    name(axes, "Importance of each hyperparameter", "share of the importance (%)", "")
    order = sorted(range(len(opened)), key=lambda i: shares[i])
    at = range(len(order))
    axes.barh(at, [100 * shares[i] for i in order], color=look(0).colour, height=0.65)
    axes.set_yticks(at, [plain(opened[i].path, 40) for i in order])
    axes.grid(axis="y", visible=False)
    return figure


def _points(axes: Axes, knob: Knob, scores: Any, alone: bool) -> None:
    """Draw the scores over one hyperparameter, and a line of means where values come again or it is alone."""
    own = look(0)
    places = knob.places
    few = len(knob.names) <= DISCRETE
    as_numbers = knob.numeric and not (few and knob.axis.min() <= 0)  # 0, 0.01, 0.1, 1 are steps of the same kind
    x = knob.axis if as_numbers else places
    axes.scatter(x, scores, s=14, color=own.colour, alpha=0.45, linewidths=0)
    if alone or (few and 2 * len(knob.names) <= len(scores)):
        groups = [(x[places == i][0], scores[places == i].mean()) for i in range(len(knob.names))]
        line = "-" if knob.numeric else ""
        axes.plot(*zip(*groups, strict=True), color=look(1).colour, marker=look(1).marker, linestyle=line)
    if as_numbers:
        logarithmic(axes, "x", knob.axis.tolist())
    else:
        name_ticks(axes, "x", knob.names, 8)


def over_one(opened: Sequence[Knob], scores: Any, axis: str) -> Figure:
    """Draw the result over each hyperparameter (FedLoGe Fig. 4, LDAE Fig. 4), a panel for each."""
    from matplotlib.figure import Figure

    columns = min(2, len(opened))
    rows = -(-len(opened) // columns)
    figure = Figure((WIDTH, 0.5 + 2.1 * rows), layout="constrained")
    for i, knob in enumerate(opened):
        axes = figure.add_subplot(rows, columns, i + 1)
        _points(axes, knob, scores, len(opened) == 1)
        axes.set_xlabel(plain(knob.path, 34))
        if i % columns == 0:
            axes.set_ylabel(axis)
    return figure


def _is_grid(a: Knob, b: Knob, scores: Any) -> bool:
    """Tell whether two hyperparameters take few values each, in most combinations."""
    return max(len(a.names), len(b.names)) <= DISCRETE and 2 * len(scores) >= len(a.names) * len(b.names)


def over_two(a: Knob, b: Knob, scores: Any, axis: str, direction: int) -> Figure:
    """Draw the result over two hyperparameters: a heat map (BPFed Fig. 4), or points where they lie anywhere."""
    figure, axes = roomy(3.4)
    name(axes, f"{plain(a.label, 20)} and {plain(b.label, 20)}", a.path, b.path)
    if _is_grid(a, b, scores):
        values = np.full((len(b.names), len(a.names)), np.nan)
        for row in range(values.shape[0]):
            for col in range(values.shape[1]):
                here = scores[(b.places == row) & (a.places == col)]
                values[row, col] = here.mean() if len(here) else np.nan
        heat(axes, values, b.names, a.names, axis)
        row, col = divmod(int(np.nanargmax(direction * values)), values.shape[1])
        from matplotlib.patches import Rectangle

        corner = (col - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=look(1).colour, linewidth=2.5))
        return figure
    drawn = axes.scatter(a.axis, b.axis, s=36, c=scores, cmap=MAP, edgecolors=INK, linewidths=0.4)
    best = int(np.argmax(direction * scores))
    axes.scatter(a.axis[best], b.axis[best], s=150, facecolors="none", edgecolors=look(1).colour, linewidths=2)
    figure.colorbar(drawn, ax=axes, label=axis)
    for which, knob in (("x", a), ("y", b)):
        if knob.numeric:
            logarithmic(axes, which, knob.axis.tolist())
        else:
            name_ticks(axes, which, knob.names)
    return figure


def parallel(opened: Sequence[Knob], scores: Any, axis: str, direction: int) -> Figure:
    """Draw parallel coordinates: hyperparameters side by side, and the result as the last and as colour."""
    import matplotlib
    from matplotlib.colors import Normalize

    figure, axes = roomy(3.4)
    columns = [*(knob.even for knob in opened), scores]
    unit = [(c - c.min()) / np.ptp(c) if np.ptp(c) else np.full(len(c), 0.5) for c in columns]
    lines = np.stack(unit, axis=1)
    colours = matplotlib.colormaps[MAP](Normalize(scores.min(), scores.max())(scores))
    best = int(np.argmax(direction * scores))
    for i in [*np.argsort(direction * scores), best]:
        colour, width = (look(1).colour, 2.6) if i == best else (colours[i], 1.0)
        axes.plot(lines[i], color=colour, linewidth=width)
    axes.set_xlim(-0.15, len(columns) - 0.85)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    for i, knob in enumerate([*opened, None]):
        axes.axvline(i, color=INK, linewidth=0.8)
        if knob is None or knob.numeric:
            ends = scores if knob is None else knob.axis
            marks = [(0.0, f"{ends.min():.3g}"), (1.0, f"{ends.max():.3g}")]
        else:
            marks = [(j / (len(knob.names) - 1), word) for j, word in enumerate(knob.names)][:DISCRETE]
        for height, word in marks:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
            axes.text(i, height, plain(word, 14), ha="center", va="center", fontsize=7, bbox=box)
    name_ticks(axes, "x", [*(knob.label for knob in opened), axis])
    name(axes, "All configurations", "hyperparameter, and the result on the right", "")
    return figure
