"""The pictures of one run, from the files in its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from orchestrator.pictures.declared import bars, draw_declared, numbers
from orchestrator.pictures.segments import side_by_side
from orchestrator.pictures.style import (
    FAINT,
    Look,
    canvas,
    legend,
    logarithmic,
    look,
    name,
    name_ticks,
    plain,
    styled,
    svg,
    whole_numbers,
)
from orchestrator.runs import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What the headline accuracies are called in pictures.
ACCURACIES = {
    "generic/acc": "generic (balanced test)",
    "personal/acc_dist": "personal (own label mix)",
    "personal/acc_owned": "personal (owned classes alike)",
}
GENERIC, PERSONAL = "generic", "personal, mean over its owners"  #: the two accuracies of a class


class Terms(NamedTuple):
    """What a task measures, in words."""

    quality: str
    unit: str  #: what class sizes are of
    over_rounds: dict[str, str]  #: metric -> what it is called
    per_class: dict[str, str]  #: column -> what it is called
    per_client: dict[str, str]


OF_IMAGES = Terms(
    "accuracy",
    "samples",
    ACCURACIES,
    {"generic_acc": GENERIC, "personal_acc_owned": PERSONAL},
    {"acc_dist": "own label mix", "acc_owned": "owned classes alike"},
)
OF_PIXELS = Terms(
    "IoU",
    "pixels",
    {"generic/miou": "generic, all classes", "personal/miou": "personal, own foreground and background"},
    {"generic_iou": GENERIC, "personal_iou": PERSONAL},
    {"miou": "mean IoU", "macc": "mean recall"},
)
SHOTS = "many", "medium", "few", "head", "middle", "tail"
FEW = 30  #: so many classes are shown as bars and marked lines
EACH = 60  #: so many clients are shown one by one, more are sorted into a curve


class Drawn(NamedTuple):
    """A picture with the name of its file and what it shows."""

    name: str
    caption: str
    figure: Figure


def draw(directory: Path, reference: Path | None = None) -> list[Path]:
    """Write all pictures of a run into artifacts/pictures, and return their paths."""
    other = None if reference is None else read_run(reference)
    folder = directory / "artifacts" / "pictures"
    written = []
    for picture in pictures(read_run(directory), other):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{picture.name}.svg"
        path.write_text(svg(picture.figure), encoding="utf-8")
        written.append(path)
    return written


@styled
def pictures(run: Run, reference: Run | None = None) -> list[Drawn]:
    """Return every picture for which a run has the data."""
    return list(_pictures(run, None if reference is None or reference.path == run.path else reference))


def terms(run: Run) -> Terms:
    """Return the words for what a run measures."""
    return OF_PIXELS if run.experiment.get("task") == "segmentation" else OF_IMAGES


def first(word: str) -> str:
    """Return a word as it begins a sentence."""
    return word[:1].upper() + word[1:]


def _pictures(run: Run, reference: Run | None) -> Iterator[Drawn]:
    said = terms(run)
    quality = first(said.quality)
    if run.examples and run.counts is not None:
        caption = (
            "Some test images with their labels (white: void), what the generic model makes of them, and for some "
            "clients the labels as they know them and what their own models make."
        )
        yield Drawn("segments", caption, side_by_side(run.examples, run.counts.shape[1] - 1))
    if any(run.series(metric)[0] for metric in said.over_rounds):
        caption = f"{quality} over rounds; where there are several phases, a dashed line is the end of one."
        yield Drawn("rounds", caption, over_rounds(run))
    if run.per_class and _has(run.per_class, *said.per_class):
        caption = f"{quality} of each class at the end, the largest class first, with the class sizes behind it."
        yield Drawn("classes", caption, classes(run))
    if reference and (gap := class_gap(run, reference)):
        caption = f"What each class gains (above 0) or loses against {reference.name}, the largest class first."
        yield Drawn("gap", caption, gap)
    if run.per_client and _has(run.per_client, *said.per_client):
        caption = f"{quality} of each client's own model at the end."
        yield Drawn("clients", caption, clients(run, reference))
    if figure := shots(run):
        caption = (
            "Accuracy by class size at the end: many, medium, few are classes of more than 100, 20 to 100, fewer than "
            "20 samples; head, middle, tail hold the first 75 %, the next 20 % and the last 5 % of all samples."
        )
        yield Drawn("shots", caption, figure)
    if run.counts is not None:
        bubbles, curve = _of_split(run.counts.shape, run.counts.tobytes(), run.counts.dtype.str, said.unit)
        yield Drawn("labels", f"Which labels each client has; the area is the number of {said.unit}.", bubbles)
        yield Drawn("long_tail", f"{first(said.unit)} of each class over all clients, the largest first.", curve)
    for stem, data in run.figures.items():
        try:
            yield Drawn(f"own-{stem}", *_own(json.dumps(data, sort_keys=True)))
        except ValueError as error:
            run.notes.append(f"the picture {stem} is not shown: {error}")


# Trials of a sweep often have these in common, and most of their time would go into drawing them again.
@lru_cache(maxsize=8)
def _of_split(shape: tuple[int, ...], data: bytes, kind: str, unit: str) -> tuple[Figure, Figure]:
    counts = np.frombuffer(data, kind).reshape(shape)
    return labels(counts, unit), long_tail(counts, unit)


@lru_cache(maxsize=16)
def _own(data: str) -> tuple[str, Figure]:
    from algorithms.pictures import from_json

    picture = from_json(json.loads(data))
    return f"{picture.title}. {picture.note}".strip(), draw_declared(picture)


def _has(rows: Sequence[Any], *columns: str) -> bool:
    """Tell whether a table has a number in any of these columns."""
    return any(row.get(column) is not None for row in rows for column in columns)


def column(rows: Sequence[Any], key: str) -> Any:
    """Return a table's column, NaN where there is no number."""
    return numbers([row.get(key) for row in rows])


# What there is to learn from -----------------------------------------------------------------------------------------


def labels(counts: Any, unit: str = "samples") -> Figure:
    """Draw the label distribution over clients as bubbles (LDAE Fig. 5, MuPFL Fig. 6a)."""
    figure, axes = canvas(3.4)
    name(axes, "Labels of each client", "client", "class")
    client, label = np.nonzero(counts)
    size = counts[client, label]
    # The largest bubble just fits its cell; the area is proportional to the number.
    cell = max(5.0, min(330 / max(1, counts.shape[0]), 170 / max(1, counts.shape[1]), 18.0))
    area = size / max(1, size.max()) * cell**2
    own = look(0)
    many = len(size) > 2000
    axes.scatter(client, label, area, color=own.colour, alpha=0.75, linewidths=0, rasterized=many)
    axes.set_xlim(-0.8, counts.shape[0] - 0.2)
    axes.set_ylim(counts.shape[1] - 0.2, -0.8)
    whole_numbers(axes, "x")
    whole_numbers(axes, "y")
    largest = int(size.max()) if len(size) else 1
    for shown in sorted({largest, max(1, largest // 4), max(1, largest // 16)}, reverse=True):
        axes.scatter([], [], shown / largest * cell**2, color=own.colour, label=f"{shown} {unit}")
    legend(axes)
    return figure


def long_tail(counts: Any, unit: str = "samples") -> Figure:
    """Draw the sorted class sizes (the long-tail curve)."""
    figure, axes = canvas(2.4)
    totals = counts.sum(0)
    order = np.argsort(-totals, kind="stable")
    sizes = totals[order]
    name(axes, "The long tail", "class, largest first", f"training {unit}")
    axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=FAINT)
    axes.plot(np.arange(len(sizes)), sizes, color=look(0).colour, marker="o" if len(sizes) <= 30 else "")
    logarithmic(axes, "y", sizes.tolist())
    axes.grid(axis="x", visible=False)
    name_ticks(axes, "x", order.tolist())
    smallest = sizes[sizes > 0]
    if len(smallest):
        text = f"imbalance {smallest.max() / smallest.min():.3g} : 1"
        axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    return figure


# What was learnt -----------------------------------------------------------------------------------------------------


def phase_ends(run: Run) -> list[tuple[int, str]]:
    """Return the last round of each phase, and the phase."""
    ends: list[tuple[int, str]] = []
    for line in run.lines:
        if ends and ends[-1][1] == line["phase"]:
            ends.pop()
        ends.append((line["round"], line["phase"]))
    return ends


def over_rounds(run: Run) -> Figure:
    """Draw generic and personal quality over rounds."""
    figure, axes = canvas()
    said = terms(run)
    title = f"{first(said.quality)} over rounds"
    name(axes, title, "round", f"{said.quality} (%)")
    for i, (metric, label) in enumerate(said.over_rounds.items()):
        rounds, values = run.series(metric)
        if rounds:
            own = look(i)
            every = max(1, len(rounds) // 15)
            axes.plot(
                rounds, 100 * numbers(values), color=own.colour, linestyle=own.line, marker=own.marker, markevery=every,
                label=label,
            )  # fmt: skip
    ends = phase_ends(run)
    for last, _ in ends[:-1]:
        axes.axvline(last + 0.5, color="#888888", linestyle=(0, (4, 3)), linewidth=0.9)
    if len(ends) > 1:
        axes.set_title(f"{title}: " + plain(", then ".join(phase for _, phase in ends), 50))
    whole_numbers(axes)
    legend(axes)
    return figure


def _by_size(rows: Sequence[Any]) -> Any:
    """Return the order of a table of classes, the largest class first."""
    return np.argsort(-np.nan_to_num(column(rows, "train")), kind="stable")


def _sizes_behind(axes: Axes, sizes: Any, unit: str) -> None:
    """Draw the class sizes behind other things, on an axis of their own on the right."""
    behind = axes.twinx()
    behind.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=FAINT)
    behind.set_ylim(bottom=0)
    behind.set_ylabel(f"training {unit} (grey)")
    behind.grid(False)
    behind.spines["right"].set_visible(True)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)


def _over_classes(axes: Axes, values: Any, own: Look, label: str) -> None:
    """Draw a value of each class; of very many classes as dots, with a running mean over eleven as a line."""
    if len(values) <= FEW:
        axes.plot(values, color=own.colour, linestyle=own.line, marker=own.marker, label=label)
        return
    axes.plot(values, color=own.colour, linestyle="", marker=own.marker, markersize=2.5, alpha=0.5)
    means = [
        np.nanmean(near) if np.isfinite(near := values[max(0, i - 5) : i + 6]).any() else np.nan
        for i in range(len(values))
    ]
    axes.plot(means, color=own.colour, linestyle=own.line, linewidth=2, label=f"{label} (line: mean of 11 classes)")


def classes(run: Run) -> Figure:
    """Draw the quality of each class with the class sizes behind it."""
    figure, axes = canvas(right=0.66)
    said = terms(run)
    order = _by_size(run.per_class)
    ids = column(run.per_class, "class")[order]
    name(axes, f"{first(said.quality)} of each class", "class, largest first", f"{said.quality} (%)")
    _sizes_behind(axes, column(run.per_class, "train")[order], said.unit)
    for (key, label), i in zip(said.per_class.items(), (0, 2), strict=True):
        values = 100 * column(run.per_class, key)[order]
        if np.isfinite(values).any():
            _over_classes(axes, values, look(i), label)
    axes.set_ylim(-3, 103)
    name_ticks(axes, "x", [f"{i:g}" for i in ids])
    legend(axes)
    return figure


def class_gap(run: Run, reference: Run) -> Figure | None:
    """Draw what each class gains over a reference run, with the class sizes behind it (ECL Fig. 2)."""
    other = {row.get("class"): row for row in reference.per_class}
    rows = [row for row in run.per_class if row.get("class") in other]
    gaps = {}
    for key, label in terms(run).per_class.items():
        there = numbers([other[row["class"]].get(key) for row in rows])
        gap = 100 * (column(rows, key) - there)
        if np.nan_to_num(gap).any():
            gaps[label] = gap
    if not gaps:
        return None
    figure, axes = canvas(right=0.66)
    order = _by_size(rows)
    title = f"Gain of each class over {plain(reference.name, 40)}"
    name(axes, title, "class, largest first", "gain (percentage points)")
    _sizes_behind(axes, column(rows, "train")[order], terms(run).unit)
    ids = [f"{i:g}" for i in column(rows, "class")[order]]
    looks = {GENERIC: 0, PERSONAL: 2}
    if len(rows) <= FEW:
        bars(axes, ids, {label: gap[order] for label, gap in gaps.items()}, looks=looks)
    else:
        for label, gap in gaps.items():
            _over_classes(axes, gap[order], look(looks[label]), label)
        name_ticks(axes, "x", ids)
    axes.axhline(0, color="#444444", linewidth=0.9)
    legend(axes)
    return figure


def clients(run: Run, reference: Run | None = None) -> Figure:
    """Draw the quality of each client (BPFed Fig. 2)."""
    figure, axes = canvas()
    ids, said = column(run.per_client, "client"), terms(run)
    series = {label: 100 * column(run.per_client, key) for key, label in said.per_client.items()}
    if reference is not None and run.split is not None and run.split == reference.split:
        key, called = next(iter(said.per_client.items()))
        there = {row.get("client"): row.get(key) for row in reference.per_client}
        label = f"{called}, {plain(reference.name, 30)}"
        series[label] = 100 * numbers([there.get(row.get("client")) for row in run.per_client])
    draw_clients(axes, ids, series, said.quality)
    return figure


def draw_clients(axes: Axes, ids: Any, series: dict[str, Any], quality: str = "accuracy") -> None:
    """Draw a value of each client for several series: one by one, or of very many each series sorted."""
    one_by_one = len(ids) <= EACH
    x = "client" if one_by_one else "clients, each curve sorted from its worst to its best (%)"
    name(axes, f"{first(quality)} of each client", x, f"{quality} (%)")
    for i, (label, values) in enumerate(series.items()):
        values, own = numbers(values), look(i)
        if not np.isfinite(values).any():
            continue
        at = np.arange(len(values)).astype(float)
        if not one_by_one:
            values = np.sort(values[np.isfinite(values)])
            at = np.linspace(0, 100, len(values))
        marker = own.marker if one_by_one else ""
        axes.plot(at, values, color=own.colour, linestyle=own.line, marker=marker, linewidth=1.2, label=plain(label))
    axes.set_ylim(-3, 103)
    if one_by_one:
        name_ticks(axes, "x", [f"{i:g}" for i in ids])
    legend(axes)


def shots(run: Run) -> Figure | None:
    """Draw the accuracy of many-, medium- and few-shot classes as bars, and of head, middle and tail."""
    last: dict[str, float] = {}
    for line in run.lines:
        last |= line["metrics"]
    series = {
        label: [100 * last[f"{metric}_{s}"] if f"{metric}_{s}" in last else None for s in SHOTS]
        for metric, label in ACCURACIES.items()
    }
    series = {label: values for label, values in series.items() if any(v is not None for v in values)}
    if not series:
        return None
    figure, axes = canvas()
    name(axes, "Accuracy by class size", "classes", "accuracy (%)")
    bars(axes, SHOTS, series)
    axes.axvline(2.5, color="#888888", linewidth=0.9)
    axes.set_ylim(0, 103)
    legend(axes)
    return figure
