"""Our numbers beside the published ones: what each cell came to, and whether the order of the methods holds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.table import Table as Grid

from orchestrator.checkpoint import RunDirectory, status_of
from orchestrator.comparison import paired_t
from orchestrator.summary import describe_trial, history
from orchestrator.table_file import CLASSIFIER, Cell, Published, Reading, Table

SCHEMA = 2
POINTS = 3.0  #: points of accuracy that count as the same
#: ECL never answers with a class that its client lacks; what of its lead is left when nobody does is told as well.
MASKED = {"personal/acc_owned": "personal/acc_owned_masked"}


@dataclass(frozen=True)
class Outcome:
    """A cell: our values over seeds in the unit of the paper, and what is to be said of them."""

    cell: Cell
    values: tuple[float, ...]
    mark: str
    reason: str = ""
    trials: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  #: of the values, where they are known
    fingerprints: tuple[str, ...] = ()  #: of the trials
    masked: tuple[float, ...] = ()  #: the values if every model chooses among its client's classes, where that is known

    @property
    def ours(self) -> float | None:
        """The mean over seeds."""
        return mean(self.values) if self.values else None

    @property
    def by_seed(self) -> dict[int, float]:
        """The value of each seed, where seeds are known."""
        return dict(zip(self.seeds, self.values, strict=False))

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the published number."""
        return None if self.ours is None or self.cell.published is None else self.ours - self.cell.published


# What came out --------------------------------------------------------------------------------------------------------


def measure(trial: Path, reading: Reading) -> float | None:
    """Return what a finished trial says, or None where it never says it."""
    if reading.metric in CLASSIFIER:
        return classifier(trial)[reading.metric]
    if reading.reaches is not None:
        reached = (h["round"] for h in history(trial) if h["metrics"].get(reading.metric, -1.0) >= reading.reaches)
        return next((float(r) for r in reached), None)
    found: dict[str, float] = describe_trial(trial, None)[reading.take]
    return found.get(reading.metric)


def classifier(trial: Path) -> dict[str, float]:
    """Return mean and variance of the norms of the shared classifier's rows, and of the angles between them."""
    loaded = RunDirectory(trial).load()
    weight = torch.cat([t for t in loaded[0]["server"]["model"].head.values() if t.dim() == 2], 1) if loaded else None
    if weight is None:
        return dict.fromkeys(CLASSIFIER, float("nan"))
    norms = weight.double().norm(dim=1)
    unit = weight.double() / norms[:, None]
    above = torch.triu_indices(len(unit), len(unit), offset=1)
    angles = (unit @ unit.T)[above[0], above[1]].clamp(-1, 1).acos().rad2deg()
    return dict(zip(CLASSIFIER, (f(t).item() for t in (norms, angles) for f in (torch.mean, torch.var)), strict=True))


def outcome(
    cell: Cell,
    published: Published,
    trials: Mapping[str, Path],
    missing: str = "",
    otherwise: str = "",
    seeds: Mapping[str, int] | None = None,
) -> Outcome:
    """Judge a cell by its trials, of which those that have not begun have no directory.

    `missing` says why trials cannot run here, `otherwise` in a word how they are not as the paper's.
    """
    if cell.reading is None:
        label = cell.row if cell.row in published.left_out else cell.column
        return Outcome(cell, (), "not run here", published.left_out[label])
    ended = {id: path for id, path in trials.items() if path.is_dir() and status_of(path)["status"] == "FINISHED"}
    scale = 100.0 if cell.accuracy and published.unit == "percent" else 1.0
    found = {id: measure(path, cell.reading) for id, path in ended.items()}
    values = {id: scale * value for id, value in found.items() if value is not None}
    told: dict[str, Any] = {"cell": cell, "values": tuple(values.values()), "trials": tuple(ended)}
    if cell.reading.metric in MASKED and cell.reading.reaches is None:
        other = cell.reading.model_copy(update={"metric": MASKED[cell.reading.metric]})
        again = [measure(ended[id], other) for id in values]
        told["masked"] = tuple(scale * value for value in again if value is not None) if None not in again else ()
    told["seeds"] = tuple(seeds[id] for id in values) if seeds else ()
    told["fingerprints"] = tuple(str(status_of(path).get("fingerprint")) for path in ended.values())
    if not ended and missing:
        return Outcome(**told, mark="not run here", reason=missing)
    if len(ended) < len(trials):
        failed = any(path.is_dir() and status_of(path)["status"] == "FAILED" for path in trials.values())
        mark = "failed" if failed else "unfinished" if ended else "not run yet"
        return Outcome(**told, mark=mark, reason=f"{len(ended)} of {len(trials)} trials have finished" * bool(ended))
    if otherwise:
        return Outcome(**told, mark=otherwise)
    if len(values) < len(found):
        never = "never got there" if cell.reading.reaches is not None else f"does not report {cell.reading.metric}"
        return Outcome(**told, mark="differs", reason=f"{len(found) - len(values)} of {len(found)} trials {never}")
    if cell.published is None:
        return Outcome(**told, mark="no published number")
    near = published.within.get(cell.column, POINTS * scale / 100)
    judged = Outcome(**told, mark="reproduced")
    if abs(judged.difference or 0.0) <= near + 1e-9:  # however far apart the seeds: a noisy cell must not pass by it
        return judged
    if cell.reading.because:
        return Outcome(**told, mark="differs", reason=cell.reading.because)
    return Outcome(**told, mark="differs, not explained")


@dataclass(frozen=True)
class Claim:
    """Whether the methods come out in the paper's order, in one column (or, where methods are columns, in one row)."""

    where: str
    ran: str  #: how many of the methods
    best: str  #: the paper's best of these
    ours: str  #: our best
    agreed: int  #: pairs of methods in the paper's order
    pairs: int

    def __str__(self) -> str:
        """Say it in a sentence."""
        here = "the best here too" if self.best == self.ours else f"not the best here, which is {self.ours}"
        best = f"of {self.ran} methods that ran, the paper's best, {self.best}, is {here}"
        return f"{self.where}: {best}; {self.agreed} of {self.pairs} pairs are in the paper's order"


def claims(table: Table, outcomes: Sequence[Outcome]) -> list[Claim]:
    """Compare the order of the methods, wherever at least two have been run to the end."""
    found = []
    for shared, group in table.compared.items():
        for line in table.published.columns if table.by_rows else table.published.rows:
            scores = _scores(table, outcomes, group, line)
            if len(scores) < 2:
                continue
            apart = [(a, b) for a, b in combinations(scores.values(), 2) if a[0] != b[0]]
            agreed = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in apart)
            best = max(scores, key=lambda label: scores[label][0])
            ours = max(scores, key=lambda label: (scores[label][1], label == best))  # a tie is no defeat
            best, ours = (label.removeprefix(f"{shared}, ") for label in (best, ours))
            ran = f"{len(scores)} of {len(group)}" if len(scores) < len(group) else f"{len(scores)}"
            found.append(Claim(", ".join(filter(None, (shared, line))), ran, best, ours, agreed, len(apart)))
    return found


@dataclass(frozen=True)
class Duel:
    """The paper's best method against another: by how much it is better here, line by line and seed by seed."""

    best: str
    other: str
    ahead: tuple[float, ...]

    def __str__(self) -> str:
        """Say it in a sentence."""
        won, test = sum(d > 0 for d in self.ahead), paired_t(self.ahead)
        p = "too few for a test" if test.p is None else f"p = {test.p:.2g} (paired t-test)"
        return f"{self.best} over {self.other}: {mean(self.ahead):+.2f}, ahead in {won} of {len(self.ahead)} pairs, {p}"


def duels(table: Table, outcomes: Sequence[Outcome]) -> list[Duel]:
    """Set the paper's best method of every line against each other one, in pairs of the same seed."""
    ahead: dict[tuple[str, str], list[float]] = {}
    for group in table.compared.values():
        for line in table.published.columns if table.by_rows else table.published.rows:
            ran = _ran(table, outcomes, group, line)
            best = _best(table, outcomes, group, line)
            if best not in ran:
                continue
            for method in ran.keys() - {best}:
                ours, theirs = ran[best].by_seed, ran[method].by_seed
                pairs = [_sign(ran[best]) * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]
                ahead.setdefault((best, method), []).extend(pairs)
    return [Duel(*methods, tuple(pairs)) for methods, pairs in sorted(ahead.items()) if pairs]


def _scores(
    table: Table, outcomes: Sequence[Outcome], group: Sequence[str], line: str
) -> dict[str, tuple[float, float]]:
    """Return the published number and ours of each method in one line; more is better, so rounds count negative."""
    return {
        method: (_sign(o) * (o.cell.published or 0.0), _sign(o) * (o.ours or 0.0))
        for method, o in _ran(table, outcomes, group, line).items()
    }


def _sign(o: Outcome) -> int:
    return -1 if o.cell.reading is not None and o.cell.reading.reaches is not None else 1


def _ran(table: Table, outcomes: Sequence[Outcome], group: Sequence[str], line: str) -> dict[str, Outcome]:
    """Return the outcome of each method of a line for which there are both numbers."""
    return {method: o for method, o in _printed(table, outcomes, group, line).items() if o.values}


def _best(table: Table, outcomes: Sequence[Outcome], group: Sequence[str], line: str) -> str | None:
    """Return the method that is the best of a line in the paper, whether it has been run or not."""
    printed = _printed(table, outcomes, group, line)
    return max(
        printed, key=lambda method: _sign(printed[method]) * (printed[method].cell.published or 0.0), default=None
    )


def _printed(table: Table, outcomes: Sequence[Outcome], group: Sequence[str], line: str) -> dict[str, Outcome]:
    """Return the outcome of each method of a line for which the paper has a number."""
    found = {}
    for o in outcomes:
        method, place = (o.cell.row, o.cell.column) if table.by_rows else (o.cell.column, o.cell.row)
        compared = method in group and place == line and o.cell.reading and o.cell.reading.metric not in CLASSIFIER
        if compared and o.cell.published is not None:
            found[method] = o
    return found


# In words -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A table with everything that is said of it."""

    table: Table
    outcomes: tuple[Outcome, ...]
    settings: str  #: how they are not the paper's; empty: they are

    @property
    def caption(self) -> list[str]:
        """Lines that say what the numbers are."""
        published, metrics = self.table.published, list(dict.fromkeys(str(o.cell.reading) for o in self._read))
        told = f"Metric: {metrics[0]}. " if len(metrics) == 1 else "The metric is under each column's name. "
        lines = [
            f"{published.paper}, Table {published.table} ({published.source}): {published.title}.",
            f"{told}The paper: {published.metric}.",
            "In a cell: ours (mean ± standard deviation over seeds); published (ours minus published); a mark.",
            f"reproduced: {self._rule}.",
        ]
        return [*lines, *([self.settings] if self.settings else []), *filter(None, (published.note, self.table.note))]

    @property
    def _rule(self) -> str:
        far = [f"{tolerance:g} in {column}" for column, tolerance in self.table.published.within.items()]
        return f"at most {', '.join(far) or f'{POINTS:g} points'} from the published number"

    @property
    def _read(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.cell.reading is not None]

    @property
    def notes(self) -> list[str]:
        """Reasons, numbered by their order."""
        return list(dict.fromkeys(o.reason for o in self.outcomes if o.reason))

    @property
    def counts(self) -> str:
        """Say how many cells have which mark."""
        marks = Counter(o.mark for o in self.outcomes)
        return f"{len(self.outcomes)} cells: " + ", ".join(f"{n} {mark}" for mark, n in marks.most_common())

    @property
    def fingerprint(self) -> str | None:
        """One name for the results of all runs of the table, in order; None if there are none."""
        runs = dict(pair for o in self.outcomes for pair in zip(o.trials, o.fingerprints, strict=False))
        told = "".join(f"{id} {print_}\n" for id, print_ in sorted(runs.items()))
        return hashlib.sha256(told.encode()).hexdigest() if runs else None

    @property
    def masked_duels(self) -> list[Duel]:
        """The duels if every model chooses among its client's classes."""
        return duels(self.table, [replace(o, values=o.masked) for o in self.outcomes if o.masked])

    def tail(self) -> list[str]:
        """Lines below the table."""
        runs = [f"Fingerprint of these runs: {self.fingerprint[:12]}."] if self.fingerprint else []
        order = [f"Order of methods, {claim}." for claim in claims(self.table, self.outcomes)]
        order += [f"Over lines and seeds, {duel}." for duel in duels(self.table, self.outcomes)]
        order += [f"The same if every model chooses among its client's classes, {d}." for d in self.masked_duels]
        return [self.counts + ".", *order, *runs, *(f"[{i}] {note}" for i, note in enumerate(self.notes, 1))]

    def _grid(self, break_: str) -> list[list[str]]:
        """Return header and rows, the parts of a cell apart."""
        at = {(o.cell.row, o.cell.column): o for o in self.outcomes}
        several = len({str(o.cell.reading) for o in self._read}) > 1
        metric = {o.cell.column: str(o.cell.reading) for o in self._read}
        columns = self.table.published.columns
        head = [column + (break_ + metric[column] if several and column in metric else "") for column in columns]
        rows = []
        for row in self.table.published.rows:
            cells = [at.get((row, column)) for column in columns]
            rows.append([row, *("-" if o is None else break_.join(self._cell(o)) for o in cells)])
        return [["", *head], *rows]

    def _cell(self, o: Outcome) -> list[str]:
        show = self._shown()
        published = "unreadable" if o.cell.published is None else show(o.cell.published)
        ours = "" if o.ours is None else show(o.ours) + ("" if o.spread is None else f" ± {show(o.spread)}")
        if o.difference is not None:
            published += f" ({'+' if o.difference >= 0 else '-'}{show(abs(o.difference))})"
        note = f" [{self.notes.index(o.reason) + 1}]" if o.reason else ""
        return [*([ours] if ours else []), published, o.mark + note]

    def _shown(self) -> Callable[[float], str]:
        digits = {"percent": ".2f", "share": ".4f", "number": ".4g"}[self.table.published.unit]
        return lambda value: format(value, digits)

    def rich(self) -> Grid:
        """Return the table for a terminal."""
        head, *rows = self._grid("\n")
        grid = Grid(show_lines=True)
        for i, column in enumerate(head):
            grid.add_column(column.replace(", ", ",\n"), justify="right" if i else "left", overflow="fold")
        for row in rows:
            grid.add_row(*(cell.replace("[", r"\[") for cell in row))
        return grid

    def markdown(self) -> str:
        """Return the table with everything that is said of it."""
        head, *rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self._grid("<br>"))
        table = "\n".join([head, "|" + "---|" * (len(self.table.published.columns) + 1), *rows])
        return "\n\n".join([*self.caption, table, *self.tail()]) + "\n"

    def picture(self) -> str | None:
        """Return all accuracies over the published ones as SVG; None if there are none yet."""
        from orchestrator.pictures.published import Point, against
        from orchestrator.pictures.style import svg

        points = [
            Point(o.cell.row if self.table.by_rows else o.cell.column, o.cell.published, o.ours, o.spread)
            for o in self._read
            if o.cell.accuracy and o.ours is not None and o.cell.published is not None
        ]
        if not points:
            return None
        unit, within = (" (%)", POINTS) if self.table.published.unit == "percent" else ("", POINTS / 100)
        title = f"{self.table.published.paper.split(' (')[0]}, Table {self.table.published.table}: ours over published"
        return svg(against(points, unit, within, title))

    def record(self) -> dict[str, Any]:
        """Return the table for scripts."""
        return {
            "schema": SCHEMA,
            "paper": self.table.published.paper,
            "table": self.table.published.table,
            "unit": self.table.published.unit,
            "caption": self.caption,
            "settings": self.settings,
            "fingerprint": self.fingerprint,
            "cells": [
                {
                    "row": o.cell.row,
                    "column": o.cell.column,
                    "metric": None if o.cell.reading is None else str(o.cell.reading),
                    "published": o.cell.published,
                    "ours": o.ours,
                    "spread": o.spread,
                    "difference": o.difference,
                    "values": o.values,
                    "seeds": o.seeds,
                    "mark": o.mark,
                    "reason": o.reason,
                    "trials": list(o.trials),
                }
                for o in self.outcomes
            ],
            "order": [asdict(c) for c in claims(self.table, self.outcomes)],
            "duels": [{**asdict(d), "p": paired_t(d.ahead).p} for d in duels(self.table, self.outcomes)],
            "masked_duels": [{**asdict(d), "p": paired_t(d.ahead).p} for d in self.masked_duels],
        }
