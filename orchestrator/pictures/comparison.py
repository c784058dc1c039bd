"""The pictures of a comparison: configurations side by side, over rounds, clients, class sizes and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.comparison import SHARES, SHOTS, rounds_to, sign
from orchestrator.pictures import hyperparameters
from orchestrator.pictures.declared import bars, numbers
from orchestrator.pictures.run import Drawn, draw_clients, first
from orchestrator.pictures.segments import of_methods
from orchestrator.pictures.style import canvas, legend, logarithmic, look, name, plain, styled, whole_numbers
from orchestrator.runs import Run, runs_of
from orchestrator.summary import Configuration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 8  #: configurations in one picture; more could not be told apart
IN_A_ROW = 6  #: segmented images side by side; more would be too small


@dataclass(frozen=True)
class Comparison:
    """What is compared: configurations with a value, the best first, by which metric, and against what."""

    configurations: Sequence[Configuration]
    metric: str
    mode: str
    reference: Configuration
    targets: Sequence[float]
    given: bool  #: whether the targets were asked for, else they are shares of what the reference reaches

    @property
    def scale(self) -> float:
        """What turns the metric's values into the units of the axis."""
        return 100.0 if sign(self.metric) > 0 else 1.0

    @property
    def axis(self) -> str:
        """What the metric's axis is called, with its unit."""
        return f"{self.metric} (%)" if sign(self.metric) > 0 else self.metric

    @property
    def quality(self) -> str:
        """What the metric is called in a sentence."""
        return "mean IoU" if "miou" in self.metric else "accuracy"

    def label(self, configuration: Configuration) -> str:
        """Return a configuration's name without the words that all of them have."""
        words = [c.name.split() for c in self.configurations]
        common = set(words[0]).intersection(*words)
        return plain(" ".join(w for w in configuration.name.split() if w not in common) or configuration.name, 64)

    @property
    def shown(self) -> Sequence[Configuration]:
        """The best, and the reference."""
        first = list(self.configurations[:MOST])
        return first if self.reference in first else [*first[: MOST - 1], self.reference]


@styled
def pictures(c: Comparison) -> list[Drawn]:
    """Return every picture for which there is something to compare."""
    return list(_pictures(c)) if len(c.configurations) > 1 else []


def _pictures(c: Comparison) -> Iterator[Drawn]:
    seeds = any(len(runs_of(each)) > 1 for each in c.configurations)
    left = len(c.configurations) - len(c.shown)
    more = f" The best {len(c.shown)} of {len(c.configurations)} configurations are shown." if left else ""
    if any(len(run.series(c.metric)[0]) > 1 for each in c.shown for run in runs_of(each)):
        caption = (
            f"{c.metric} over rounds{', mean over seeds; the band is one standard deviation' if seeds else ''}.{more}"
        )
        yield Drawn("rounds", caption, over_rounds(c))
    if len(c.targets) and (figure := to_target(c)):
        what = ", ".join(f"{target:.4g}" for target in c.targets)
        of = "" if c.given else f", which are {_percents()} of what {c.reference.name} has in its last round"
        caption = (
            f"Rounds until {c.metric} first reaches {what}{of}: mean over seeds, counted in evaluated rounds; "
            f"no bar where a seed never does.{more}"
        )
        yield Drawn("target", caption, figure)
    if any(run.seconds > 0 for each in c.configurations for run in runs_of(each)):
        caption = (
            "What the time buys: seconds of all rounds, evaluation included, as if trials had shared nothing"
            f"{'; the bars are one standard deviation over seeds' if seeds else ''}."
        )
        yield Drawn("time", caption, over_time(c))
    if figure := shots(c):
        yield Drawn("shots", f"{c.metric} by class size{', mean over seeds' if seeds else ''}.{more}", figure)
    if figure := clients(c):
        yield Drawn(
            "clients",
            f"{first(c.quality)} of each client under each method, on one split of the same seed.{more}",
            figure,
        )
    if figure := segments(c):
        caption = "Test images, their labels (white: void), and what each method's model makes of them, the best first."
        yield Drawn("segments", caption, figure)
    yield from hyperparameters.pictures(c.configurations, c.metric, c.axis, c.scale, sign(c.metric, c.mode))


def _percents() -> str:
    return ", ".join(f"{100 * share:g} %" for share in SHARES)


def over_rounds(c: Comparison) -> Figure:
    """Draw a metric over rounds for several configurations, mean and spread over seeds."""
    figure, axes = canvas()
    name(axes, f"{c.metric} over rounds", "round", c.axis)
    for i, configuration in enumerate(c.shown):
        at: dict[int, list[float]] = {}
        for run in runs_of(configuration):
            for number, value in zip(*run.series(c.metric), strict=True):
                at.setdefault(number, []).append(value)
        rounds, own = sorted(at), look(i)
        means = c.scale * numbers([mean(at[r]) for r in rounds])
        spread = c.scale * numbers([stdev(at[r]) if len(at[r]) > 1 else 0.0 for r in rounds])
        every = max(1, len(rounds) // 12)
        axes.plot(
            rounds, means, color=own.colour, linestyle=own.line, marker=own.marker, markevery=every,
            label=c.label(configuration),
        )  # fmt: skip
        if spread.any():
            axes.fill_between(rounds, means - spread, means + spread, color=own.colour, alpha=0.13, linewidth=0)
    whole_numbers(axes)
    legend(axes)
    return figure


def to_target(c: Comparison) -> Figure | None:
    """Draw how many rounds each configuration needs to reach targets (MuPFL Fig. 8, FedLoGe Table 10)."""
    found = {c.label(each): [rounds_to(each, c.metric, target, c.mode)[0] for target in c.targets] for each in c.shown}
    if not any(value is not None for values in found.values() for value in values):
        return None
    figure, axes = canvas()
    name(axes, f"Rounds to reach {c.metric}", f"target for {c.metric} (%)" if c.scale > 1 else "target", "rounds")
    bars(axes, [f"{c.scale * target:.4g}" for target in c.targets], found)
    whole_numbers(axes, "y")
    legend(axes)
    return figure


def over_time(c: Comparison) -> Figure:
    """Draw what each configuration reaches against the time it takes."""
    figure, axes = canvas()
    name(axes, f"Time against {c.quality}" if c.scale > 1 else "Time against quality", "time of all rounds (s)", c.axis)
    found = {}
    for configuration in c.configurations:
        runs = [run for run in runs_of(configuration) if run.series(c.metric)[1]]
        found[configuration.name] = (
            [run.seconds for run in runs],
            [c.scale * run.series(c.metric)[1][-1] for run in runs],
        )
    shown = [each.name for each in c.shown]
    others = [(mean(times), mean(values)) for each, (times, values) in found.items() if each not in shown]
    if others:
        x, y = numbers(others).T
        axes.scatter(x, y, s=12, color=look(7).colour, linewidths=0)
    for i, configuration in enumerate(c.shown):
        own, (times, values) = look(i), found[configuration.name]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in (times, values)]
        axes.errorbar(
            mean(times), mean(values), xerr=spread[0], yerr=spread[1], color=own.colour, marker=own.marker,
            markersize=7, linestyle="", elinewidth=0.8, capsize=2, label=c.label(configuration),
        )  # fmt: skip
    logarithmic(axes, "x", [time for times, _ in found.values() for time in times])
    legend(axes)
    return figure


def shots(c: Comparison) -> Figure | None:
    """Draw the metric for classes of many, medium and few samples, configuration by configuration."""
    groups = [s for s in SHOTS if any(each.values(f"{c.metric}_{s}") for each in c.shown)]
    if not groups:
        return None
    values = {c.label(each): [each.values(f"{c.metric}_{s}") for s in groups] for each in c.shown}
    figure, axes = canvas()
    name(axes, f"{c.metric} by class size", "classes", c.axis)
    means = {label: [c.scale * mean(v) if v else None for v in found] for label, found in values.items()}
    errors = {label: [c.scale * stdev(v) if len(v) > 1 else 0.0 for v in found] for label, found in values.items()}
    bars(axes, groups, means, errors)
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def clients(c: Comparison) -> Figure | None:
    """Draw the accuracy of each client under several methods (BPFed Fig. 2)."""
    column = c.metric.removeprefix("personal/")
    first = next((run for run in runs_of(c.shown[0]) if run.split is not None), None)
    if first is None or not any(row.get(column) is not None for row in first.per_client):
        return None
    ids = [row.get("client") for row in first.per_client]
    series: dict[str, Any] = {}
    for configuration in c.shown[:5]:
        run = same_split(configuration, first)
        if run is not None:
            own = {row.get("client"): row.get(column) for row in run.per_client}
            series[c.label(configuration)] = c.scale * numbers([own.get(id) for id in ids])
    if len(series) < 2:
        return None
    figure, axes = canvas()
    draw_clients(axes, np.asarray(ids, dtype=float), series, c.quality)
    axes.set_ylabel(c.axis)
    return figure


def segments(c: Comparison) -> Figure | None:
    """Draw what the best of each method makes of the same images, those of one split (MuPFL Fig. 9)."""
    methods = [each.trials[0]["run"].method for each in c.configurations]
    best = [each for i, each in enumerate(c.configurations) if methods[i] not in methods[:i]]
    shown = (best if len(best) > 1 else c.configurations)[:IN_A_ROW]
    first = next((run for each in shown for run in runs_of(each) if run.examples and run.split is not None), None)
    if first is None or first.counts is None:
        return None
    found = {c.label(each): run.examples for each in shown if (run := same_split(each, first))}
    model = "generic" if c.metric.startswith("generic/") else "personal"
    return of_methods(found, first.counts.shape[1] - 1, model)


def same_split(configuration: Configuration, run: Run) -> Run | None:
    """Return the run of a configuration that has the same seed and clients as another."""
    found = (r for r in runs_of(configuration) if r.split is not None and (r.seed, r.split) == (run.seed, run.split))
    return next(found, None)
