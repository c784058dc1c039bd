"""`python -m orchestrator.report DIR...`: what sweeps and runs have found, as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import base64
import hashlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from orchestrator.comparison import BY_SIZE, leaderboards
from orchestrator.findings import (
    Report,
    board_rows,
    claim_rows,
    collect,
    conclusion,
    headline,
    missing,
    ranking_rows,
    trial_rows,
    unranked,
)
from orchestrator.runs import NothingHere, Source, runs_of

if TYPE_CHECKING:
    from orchestrator.pictures.run import Drawn

RUNS = 3  #: of so many of the best configurations, and of the reference, a run is shown in pictures

#: Sorts a table by the column whose head is clicked: by numbers if they are some, else by words.
SORT = """
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex, up = head.ariaSort !== "ascending";
  const word = row => row.cells[at].textContent.trim();
  const key = row => isNaN(parseFloat(word(row))) ? word(row) : parseFloat(word(row));
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  const rows = [...body.rows].sort((a, b) => order(key(a), key(b)) * (up ? 1 : -1));
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  body.append(...rows);
});
"""


# The file ------------------------------------------------------------------------------------------------------------


class Embedded(NamedTuple):
    """A picture for the page: as an image of its own it can neither run anything nor load anything."""

    name: str
    caption: str
    svg: str

    @property
    def src(self) -> str:
        """The address that holds the whole picture."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


def embedded(pictures: Iterable[Drawn]) -> list[Embedded]:
    """Return pictures for the page."""
    from orchestrator.pictures.style import svg

    return [Embedded(picture.name, picture.caption, svg(picture.figure)) for picture in pictures]


def shown_runs(report: Report) -> list[dict[str, Any]]:
    """Return a run of each of the best configurations, and of the reference, with its pictures."""
    from orchestrator.pictures.comparison import same_split
    from orchestrator.pictures.run import pictures

    chosen = list(report.configurations[:RUNS])
    if report.reference is not None and report.reference not in chosen:
        chosen.append(report.reference)
    found, splits = [], set[str | None]()
    for configuration in chosen:
        runs = runs_of(configuration) or [t["run"] for t in configuration.trials if t["run"].lines]
        if not runs:
            continue
        run = runs[0]
        drawn = pictures(run, None if report.reference is None else same_split(report.reference, run))
        if run.split in splits:  # what it learns from has been shown
            drawn = [p for p in drawn if p.name not in ("labels", "long_tail")]
        splits.add(run.split)
        found.append({"name": run.name, "path": run.path, "status": run.status, "pictures": embedded(drawn)})
    return found


def compared_pictures(report: Report) -> list[Embedded]:
    """Return the pictures that compare configurations."""
    if report.reference is None or len(report.able) < 2:
        return []
    from orchestrator.pictures.comparison import Comparison, pictures

    able = report.able
    reference = report.reference if report.reference in able else able[-1]
    return embedded(pictures(Comparison(able, report.metric, report.mode, reference, report.targets, report.given)))


def html(report: Report, comparison: Sequence[Embedded]) -> str:
    """Return the report as one page that needs nothing else."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    files = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    runs = shown_runs(report)  # first: drawing may find more that is damaged
    return page.get_template("report.html.j2").render(
        title=" and ".join(source.path.resolve().name for source in report.sources),
        report=report,
        headline=headline(report),
        conclusion=conclusion(report),
        missing=missing(report),
        ranking=ranking_rows(report),
        boards=[(board, board_rows(board)) for board in leaderboards(report.configurations)],
        by_size=[(board, board_rows(board)) for board in leaderboards(report.configurations, BY_SIZE)],
        unranked=unranked(report),
        pictures=comparison,
        runs=runs,
        trials=trial_rows(report),
        repeat=[(source, _command(source)) for source in report.sources],
        script=SORT,
        script_hash=base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode(),
    )


def _command(source: Source) -> str:
    return f"python -m orchestrator.tune {shlex.quote(str(source.repeat))}"


def write_report(report: Report, out: Path | None = None) -> Path:
    """Write the report and return where: into the first directory with its pictures, or to the given file alone."""
    path = out or report.sources[0].path / "report.html"
    if not path.parent.is_dir():
        raise NothingHere(f"cannot write {path}: there is no directory {path.parent}; choose another place with --out")
    comparison = compared_pictures(report)
    try:
        path.write_text(html(report, comparison), encoding="utf-8", errors="replace")
        for picture in () if out else comparison:
            folder = path.parent / "pictures"
            folder.mkdir(exist_ok=True)
            (folder / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")
    except OSError as error:
        raise NothingHere(f"cannot write {path}: {error.strerror}; choose another place with --out") from None
    return path


def tables(report: Report) -> list[Table]:
    """Return the leaderboards for a terminal."""
    found = []
    for board in leaderboards(report.configurations):
        table = Table(title=board.conditions, title_justify="left")
        for column in ("mean rank", "name", *board.metrics):
            table.add_column(column, justify="left" if column == "name" else "right")
        for row in board_rows(board):
            cells = (
                f"[bold]{v} ({rank})[/]" if top else f"{v} ({rank})" if rank else v for v, rank, top in row["cells"]
            )
            table.add_row(row["mean_rank"], row["name"].replace("[", r"\["), *cells)
        found.append(table)
    return found


def claims(report: Report) -> Table:
    """Return for a terminal what can be claimed of the reference: paired tests against every other configuration."""
    rows = claim_rows(report)
    if report.reference is None or not rows:
        raise NothingHere("nothing to test: no two configurations have been run with one seed on one split")
    title = f"{report.reference.name} has {report.metric} {report.reference.show(report.metric)}, and is better than"
    caption = "each p-value stands for itself: choose what to claim before looking, or correct for how many you look at"
    table = Table(title=title.replace("[", r"\["), title_justify="left", caption=caption, caption_justify="left")
    for column in ("name", report.metric, "by", "in pairs", "p, by seed", "p, by client"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.report",
        description="Write one self-contained HTML file about a sweep or a run, or comparing several of them.",
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a sweep's directory, or a trial's")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the first DIR)")
    parser.add_argument("--metric", help="what to rank by (default: the sweep's metric)")
    parser.add_argument("--reference", metavar="NAME", help="configuration or trial that others are measured against")
    parser.add_argument(
        "--target", type=float, action="append", default=[], help="count the rounds to this value; repeatable"
    )
    parser.add_argument("--leaderboard", action="store_true", help="print the ranks under all metrics, write nothing")
    parser.add_argument("--tests", action="store_true", help="print paired tests of the reference, write nothing")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        report = collect(options.directories, options.metric, options.reference, options.target)
        if options.tests:
            console.print(claims(report))
            return 0
        if options.leaderboard:
            for table in tables(report):
                console.print(table)
            for line in unranked(report) or ([] if report.able else ["there is nothing to rank yet"]):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            return 0
        path = write_report(report, options.out)
    except NothingHere as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    for note in missing(report):
        console.print(f"missing: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"open in a browser: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
