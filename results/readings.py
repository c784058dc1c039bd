"""`python results/readings.py DIR`: the cells of a table under other readings of "accuracy", from what was kept of it.

A client's accuracy is the mean over its classes, each on all test images of the class. What may count is every class
that it owns, only those of which it has at least so many training images, or each as often as it has training images;
and its model may choose among all classes or among its own.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, float]

READINGS: dict[str, Callable[[Row], float]] = {
    "owned": lambda row: 1.0,
    "at least 2": lambda row: float(row["train"] >= 2),
    "at least 5": lambda row: float(row["train"] >= 5),
    "at least 10": lambda row: float(row["train"] >= 10),
    "as trained": lambda row: row["train"],
}


def rows_of(trial: Path) -> list[Row]:
    """Return a row for each class of each client, as the last phase of a trial left it."""
    table = max(trial.glob("artifacts/*/per_client_class.csv"))
    with table.open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def accuracy(rows: list[Row], weight: Callable[[Row], float], column: str) -> float:
    """Return the mean over clients of their weighted mean over classes, in percent."""
    hits, weights = defaultdict[float, float](float), defaultdict[float, float](float)
    for row in rows:
        hits[row["client"]] += weight(row) * row[column]
        weights[row["client"]] += weight(row)
    return 100 * mean(hits[k] / weights[k] for k in weights if weights[k])


def main() -> None:
    """Print a table for each column of the paper's."""
    folder = Path(sys.argv[1])
    cells: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())["cells"]
    readings = [(f"{name}{tail}", weight, column) for tail, column in (("", "acc"), (", own", "acc_masked"))
                for name, weight in READINGS.items()]  # fmt: skip
    for place in dict.fromkeys(cell["column"] for cell in cells if cell["trials"]):
        sys.stdout.write(f"\n{place}\n\n| | published | {' | '.join(name for name, *_ in readings)} |\n")
        sys.stdout.write(f"|{'---|' * (len(readings) + 2)}\n")
        for cell in cells:
            if cell["column"] == place and cell["trials"]:
                found = [rows_of(folder / "trials" / id) for id in cell["trials"]]
                ours = (mean(accuracy(rows, weight, column) for rows in found) for _, weight, column in readings)
                sys.stdout.write(f"| {cell['row']} | {cell['published']} | {' | '.join(f'{v:.1f}' for v in ours)} |\n")


if __name__ == "__main__":
    main()
