"""A paper's table as a sweep: rows and columns are parts of experiments, and a cell is a row laid over a column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WrapValidator, field_validator, model_validator

from algorithms import nearest
from orchestrator.evaluate import known_metrics
from orchestrator.experiment import Part, problems
from orchestrator.fields import Count, Number, Positive, either
from orchestrator.yaml_file import Document, InputError, Keys, dotted, laid_over, load, parse, short, told

if TYPE_CHECKING:
    from orchestrator.sweep_file import Sweep

MOST = 1_000  #: rows or columns
PUBLISHED = "published.yaml"  #: beside the table files
CLASSIFIER = tuple(f"classifier/{what}_{how}" for what in ("norm", "angle") for how in ("mean", "var"))


class Published(Part):
    """A table as it is printed."""

    paper: str
    table: Count
    title: str
    source: str
    metric: str  #: in the paper's words
    unit: Literal["percent", "share", "number"] = "percent"
    within: dict[str, Positive] = Field(default={})  #: column -> how far off is still reproduced; for plain numbers
    columns: tuple[str, ...]
    rows: dict[str, tuple[Annotated[Number | Literal["-"] | None, WrapValidator(either)], ...]] = Field(min_length=1)
    left_out: dict[str, str] = Field(default={})  #: a row or a column that is never run -> why
    note: str = ""

    @field_validator("rows")
    @classmethod
    def _full(cls, rows: dict[str, Any], info: Any) -> dict[str, Any]:
        for label, values in rows.items():
            if len(values) != len(info.data.get("columns", values)):
                raise ValueError(f"row '{label}' has {len(values)} values for {len(info.data['columns'])} columns")
        return rows

    @model_validator(mode="after")
    def _known(self) -> Published:
        for label in [*self.left_out, *self.within]:
            if label not in (known := [*self.rows, *self.columns]):
                raise ValueError(f"there is no row or column '{label}'; {nearest(label, known)}")
        if self.unit == "number" and (bare := set(self.columns) - {*self.within, *self.left_out}):
            raise ValueError(f"say under within how far from column '{min(bare)}' still counts as reproduced")
        return self

    def value(self, row: str, column: str) -> float | Literal["-"] | None:
        """Return the number of a cell; null where it cannot be read, '-' where the paper prints none."""
        return self.rows[row][self.columns.index(column)]


class Reading(Part):
    """What is read off the trials of a cell, and why it may differ."""

    metric: str
    take: Literal["last", "best"] = "last"
    reaches: Number | None = None  #: the number is the first round in which the metric is as high as this
    because: str = ""

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        if metric not in (known := [*known_metrics(), *CLASSIFIER]):
            raise ValueError(f"there is no metric '{metric}'; {nearest(metric, known)}")
        return metric

    def __str__(self) -> str:
        """Name what the number is."""
        if self.reaches is not None:
            return f"first round with {self.metric} >= {self.reaches:g}"
        return self.metric if self.metric in CLASSIFIER else f"{self.metric}, {self.take} round"


@dataclass(frozen=True)
class Cell:
    """Where a number stands, and which of the sweep's cases yields it; none where the table is not run there."""

    row: str
    column: str
    published: float | None
    case: int | None = None
    reading: Reading | None = None

    @property
    def accuracy(self) -> bool:
        """Whether the number is an accuracy, and not of rounds, norms or angles."""
        return self.reading is not None and self.reading.reaches is None and self.reading.metric not in CLASSIFIER


@dataclass(frozen=True)
class Table:
    """What a file says of the table that its trials make up."""

    published: Published
    cells: tuple[Cell, ...]
    note: str
    compared: Mapping[str, tuple[str, ...]]  #: what methods are compared on -> their labels; their order is the claim
    by_rows: bool  #: whether they are rows


_Layer = tuple[Keys, Mapping[str, Any]]  # where a part of an experiment stands, and what it says


@dataclass(frozen=True)
class _Line:
    """A row or a column: its label, the labels it is made of, and what each of these says."""

    label: str
    parts: tuple[str, ...]
    layers: tuple[_Layer, ...]

    @property
    def names(self) -> list[str]:
        """What it goes by: the parts of its label, and all of it, last."""
        return list(dict.fromkeys((*self.label.split(", "), *self.parts, self.label)))


def take(document: Document, path: Path | None) -> Table | None:
    """Turn the key `table` of a file into `cases`, one for each different cell that the paper has a number for."""
    tree = document.value
    if not isinstance(tree, dict) or "table" not in tree:
        return None
    about = tree.pop("table")
    if tree.get("cases") is not None:
        raise _wrong(document, ("cases",), "rows and columns of the table are the cases; remove one of the two")
    known = ["published", "rows", "columns", "note", *Reading.model_fields]
    if unknown := [key for key in about if key not in known] if isinstance(about, dict) else []:
        raise _wrong(document, ("table", unknown[0]), f"unknown key; {nearest(unknown[0], known)}")
    if path is None or not isinstance(about, dict) or not {"published", "rows", "columns"} <= about.keys():
        raise _wrong(document, ("table",), "must be a mapping with published, rows and columns, in a file")
    published = _published(document, about["published"], path.with_name(PUBLISHED))
    rows, columns = (_lines(document, about[side], ("table", side)) for side in ("rows", "columns"))
    _complete(document, published, rows, columns)
    common: _Layer = (("table",), {key: about[key] for key in Reading.model_fields if key in about})
    cases, cells = list[dict[str, Any]](), dict[tuple[str, str], Cell]()
    for row, column in product(rows, columns):
        if (value := published.value(row.label, column.label)) == "-":
            continue
        layers = [common, *column.layers, *row.layers, *_exceptions(row, column)]
        case: dict[str, Any] = reduce(laid_over, (layer for _, layer in layers), {})
        case.pop("columns", None)
        reading = _reading(document, {k: case.pop(k) for k in Reading.model_fields if k in case}, layers)
        if case not in cases:
            cases.append(case)
            _locate(document, ("cases", len(cases) - 1), layers)
        cells[row.label, column.label] = Cell(row.label, column.label, value, cases.index(case), reading)
    if not cases:
        raise _wrong(document, ("table",), f"{PUBLISHED} has a number for none of its cells")
    tree["cases"] = cases
    shown = [
        cells.get((row, column), Cell(row, column, value))
        for row, column in product(published.rows, published.columns)
        if (value := published.value(row, column)) != "-"
    ]
    by_rows = any("algorithm" in layer for row in rows for _, layer in row.layers)
    return Table(published, tuple(shown), str(about.get("note", "")), _groups(rows if by_rows else columns), by_rows)


def check(sweep: Sweep) -> None:
    """Refuse a table whose cells are not single experiments but for their seeds."""
    from orchestrator.space import leaves

    found = {
        told(leaf.mark, path, "a table may leave open nothing but the seed; give each value a row or a column"): None
        for variant in sweep.variants()
        for path, leaf in leaves(variant).items()
        if path != "seed" or leaf.kind != "grid"
    }
    if found:
        raise InputError(list(found))


def _published(document: Document, name: Any, path: Path) -> Published:
    """Read one table of the file with the published numbers."""
    if not path.is_file():
        raise _wrong(document, ("table", "published"), f"there is no {path}, which must hold what the paper prints")
    there = parse(load(path), lambda line, column: f"{path}:{line}:{column}")
    tables = there.value if isinstance(there.value, dict) else {}
    if not isinstance(name, str) or name not in tables:
        raise _wrong(
            document, ("table", "published"), f"{path} has no table {short(name)}; {nearest(str(name), tables)}"
        )
    if found := problems(tables[name], Published):
        paths = [(each, (name, *each.path)) for each in found]
        raise InputError([told(there.place(at, each.key), dotted(at), each.text) for each, at in paths])
    return Published.model_validate(tables[name])


def _lines(document: Document, value: Any, path: Keys) -> list[_Line]:
    """Return the rows or the columns: those of one mapping, or the combinations of several."""
    factors: list[tuple[Keys, Any]] = [(path, value)]
    if isinstance(value, list) and value:
        factors = [((*path, i), factor) for i, factor in enumerate(value)]
    for at, factor in factors:
        if not isinstance(factor, dict) or not factor or not all(isinstance(p, dict) for p in factor.values()):
            text = "must be a mapping of labels to parts of an experiment, or a list of such mappings to be combined"
            raise _wrong(document, at, f"{text}, not {short(factor)}")
    if (count := math.prod(len(factor) for _, factor in factors)) > MOST:
        raise _wrong(document, path, f"{count:,} combinations; at most {MOST:,} are possible")
    chosen = product(*([((*at, label), label, part) for label, part in factor.items()] for at, factor in factors))
    return [
        _Line(", ".join(label for _, label, _ in each), tuple(e[1] for e in each), tuple((e[0], e[2]) for e in each))
        for each in chosen
    ]


def _exceptions(row: _Line, column: _Line) -> Iterator[_Layer]:
    """Yield what a row says for this column alone, which goes by its label or one that is part of it."""
    for path, layer in row.layers:
        own = layer.get("columns", {})
        for label in column.names:
            if label in own:
                yield (*path, "columns", label), own[label]


def _reading(document: Document, given: dict[str, Any], layers: list[_Layer]) -> Reading:
    """Check what is to be read, and show a mistake where it stands."""
    if found := problems(given, Reading):
        key = str(found[0].path[0])
        place = next((at for at, layer in reversed(layers) if key in layer), layers[-1][0])
        text = found[0].text if key in given else "is lacking: name what the paper reports"
        raise _wrong(document, (*place, key), text)
    return Reading.model_validate(given)


def _complete(document: Document, published: Published, rows: list[_Line], columns: list[_Line]) -> None:
    """Refuse labels that the paper has not, and numbers of the paper about which nothing is said."""
    for side, lines, labels in (("rows", rows, list(published.rows)), ("columns", columns, list(published.columns))):
        for line in lines:
            if line.label not in labels:
                text = f"the published table has no such label '{line.label}'; {nearest(line.label, labels)}"
                raise _wrong(document, line.layers[-1][0], text)
        have = {line.label for line in lines}
        for label in labels:
            if label not in have and label not in published.left_out:
                text = f"'{label}' is lacking; add it, or say under left_out in {PUBLISHED} why it is not run"
                raise _wrong(document, ("table", side), text)
    known = {label for column in columns for label in column.names}
    for path, layer in (layer for row in rows for layer in row.layers):
        own = layer.get("columns", {})
        if not isinstance(own, dict) or not all(isinstance(part, dict) for part in own.values()):
            raise _wrong(document, (*path, "columns"), "must be a mapping of columns to parts of an experiment")
        if strange := [label for label in own if label not in known]:
            text = f"there is no such column; {nearest(strange[0], known)}"
            raise _wrong(document, (*path, "columns", strange[0]), text)


def _groups(lines: list[_Line]) -> dict[str, tuple[str, ...]]:
    """Group the methods by all labels but the last."""
    groups: dict[str, tuple[str, ...]] = {}
    for line in lines:
        shared = ", ".join(line.parts[:-1])
        groups[shared] = (*groups.get(shared, ()), line.label)
    return groups


def _locate(document: Document, case: Keys, layers: list[_Layer]) -> None:
    """Let what a case says stand where its row and its column say it."""
    document.places[case] = document.places.get(layers[-1][0], ("", ""))
    for path, _ in layers[1:]:
        inside = [at for at in document.places if at[: len(path)] == path and len(at) > len(path)]
        document.places |= {(*case, *at[len(path) :]): document.places[at] for at in inside}


def _wrong(document: Document, path: Keys, text: str) -> InputError:
    return InputError([told(document.place(path, key=True), dotted(path), text)])
