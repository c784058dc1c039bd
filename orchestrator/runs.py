"""What run directories tell, as far as they can be read: what is missing is noted, and the rest is shown."""

from __future__ import annotations

import csv
import json
import math
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from orchestrator.summary import SCHEMA, Configuration, configurations, extremes, reused

Counts = np.ndarray[Any, np.dtype[np.int64]]
Row = dict[str, float | None]

#: Parts of an experiment that tell neither methods nor their settings apart.
INCIDENTAL = "seed", "cluster", "failures"


class _Yaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads sweeps too: a leaf that is left open is None."""


_Yaml.add_multi_constructor("!", lambda *_: None)


class NothingHere(ValueError):
    """A directory holds nothing of ours; says which, and what to give instead."""


class Notes(list[str]):
    """What is missing from a directory, in words."""

    def json(self, path: Path) -> dict[str, Any]:
        """Return the mapping that a JSON file holds, or an empty one and a note."""
        found = self._read(path, json.loads)
        return found if isinstance(found, dict) else {}

    def yaml(self, path: Path) -> dict[str, Any]:
        """Return the mapping that a YAML file holds, or an empty one and a note."""
        found = self._read(path, lambda text: _Yaml(text).get_single_data())
        return found if isinstance(found, dict) else {}

    def text(self, path: Path) -> str:
        """Return a file's text, or nothing and a note."""
        return str(self._read(path, str) or "")

    def _read(self, path: Path, parse: Any) -> Any:
        try:
            found = parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self.append(f"{path.name} is missing")
        except OSError as error:
            return self.append(f"{path.name} cannot be read: {error.strerror}")
        except (ValueError, RecursionError, yaml.YAMLError):
            return self.append(f"{path.name} is damaged")
        if not isinstance(found, dict | str):
            return self.append(f"{path.name} is damaged")
        return found


@dataclass(frozen=True, eq=False)
class Run:
    """One trial's directory."""

    path: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    counts: Counts | None = None  #: training samples [client, class]
    per_class: Sequence[Row] = ()  #: of the last phase that has ended
    per_client: Sequence[Row] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)  #: what the algorithm has drawn of itself, as JSON
    examples: Mapping[str, Any] = field(default_factory=dict)  #: segmented images of the last phase that has some
    notes: Notes = field(default_factory=Notes)

    @property
    def id(self) -> str:
        """The trial's number."""
        return str(self.about.get("id", self.path.name))

    @property
    def name(self) -> str:
        """What the trial is called."""
        return str(self.about.get("name", self.path.name))

    @property
    def status(self) -> str:
        """How it ended, or where it is."""
        return str(self.state.get("status", "UNKNOWN"))

    @property
    def ended(self) -> bool:
        """Whether its results count."""
        return self.status in ("FINISHED", "STOPPED")

    @property
    def error(self) -> str | None:
        """Why it failed."""
        return None if self.state.get("error") is None else str(self.state["error"])

    @property
    def seed(self) -> int | None:
        """The experiment's seed."""
        seed = self.experiment.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def tags(self) -> Mapping[str, Any]:
        """What was noted of it before it began."""
        tags = self.about.get("tags")
        return tags if isinstance(tags, dict) else {}

    @property
    def method(self) -> str:
        """The names of its algorithms."""
        return str(self.tags.get("algorithm", ""))

    @property
    def split(self) -> str | None:
        """A digest of which images each client has, the same for runs on the same split."""
        digests = self.data.get("digest"), self.data.get("split", self.tags.get("data.partition"))
        return None if digests[1] is None else ":".join(str(d) for d in digests if d)

    @property
    def seconds(self) -> float:
        """How long all rounds took, those included that were taken over from another trial."""
        return sum(float(line["metrics"].get("time/round", 0.0)) for line in self.lines)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the rounds in which a metric was measured, and its values."""
        found = [(line["round"], line["metrics"][metric]) for line in self.lines if metric in line["metrics"]]
        return [r for r, _ in found], [v for _, v in found]

    def record(self) -> dict[str, Any]:
        """Return the trial as summary.json describes it, and the run itself."""
        last, best, best_at = extremes(self.lines)
        own = sum(float(line["metrics"].get("time/round", 0.0)) for line in self.lines if "reused" not in line)
        params = self.about.get("params")
        return {
            "id": self.id,
            "name": self.name,
            "params": params if isinstance(params, dict) else {},
            "status": self.status,
            "error": self.error,
            "last": last,
            "best": best,
            "best_at": best_at,
            "seconds": own,
            "fingerprint": self.state.get("fingerprint"),
            "reused": reused(self.lines),
            "run": self,
        }


def is_run(path: Path) -> bool:
    """Tell whether a directory is a trial's."""
    return any((path / name).exists() for name in ("trial.json", "metrics.jsonl", "status.json"))


def read_run(path: Path) -> Run:
    """Read a trial's directory."""
    notes = Notes()
    about, experiment = notes.json(path / "trial.json"), notes.yaml(path / "experiment.yaml")
    begun = (path / "status.json").exists() or (path / "metrics.jsonl").exists()
    run = Run(
        path, about, notes.json(path / "status.json") if begun else {"status": "WAITING"}, experiment, notes=notes
    )
    if not begun:
        notes.append("it has not begun")
        return run
    lines = _log(path / "metrics.jsonl", notes)
    if not run.ended:
        at = f"its pictures show what it had after round {lines[-1]['round']}" if lines else "it has no results"
        notes.append(f"it has not ended (status {run.status}) and is not ranked; {at}")
    artifacts = path / "artifacts"
    per_class, per_client = _tables(artifacts, notes)
    return replace(
        run,
        lines=lines,
        data=notes.json(artifacts / "data.json"),
        counts=_counts(artifacts / "split.npz", notes),
        per_class=per_class,
        per_client=per_client,
        figures={p.stem: notes.json(p) for p in sorted(artifacts.glob("*/portraits/*.json"))},
        examples=_examples(artifacts, notes),
    )


def _log(path: Path, notes: Notes) -> list[dict[str, Any]]:
    """Return the whole and sound lines of a log."""
    try:
        raw = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        notes.append(f"{path.name} is missing" if isinstance(error, FileNotFoundError) else f"{path.name}: {error}")
        return []
    if raw and not raw[-1].endswith(b"\n"):
        notes.append(f"the last line of {path.name} is torn, and left out")
        raw.pop()
    lines = [line for line in map(_line, raw) if line is not None]
    if len(lines) < len(raw):
        notes.append(f"{len(raw) - len(lines)} of {len(raw)} lines of {path.name} are damaged, and left out")
    if not raw:
        notes.append(f"{path.name} has no lines")
    return lines


def _line(raw: bytes) -> dict[str, Any] | None:
    """Return a line of the log, or None if it is not one."""
    try:
        line = json.loads(raw)
        metrics = {str(k): float(v) for k, v in line["metrics"].items() if math.isfinite(v)}
        return line | {"round": int(line["round"]), "phase": str(line["phase"]), "metrics": metrics}  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


def phases(artifacts: Path) -> list[Path]:
    """Return the directories of phases, the last one first."""
    folders = [p for p in artifacts.glob("[0-9]*-*") if p.name.split("-")[0].isdigit()]
    return sorted(folders, key=lambda p: int(p.name.split("-")[0]), reverse=True)


def _tables(artifacts: Path, notes: Notes) -> tuple[list[Row], list[Row]]:
    """Return the tables per class and per client of the last phase that has some."""
    for folder in phases(artifacts):
        found = [_table(folder / f"{name}.csv", notes) for name in ("per_class", "per_client")]
        if any(found):
            return found[0], found[1]
    notes.append("there are no tables per class and per client")
    return [], []


def _table(path: Path, notes: Notes) -> list[Row]:
    """Return a table of numbers; an empty cell is None."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, csv.Error):
        notes.append(f"{path.parent.name}/{path.name} is damaged")
        return []


def _examples(artifacts: Path, notes: Notes) -> dict[str, Any]:
    """Return the segmented images of the last phase that has some; most runs have none."""
    path = next((p for folder in phases(artifacts) if (p := folder / "examples.npz").exists()), None)
    try:
        with np.load(path, allow_pickle=False) if path else nullcontext({}) as arrays:
            wanted = ("images", "truth", "names", "clients", "known") if path else ()
            return {name: arrays[name] for name in {*wanted, *arrays}}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        notes.append("examples.npz is damaged")
        return {}


def _counts(path: Path, notes: Notes) -> Counts | None:
    """Return how many training samples of each class each client has."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            counts = np.asarray(arrays["counts"])
        if counts.ndim == 2 and counts.size and np.issubdtype(counts.dtype, np.integer):
            return counts
        notes.append(f"{path.name} is damaged")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        notes.append(f"{path.name} is damaged")
    return None


@dataclass(frozen=True)
class Source:
    """A directory that was given: a sweep's, or one run's."""

    path: Path
    runs: Sequence[Run]
    metric: str | None = None
    mode: str = "max"
    text: str = ""  #: sweep.yaml, or the run's experiment.yaml
    environment: Mapping[str, Any] = field(default_factory=dict)  #: versions, as the sweep wrote them down
    notes: Notes = field(default_factory=Notes)

    @property
    def repeat(self) -> Path:
        """The file that runs it again."""
        return self.path / ("sweep.yaml" if (self.path / "trials").exists() else "experiment.yaml")


def read_source(path: Path) -> Source:
    """Read a sweep's directory, or that of a single run."""
    if not path.is_dir():
        raise NothingHere(f"{path} is not a directory; give that of a sweep (runs/NAME) or of a trial in it")
    path = path.resolve()
    if not (path / "trials").is_dir():
        if not is_run(path):
            raise NothingHere(
                f"{path} is neither a sweep's directory (it has no trials/) nor a trial's (it has no metrics.jsonl); "
                "give the directory that `python -m orchestrator.tune` named at its end"
            )
        text = Notes().text(path / "experiment.yaml")
        return Source(path, [read_run(path)], text=text, environment=_environment(path.parent.parent))
    notes, summary = Notes(), {}
    if (path / "summary.json").exists():
        summary = notes.json(path / "summary.json")
    else:
        words = ["python", "-m", "orchestrator.tune", "--resume", "--name", path.name, "--out", str(path.parent)]
        again = shlex.join(words)
        notes.append(f"summary.json is missing, so the sweep has not ended; to go on with it, type {again}")
    if summary and summary.get("schema") != SCHEMA:
        notes.append(f"summary.json has schema {summary.get('schema')}, this version reads {SCHEMA}; it is not used")
        summary = {}
    runs = [read_run(p) for p in sorted((path / "trials").iterdir()) if p.is_dir()]
    lost = {str(t.get("id")) for t in summary.get("trials", ()) if isinstance(t, dict)} - {
        run.path.name for run in runs
    }
    notes += [f"trials/{id} is missing, though summary.json knows it" for id in sorted(lost)]
    if not runs:
        notes.append("there are no trials; run the sweep with `python -m orchestrator.tune`")
    text = notes.text(path / "sweep.yaml")
    search = summary or Notes().yaml(path / "sweep.yaml").get("search")
    search = search if isinstance(search, dict) else {}
    metric = search.get("metric")
    mode = "min" if search.get("mode") == "min" else "max"
    return Source(path, runs, metric if isinstance(metric, str) else None, mode, text, _environment(path), notes)


def _environment(sweep: Path) -> dict[str, Any]:
    """Return the versions that a sweep has written down."""
    tags = Notes().json(sweep / "mlflow.json").get("tags")
    return tags if isinstance(tags, dict) else {}


def compared(sources: Sequence[Source]) -> list[Configuration]:
    """Group runs that differ only in their seed; of several directories by the whole experiment."""
    records = []
    for source in sources:
        for run in source.runs:
            record = run.record()
            if len(sources) > 1:
                kept = {k: v for k, v in run.experiment.items() if k not in INCIDENTAL}
                record["params"] = {"experiment": kept or str(run.path), "seed": run.seed}
            records.append(record)
    found = configurations({"trials": records})
    names = [c.name for c in found]
    return [c if names.count(c.name) == 1 else replace(c, name=f"{c.name} ({_where(c)})") for c in found]


def _where(configuration: Configuration) -> str:
    """Tell configurations of the same name apart by where they lie."""
    path: Path = configuration.trials[0]["run"].path
    sweep = path.parent.parent.name if path.parent.name == "trials" else path.parent.name
    return f"{sweep}/{path.name}"


def runs_of(configuration: Configuration) -> list[Run]:
    """Return the runs of a configuration that have ended, one for each seed."""
    return [t["run"] for t in configuration.trials if t["run"].ended]
