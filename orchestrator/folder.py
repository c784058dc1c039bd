"""A sweep's directory: sweep.yaml, and a directory for each trial; how it is made, read and extended."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.checkpoint import RunDirectory, status_of, write, write_json
from orchestrator.data import Dataset
from orchestrator.experiment import dump, read_back
from orchestrator.prefixes import Cache, prefixes, sources, versions
from orchestrator.space import Trial, leaves, trials
from orchestrator.sweep_file import Search, Sweep, dump_sweep, filled_in, read
from orchestrator.yaml_file import InputError

ENDED = ("FINISHED", "STOPPED")
NAME = re.compile(r"[\w][\w.+-]{0,99}")


def stem(file: Path | None) -> str:
    """Return the file's name as the beginning of a directory's."""
    return "quickstart" if file is None else re.sub(r"[^\w.+-]", "_", file.stem).lstrip(".+-")[:90] or "sweep"


def free(out: Path, stem: str) -> str:
    """Return the first of stem, stem-2, stem-3 and so on after those that exist."""
    taken = _taken(out, stem)
    return f"{stem}-{taken[-1] + 1}" if taken else stem


def newest(out: Path, stem: str) -> str:
    """Return the last of stem, stem-2, stem-3 and so on that exists."""
    taken = _taken(out, stem)
    return f"{stem}-{taken[-1]}" if taken and taken[-1] > 1 else stem


def _taken(out: Path, stem: str) -> list[int]:
    found = (re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", p.name) for p in out.iterdir()) if out.is_dir() else ()
    return sorted(int(m[1] or 1) for m in found if m)


def reopen(folder: Path, flag: str, overrides: Sequence[str]) -> Sweep:
    """Read the sweep of an existing directory."""
    path = folder / "sweep.yaml"
    if not path.is_file():
        raise InputError([f"{flag}: there is no sweep in {folder}; give the right --name and --out"])
    sweep = read(path, None, overrides)
    if overrides or dump_sweep(sweep) != path.read_text(encoding="utf-8"):
        raise InputError([f"{flag}: a sweep is continued as it was; drop --set and --preset, or start a new one"])
    return sweep


def known(folder: Path) -> list[Trial]:
    """Return the trials of a directory as they stand there."""
    found = []
    for path in sorted((folder / "trials").iterdir()):
        if (path / "trial.json").is_file():
            about = json.loads((path / "trial.json").read_text(encoding="utf-8"))
            found.append(Trial(path.name, about["params"], read_back(path), about["name"]))
    return found


def create(folder: Path, trial: Trial, dataset: Dataset, partition: str) -> None:
    """Make a trial's directory, unless it is there."""
    path, e = folder / "trials" / trial.id, trial.experiment
    if (path / "trial.json").exists():
        return
    path.mkdir(parents=True, exist_ok=True)
    tags = {
        "algorithm": "+".join(part.name for part in e.chain().parts),
        "data": e.data.name,
        "data.digest": dataset.digest,
        "data.partition": partition,
        "imbalance": f"{e.data.imbalance:g}",
        "alpha": f"{e.data.alpha:g}",
        "clients": str(e.data.clients),
        "model": str(e.model.name),
        "seed": str(e.seed),
    }
    data = {"name": dataset.name, "digest": dataset.digest, "source": e.data.root or e.data.name}
    write(path / "experiment.yaml", dump(e).encode())
    write_json(
        path / "trial.json",
        {"id": trial.id, "name": trial.name, "params": trial.params, "tags": tags, "data": data}
        | {"experiment": e.model_dump(mode="json")},
    )


def commit(folder: Path, sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Write down the code that runs and sweep.yaml, last of all: a directory with it is complete and may be resumed."""
    path = folder / "code.json"
    begun = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, {**code_of(trials), **begun})
    write(folder / "sweep.yaml", dump_sweep(filled_in(sweep)).encode())


def code_of(trials: Sequence[Trial]) -> dict[str, str]:
    """Return what computes the trials: source files by their hash, libraries by their version."""
    kinds = {type(part) for trial in trials for part in trial.experiment.chain().parts}
    return {**versions(), **sources(sorted(kinds, key=lambda kind: kind.__name__))}


def differences(folder: Path, trials: Sequence[Trial], file: Path | None) -> list[str]:
    """Say in what a resumed run would differ from the one that was begun: its code, its trials, the file it is of."""
    found, path = [], folder / "code.json"
    now, then = code_of(trials), json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            found.append(f"{name} has changed" if "/" in name else f"{name} was {then[name]}, and is {now[name]}")
    for trial in trials:
        about = json.loads((folder / "trials" / trial.id / "trial.json").read_text(encoding="utf-8"))
        begun, now_is = about.get("experiment", {}), trial.experiment.model_dump(mode="json")
        found += _changes(f"trials/{trial.id}/experiment.yaml", begun, now_is) if begun else []
    if file is not None and (given := read(file)).table is None:
        begun, given = read(folder / "sweep.yaml"), filled_in(given)
        one, other = (
            {"search": s.search.model_dump(), "experiment": s.experiment, "cases": s.cases} for s in (begun, given)
        )
        found += _changes(str(file), one, other)
    return found


def _changes(where: str, then: Any, now: Any) -> list[str]:
    one, other = _flat(then), _flat(now)
    names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    return [f"{where}: {name} was {one.get(name)}, and is {other.get(name)}" for name in names]


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by their dotted paths."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {k: v for key, part in tree.items() for k, v in _flat(part, f"{path}.{key}".lstrip(".")).items()}


# Going on with a sweep that has ended ------------------------------------------------------------------------------


def extended(folder: Path, sweep: Sweep, wish: str) -> tuple[Sweep, list[Trial]]:
    """Return the sweep with more rounds or more samples, and all its trials; nothing is written yet."""
    what, _, number = wish.partition("=")
    if what not in ("rounds", "samples") or not re.fullmatch(r"[1-9]\d{0,8}", number):
        raise InputError([f"--extend {wish}: must be rounds=N or samples=N"])
    there, n = known(folder), int(number)
    if what == "samples":
        if not any(leaf.kind not in ("grid", "sample") for v in sweep.variants() for leaf in leaves(v).values()):
            raise InputError([f"--extend {wish}: this sweep draws nothing; its trials are all there"])
        if n <= sweep.search.samples:
            raise InputError([f"--extend {wish}: the sweep has {sweep.search.samples} samples already"])
        sweep = replace(sweep, search=sweep.search.model_copy(update={"samples": n}))
        if sweep.search.searcher == "optuna":
            return sweep, there
        have = {t.experiment.model_dump_json() for t in there}
        new = [t for t in trials(sweep) if t.experiment.model_dump_json() not in have]
        return sweep, there + [replace(t, id=f"{i:04d}") for i, t in enumerate(new, len(there))]
    if any(path == "rounds" for v in sweep.variants() for path in leaves(v)):
        raise InputError([f"--extend {wish}: rounds is open in this sweep; start a new one with other values"])
    if short := [t.id for t in there if t.experiment.rounds >= n]:
        raise InputError([f"--extend {wish}: trial {short[0]} has {there[0].experiment.rounds} rounds already"])
    experiment = sweep.experiment | {"rounds": n}
    cases = tuple(case | {"rounds": n} if "rounds" in case else case for case in sweep.cases)
    longer = [replace(t, experiment=t.experiment.model_copy(update={"rounds": n})) for t in there]
    return replace(sweep, experiment=experiment, cases=cases), longer


def lengthen(folder: Path, trial: Trial, cache: Cache, digest: str) -> bool:
    """Put a trial's results aside under the number of rounds they are of, so that it can be run with more."""
    path = folder / "trials" / trial.id
    before = read_back(path)
    if before.rounds >= trial.experiment.rounds:
        return False  # it has as many already, perhaps since an attempt that was interrupted
    if status_of(path)["status"] == "FINISHED":
        # Its last state is where a longer run of a single phase goes on.
        last, run = prefixes(before, digest)[-1], RunDirectory(path)
        if run.saved_round == last.turn and (loaded := run.load()) is not None:
            cache.publish(run, last, f"{folder.name}/{trial.id}", loaded[0]["asked_progress"])
    old = path / f"rounds-{before.rounds}"
    old.mkdir(exist_ok=True)
    about: dict[str, Any] = json.loads((path / "trial.json").read_text(encoding="utf-8"))
    for name in ("metrics.jsonl", "artifacts", "status.json", "lineage.jsonl"):
        if (path / name).exists():
            (path / name).rename(old / name)
    shutil.copy(path / "experiment.yaml", old / "experiment.yaml")
    shutil.rmtree(path / "checkpoint", ignore_errors=True)
    whole = trial.experiment.model_dump(mode="json")
    write_json(path / "trial.json", about | {"edition": trial.experiment.rounds, "experiment": whole})
    write(path / "experiment.yaml", dump(trial.experiment).encode())
    return True


def scored(folder: Path, search: Search, trial: Trial) -> tuple[bool, float | None]:
    """Return whether a trial has ended, and the last value of the sweep's metric."""
    path = folder / "trials" / trial.id
    status = status_of(path)["status"]
    values = [line["metrics"].get(search.metric) for line in RunDirectory(path).lines()]
    found = [value for value in values if value is not None]
    return status in (*ENDED, "FAILED"), found[-1] if found and status in ENDED else None
