"""`python -m orchestrator.table FILE`: run a paper's table, and show our numbers beside the published ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator import folder, preflight, tune
from orchestrator.checkpoint import status_of, write, write_json
from orchestrator.data import DataError, load
from orchestrator.experiment import Experiment
from orchestrator.space import Trial
from orchestrator.space import trials as expand
from orchestrator.sweep_file import Sweep, dump_sweep, filled_in, read
from orchestrator.table_file import Cell, Table
from orchestrator.table_report import Report, outcome
from orchestrator.yaml_file import InputError, Open

FEWEST = 5  #: rounds of a phase, however small the budget


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.table",
        description="Run what a paper's table lacks, and show our numbers beside the published ones.",
    )
    parser.add_argument("file", type=tune.path, help="a sweep with a table, as in search_spaces/tables")
    parser.add_argument("--preset", metavar="NAME", help="one of the file's presets: other settings than the paper's")
    parser.add_argument("--budget", type=_share, default=1.0, metavar="F", help="this share of rounds and seeds only")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="run cells with this in row or column; repeatable"
    )
    parser.add_argument("--show", action="store_true", help="run nothing; show and write what is there")
    tune.add_where(parser)
    return parser


def _share(text: str) -> float:
    """Read a share of the work."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = arguments().parse_args(argv)
    try:
        return run(options, Console(width=None if sys.stdout.isatty() else 160))
    except (InputError, DataError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the trials that are lacking and whose data are here, then show and write the table."""
    whole = read(options.file, preset=options.preset)
    if whole.table is None:
        text = "has no key 'table' beside 'experiment'; run it by python -m orchestrator.tune"
        raise InputError([f"{options.file}: {text}"])
    sweep = reduced(whole, options.budget)
    name = folder.stem(options.file) + (f"-{options.preset}" if options.preset else "")
    name += f"-budget{options.budget:g}" if options.budget < 1 else ""
    directory, trials = options.out.resolve() / name, expand(sweep)
    _same(directory, sweep)
    asked = _wanted(sweep, trials, options.only)
    if options.dry_run:
        some, checked = [trial for trial in trials if trial.id in asked], preflight.Checked(dry=True)
        for trial in some:
            checked.check(trial)
        preflight.show(some, sweep.search, options, checked, console)
        return 0
    missing = _missing(trials, set() if options.show else {data_of(t.experiment) for t in trials if t.id in asked})
    code = 0
    if not options.show:
        here = [trial for trial in trials if trial.id in asked and data_of(trial.experiment) not in missing]
        code = _run(directory, sweep, here, options)
        if code == 2:
            return code
    found = report(directory, sweep, missing, *_otherwise(options, whole, trials))
    if directory.is_dir() or not options.show:
        directory.mkdir(parents=True, exist_ok=True)
        write(directory / "table.md", found.markdown().encode())
        write_json(directory / "table.json", found.record())
        if picture := found.picture():
            (directory / "pictures").mkdir(exist_ok=True)
            write(directory / "pictures" / "table.svg", picture.encode())
    for line in found.caption:
        console.print(line, markup=False, highlight=False)
    console.print(found.rich(), highlight=False)
    for line in found.tail():
        console.print(line, markup=False, highlight=False)
    if directory.is_dir():
        console.print(f"written: {directory}/table.md and table.json", markup=False, highlight=False, soft_wrap=True)
    return code


# A smaller budget -----------------------------------------------------------------------------------------------------


def reduced(sweep: Sweep, budget: float) -> Sweep:
    """Return the sweep with a share of its rounds and its seeds; what is counted in rounds keeps its proportions."""
    if budget == 1:
        return sweep
    experiment = _reduced({"rounds": Experiment().rounds, **sweep.experiment}, budget)
    return replace(sweep, experiment=experiment, cases=tuple(_reduced(case, budget) for case in sweep.cases))


def _reduced(tree: Mapping[str, Any], budget: float) -> dict[str, Any]:
    """Scale every number of rounds in a part of an experiment, those of algorithms too, and the list of seeds."""

    def fewer(number: Any, least: int = 1) -> int:
        return min(int(number), max(least, round(int(number) * budget)))

    tree = dict(tree)
    if "rounds" in tree:
        tree["rounds"] = fewer(tree["rounds"], FEWEST)
    if isinstance(seeds := tree.get("seed"), Open):
        tree["seed"] = replace(seeds, values=seeds.values[: fewer(len(seeds.values))])
    if every := (tree.get("evaluate") or {}).get("every"):
        tree["evaluate"] = tree["evaluate"] | {"every": fewer(every)}
    if schedule := (tree.get("local") or {}).get("schedule"):
        at, every = schedule.get("at"), schedule.get("every")
        scaled = ({"at": [*map(fewer, at)]} if at else {}) | ({"every": fewer(every)} if every else {})
        tree["local"] = tree["local"] | {"schedule": schedule | scaled}
    if "algorithm" in tree:
        tree["algorithm"] = [
            {name: knobs | ({"rounds": fewer(knobs["rounds"], FEWEST)} if "rounds" in knobs else {})}
            for entry in tree["algorithm"]
            for name, knobs in entry.items()
        ]
    return tree


def _otherwise(options: argparse.Namespace, whole: Sweep, less: Sequence[Trial]) -> tuple[str, str]:
    """Say in a word and in a sentence how settings are not the paper's; nothing where they are."""
    words, said = [], []
    if options.preset:
        words, said = ["other settings"], [f"Preset {options.preset}, not the paper's settings"]
    if options.budget < 1:
        more = expand(whole)
        rounds = {f"{b.experiment.rounds} of {a.experiment.rounds}" for a, b in _paired(more, less)}
        seeds = [len({trial.experiment.seed for trial in trials}) for trials in (less, more)]
        words.append("reduced budget")
        of = f"{', '.join(sorted(rounds))} rounds and {seeds[0]} of {seeds[1]} seeds"
        said.append(f"Reduced budget {options.budget:g}: {of}")
    return ", ".join(words), f"{'; '.join(said)}, so no cell claims to reproduce anything." if said else ""


def _paired(whole: Sequence[Trial], less: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Return the trials of the smaller sweep, each beside the one that it stands for."""
    at = {_place(trial): trial for trial in whole}
    return [(at[_place(trial)], trial) for trial in less if _place(trial) in at]


def _place(trial: Trial) -> tuple[Any, Any]:
    return trial.params.get("case"), trial.params.get("seed")


# Running --------------------------------------------------------------------------------------------------------------


def trials_of(sweep: Sweep, trials: Sequence[Trial]) -> list[tuple[Cell, list[Trial]]]:
    """Return the trials of every cell; a cell that is not run has none, and several may share some."""
    assert isinstance(sweep.table, Table)
    known = {trial.experiment.model_dump_json(): trial for trial in trials}
    of = [[known[trial.experiment.model_dump_json()] for trial in expand(variant)] for variant in sweep.variants()]
    return [(cell, [] if cell.case is None else of[cell.case]) for cell in sweep.table.cells]


def _wanted(sweep: Sweep, trials: Sequence[Trial], only: Sequence[str]) -> set[str]:
    """Return the trials of the cells whose row or column holds each of the texts."""
    cells = [(f"{cell.row}\n{cell.column}", own) for cell, own in trials_of(sweep, trials)]
    for text in only:
        if not (cells := [(name, own) for name, own in cells if text in name]):
            raise InputError([f"--only {text}: no row or column that is left has this in its name"])
    return {trial.id for _, own in cells for trial in own}


def data_of(experiment: Experiment) -> tuple[str, str | None]:
    """Return what a data set goes by."""
    return experiment.data.name, experiment.data.root


def _missing(trials: Sequence[Trial], wanted: Collection[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Return the data sets that are not here, and what to do about it; those that are wanted may be downloaded."""
    found = {}
    for name, root in dict.fromkeys(data_of(trial.experiment) for trial in trials):
        try:
            load(name, root, download=(name, root) in wanted)
        except DataError as error:
            found[name, root] = str(error)
    return found


def _same(directory: Path, sweep: Sweep) -> None:
    """Refuse a directory that holds something else."""
    path = directory / "sweep.yaml"
    # Read again, so that a key which it was written without has its default.
    if path.is_file() and dump_sweep(filled_in(read(path))) != dump_sweep(filled_in(sweep)):
        raise InputError([f"{directory} holds this table with other settings; give another --out, or move it away"])


def _run(directory: Path, sweep: Sweep, trials: Sequence[Trial], options: argparse.Namespace) -> int:
    """Bring the directory to hold these trials, and let the sweep be continued."""
    checked, left = preflight.Checked(), False
    for trial in trials:
        path = directory / "trials" / trial.id
        if not path.is_dir() or status_of(path)["status"] not in folder.ENDED:
            checked.check(trial)
            left = True
    if not left:
        return 0
    (directory / "trials").mkdir(parents=True, exist_ok=True)
    for trial in trials:
        if not (directory / "trials" / trial.id / "trial.json").exists():
            folder.create(directory, trial, checked.dataset(trial.experiment), checked.partition(trial.experiment))
    folder.commit(directory, sweep, trials)
    resume = tune.arguments().parse_args([str(options.file), "--resume", "--name", directory.name])
    return tune.execute(argparse.Namespace(**vars(resume) | vars(options)))


def report(
    directory: Path,
    sweep: Sweep,
    missing: Mapping[tuple[str, str | None], str],
    otherwise: str = "",
    settings: str = "",
) -> Report:
    """Read what is there of every cell."""
    assert isinstance(sweep.table, Table)
    outcomes = []
    for cell, some in trials_of(sweep, expand(sweep)):
        own = {trial.id: directory / "trials" / trial.id for trial in some}
        reasons = [missing[data] for trial in some if (data := data_of(trial.experiment)) in missing]
        seeds = {trial.id: trial.experiment.seed for trial in some}
        outcomes.append(outcome(cell, sweep.table.published, own, (reasons or [""])[0], otherwise, seeds))
    return Report(sweep.table, tuple(outcomes), settings)


if __name__ == "__main__":
    sys.exit(main())
