"""Work that runs have in common: the state at the end of a phase, kept under a hash of all that determines it."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import algorithms
from algorithms.base import Algorithm
from orchestrator.checkpoint import CheckpointError, RunDirectory, write_json
from orchestrator.experiment import Experiment
from orchestrator.plan import Turn, plan

FORMAT = 1
LARGEST = 10 * 2**30  #: bytes that the cache may keep; what was used least recently goes first
#: Files that compute something.
ENGINE = (
    "client", "worker", "memo", "augment", "jobs", "uploads", "values", "cohort",
    "driver", "evaluate", "segmentation", "scoring", "gate", "plan", "privacy", "experiment",
)  # fmt: skip
SCORES = ("generic/", "personal/", "validation/", "time/evaluate")  #: metrics that an evaluation adds


@dataclass(frozen=True)
class Prefix:
    """A run up to the end of one of its phases."""

    turn: int  #: how many rounds it has
    rounds: int  #: how many of these are in its last phase
    phase: str
    title: str  #: of the tables at its end
    family: str  #: hash of all that determines it but `rounds`
    scored_by: str  #: hash of what its last evaluation depends on beyond that

    @property
    def key(self) -> str:
        """The name of its directory in the cache."""
        return f"{self.family}/{self.rounds}"


def prefixes(experiment: Experiment, digest: str, device: str = "cpu") -> list[Prefix]:
    """Return the ends of an experiment's phases, in order; `digest` is the data set's."""
    chain, turns, found = experiment.chain().parts, plan(experiment), []
    common = experiment.model_dump(
        mode="json", include={"model", "local", "clients_per_round", "seed", "evaluate", "aggregation"}
    )
    common |= {
        "format": FORMAT,
        "data": experiment.data.model_dump(mode="json", exclude={"root"}) | {"digest": digest},
        "failures": experiment.failures.model_dump(include={"bad_update", "dropout", "stragglers", "timeout"}),
        "threads": experiment.cluster.threads,
        "device": device,
        "experts": sorted({n for part in chain if (n := part.experts) is not None}),  # of their one network
        "versions": versions(),
    }
    for end, turn in enumerate(turns, 1):
        if turn.last:
            before = [(t.name, t.rounds) for t in turns[: end - turn.rounds] if t.last]
            told = [
                _told(part, i, turns[:end], experiment.evaluate.every) for i, part in enumerate(chain[: turn.part + 1])
            ]
            sources = code(tuple(type(part) for part in chain[: turn.part + 1]))
            family = _hash([common, before, turn.name, [known for known, _ in told], sources])
            found.append(Prefix(end, turn.rounds, turn.name, turn.title, family, _hash(told[-1][1])))
    return found


@cache
def versions() -> Mapping[str, str]:
    """Return the libraries on whose versions the bits depend."""
    return {name: version(name) for name in ("torch", "numpy", "scikit-learn")}


def _told(part: Algorithm, i: int, turns: Sequence[Turn], every: int) -> tuple[Any, Any]:
    """Return the hyperparameters on which these turns of a part depend, and those on which their last scores do."""
    own = [turn for turn in turns if turn.part == i]
    begun = {turn.phase.step.__name__ for turn in own}
    scored_before = i < turns[-1].part or any(turn.scores(every) for turn in own[:-1])
    enters = {name: phase for phase, names in part.later.items() for name in names.split()}
    known = {f.name for f in fields(part) if enters.get(f.name) in begun | {None}}
    scoring = {name for name, phase in enters.items() if phase == "predict"}
    return [part.name, _values(part, known | scoring if scored_before else known)], _values(part, scoring)


def _values(part: Algorithm, names: set[str]) -> dict[str, Any]:
    return {name: getattr(part, name) for name in sorted(names)}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def sources(kinds: Sequence[type[Algorithm]]) -> dict[str, str]:
    """Return the files that compute what these algorithms compute, by name and hash."""
    engine = Path(__file__).parent
    files = {Path(inspect.getfile(base)) for kind in kinds for base in kind.__mro__ if issubclass(base, Algorithm)}
    files |= {Path(algorithms.__file__).with_name(f"{name}.py") for name in algorithms.SHARED}
    files |= {engine / f"{name}.py" for name in ENGINE}
    files |= {*(engine / "models").glob("*.py"), *(engine / "data").glob("*.py")}
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


@cache
def code(kinds: tuple[type[Algorithm], ...]) -> str:
    """Return a hash of the source that computes what these algorithms compute."""
    return _hash(sources(kinds))


class Cache:
    """A directory of prefixes that the trials of any sweep leave to one another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def holds(self, prefix: Prefix) -> bool:
        """Tell whether exactly this prefix is there."""
        return (self.folder / prefix.key / "entry.json").is_file()

    def adopt(self, directory: Path, wanted: Sequence[Prefix]) -> bool:
        """Bring a run's directory to the longest beginning that is here; False if it has come as far itself."""
        run = RunDirectory(directory)
        for prefix in reversed(wanted):
            for source in self._candidates(prefix):
                # A shorter run of the last phase is a beginning of it, unless something went by the share of rounds.
                missing = prefix.rounds - int(source.name)
                entry = _entry(source)
                if prefix.turn - missing <= run.saved_round or entry is None or (missing and entry["progress"]):
                    continue
                *lines, last = ({"reused": entry["trial"], **line} for line in RunDirectory(source).lines())
                scored = None
                if stale := bool(missing or entry["scored_by"] != prefix.scored_by):
                    last["metrics"] = {k: v for k, v in last["metrics"].items() if not k.startswith(SCORES)}
                    scored = None if missing else _read(source / "scored" / f"{prefix.scored_by}.json")
                    last["metrics"] |= scored["metrics"] if scored else {}
                run.take_over(source, lines, last, scores_due=stale and not missing and scored is None)
                if scored:
                    run.write_tables(prefix.title, scored["tables"])
                    run.write_portraits(prefix.title, scored["portraits"])
                (source / "entry.json").touch()
                return True
        return False

    def _candidates(self, prefix: Prefix) -> list[Path]:
        family = self.folder / prefix.family
        sizes = (int(p.name) for p in family.iterdir() if p.name.isdecimal()) if family.is_dir() else ()
        return [family / str(n) for n in sorted(sizes, reverse=True) if n <= prefix.rounds]

    def publish(
        self,
        run: RunDirectory,
        prefix: Prefix,
        trial: str,
        progress: bool,
        scored: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep what a run has just saved at the end of a phase; `progress`: whether it went by the share of rounds.

        `scored`: what other settings, by the hash of these, score with it.
        """
        if not self.holds(prefix):
            self._keep(run, prefix, trial, progress)
        if scored and self.holds(prefix):
            (self.folder / prefix.key / "scored").mkdir(exist_ok=True)
            for key, scores in scored.items():
                write_json(self.folder / prefix.key / "scored" / f"{key}.json", scores)
        self.prune()

    def _keep(self, run: RunDirectory, prefix: Prefix, trial: str, progress: bool) -> None:
        target = self.folder / prefix.key
        making = target.with_name(f".{target.name}.{time.time_ns()}")
        run.copy_to(making)
        entry = {"trial": trial, "phase": prefix.phase, "scored_by": prefix.scored_by, "progress": progress}
        write_json(making / "entry.json", entry)
        try:
            making.rename(target)
        except OSError:  # somebody else was faster
            shutil.rmtree(making, ignore_errors=True)

    def lease(self, prefix: Prefix) -> FileLock | None:
        """Return the right to compute a prefix, or None while somebody else has it."""
        folder = self.folder / prefix.family
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{prefix.rounds}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None
        return lock

    def prune(self, most: int = LARGEST) -> None:
        """Remove what was used least recently until the rest is small enough."""
        entries = [(p.stat().st_mtime, p.parent) for p in self.folder.glob("*/*/entry.json")]
        total = 0
        for _, folder in sorted(entries, reverse=True):
            total += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if total > most:
                shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> Any:
    """Return what a file of the cache says; None if it is not there or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _entry(folder: Path) -> Mapping[str, Any] | None:
    """Return what is known of a prefix; nothing if it is not whole."""
    try:
        entry: Mapping[str, Any] = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
        RunDirectory(folder).load()
        return entry
    except (OSError, ValueError, CheckpointError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
