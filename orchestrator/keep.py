"""`python -m orchestrator.keep DIR/NAME TO`: keep what a sweep has found, without weights, small enough to share."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.checkpoint import status_of, write
from orchestrator.folder import ENDED
from orchestrator.runs import phases
from orchestrator.summary import history

SWEEP = "sweep.yaml", "code.json", "summary.json", "table.md", "table.json"
TRIAL = "experiment.yaml", "trial.json", "status.json", "lineage.jsonl"
ADDED_UP = "time/", "bytes/"


def keep(sweep: Path, to: Path) -> int:
    """Copy what can be read of the trials that have ended; return how many there are.

    Reports and tables read the copy like the sweep itself. A table goes on from a copy of it; a sweep does if its
    trials are put over those of the same sweep begun anew: what has ended is not run again.
    """
    ended = [path for path in sorted((sweep / "trials").iterdir()) if status_of(path)["status"] in ENDED]
    for path in ended:
        target = to / sweep.name / "trials" / path.name
        _copy(path, target, TRIAL)
        _copy(path, target, [str(file.relative_to(path)) for file in _tables(path / "artifacts")])
        lines = "".join(json.dumps(line) + "\n" for line in thinned(history(path)))
        write(target / "metrics.jsonl", lines.encode())
    if ended:
        # Not report.html: it is large, names the places of this machine, and can be written again from the copy.
        pictures = [str(file.relative_to(sweep)) for file in (sweep / "pictures").glob("*.svg")]
        _copy(sweep, to / sweep.name, [*SWEEP, *pictures])
        summary = to / sweep.name / "summary.json"
        if summary.is_file():
            own = _of_no_machine(json.loads(summary.read_text(encoding="utf-8")))
            write(summary, (json.dumps(own, ensure_ascii=False) + "\n").encode())  # without indents, a quarter of it
    return len(ended)


def _tables(artifacts: Path) -> Iterator[Path]:
    """Yield what reports read: numbers of pictures of every phase, and tables of the last phase that has some."""
    tables: list[Path] = []
    for phase in phases(artifacts):
        tables = tables or list(phase.glob("*.csv"))
        yield from phase.rglob("*.json")
    yield from [*tables, *artifacts.glob("*.json")]


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _of_no_machine(summary: dict[str, Any]) -> dict[str, Any]:
    """Leave tracebacks out, which name the places of this machine: why a trial failed is their first line."""
    for trial in summary["trials"]:
        if trial.get("error"):
            trial["error"] = trial["error"].split("\n")[0]
    return summary


def thinned(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of rounds that were scored, each with time and bytes of all rounds since the one before."""
    spent: dict[str, float] = {}
    for i, line in enumerate(lines):
        for key, value in line["metrics"].items():
            if key.startswith(ADDED_UP):
                spent[key] = spent.get(key, 0.0) + value
        if "time/evaluate" in line["metrics"] or i == len(lines) - 1:
            yield {**line, "metrics": {**line["metrics"], **spent}}
            spent = {}


def main() -> int:
    """Run the command; return 1 if there is nothing to keep."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.keep", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR/NAME", help="a sweep's directory")
    parser.add_argument("to", type=Path, metavar="TO", help="where the copy goes, under the same name")
    options = parser.parse_args()
    if not (options.directory / "trials").is_dir():
        parser.error(f"{options.directory} is not a sweep's directory: it has no trials/")
    kept = keep(options.directory.resolve(), options.to)
    target = options.to / options.directory.resolve().name
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 1e6 if kept else 0.0
    said = f"{kept} trials kept in {target} ({size:.1f} MB)" if kept else "no trial has ended yet; nothing is kept"
    sys.stdout.write(f"{said}\n")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
