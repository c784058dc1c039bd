"""Pictures that an algorithm gives of itself: numbers with names for what they mean; who draws them decides how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

#: What an algorithm has at hand; a picture keeps lists of floats, with None for what is not finite.
Numbers = Tensor | Sequence[Any]


def _plain(values: Any, shape: tuple[int | None, ...]) -> Any:
    """Return numbers as nested lists of this shape, in which None is any length."""
    values = values.tolist() if isinstance(values, Tensor) else values
    if not shape:
        if values is None or type(values) in (int, float):
            return float(values) if values is not None and math.isfinite(values) else None
        raise ValueError(f"{values!r} is not a number")
    if not isinstance(values, list | tuple) or shape[0] not in (None, len(values)):
        raise ValueError(f"expected {'a list' if shape[0] is None else f'{shape[0]} values'}, not {values!r:.60}")
    return [_plain(value, shape[1:]) for value in values]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What all pictures have: a title, what the axes mean, with units, and which figure of a paper it repeats."""

    title: str
    x: str
    y: str
    note: str = ""

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Heatmap(Picture):
    """A matrix as colours, values[row][column]; `colour` says what a value is."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Numbers
    colour: str

    def __post_init__(self) -> None:
        rows, columns = [str(r) for r in self.rows], [str(c) for c in self.columns]
        self._keep(rows=rows, columns=columns, values=_plain(self.values, (len(rows), len(columns))))


@dataclass(frozen=True, kw_only=True)
class Lines(Picture):
    """A curve for each series, over the numbers `at`."""

    at: Numbers
    series: Mapping[str, Numbers]

    def __post_init__(self) -> None:
        at = _plain(self.at, (None,))
        self._keep(at=at, series={str(k): _plain(v, (len(at),)) for k, v in self.series.items()})


@dataclass(frozen=True, kw_only=True)
class Bars(Picture):
    """A bar for each series, side by side in each group."""

    groups: Sequence[str]
    series: Mapping[str, Numbers]

    def __post_init__(self) -> None:
        groups = [str(g) for g in self.groups]
        self._keep(groups=groups, series={str(k): _plain(v, (len(groups),)) for k, v in self.series.items()})


@dataclass(frozen=True, kw_only=True)
class Points(Picture):
    """A cloud for each series: a list of pairs (x, y)."""

    series: Mapping[str, Numbers]

    def __post_init__(self) -> None:
        self._keep(series={str(k): _plain(v, (None, 2)) for k, v in self.series.items()})


def from_json(data: Any) -> Picture:
    """Return the picture that was written as JSON."""
    kinds = {kind.__name__: kind for kind in (Heatmap, Lines, Bars, Points)}
    if not isinstance(data, dict) or data.get("kind") not in kinds:
        raise ValueError(f"not a picture: 'kind' must be one of {', '.join(kinds)}")
    try:
        return kinds[data["kind"]](**{key: value for key, value in data.items() if key != "kind"})
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a {data['kind']}: {error}") from None
