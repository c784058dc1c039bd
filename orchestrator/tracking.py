"""MLflow as a mirror of the run directory: the files are the truth, one thread copies them."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from orchestrator.spool import Point, SpooledTrial, count_lines, parameters, read_json, valid_name, written_at
from orchestrator.summary import reused

POLL, SLOWEST = 0.5, 15.0  # seconds between two looks at the files; the longest pause after an error
METRICS, ENTRIES = 800, 100  # in one request; MLflow's limits are 100 params, 100 tags, 1000 of everything
NOTE = "mlflow.note.content"
PER_TRIAL = "runs", "offsets", "done"
NOTHING: dict[str, Any] = {"experiment_id": None, "parent": None, "superseded": [], **{name: {} for name in PER_TRIAL}}
ENDS = {"FINISHED": "FINISHED", "STOPPED": "FINISHED", "FAILED": "FAILED", "KILLED": "KILLED"}
DEFAULTS = {
    # One try per request: a POST that is repeated below us can create a run twice; our loop looks before it creates.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def default_uri(out: Path) -> str:
    """Return the tracking URI of the database that lies beside the sweeps of a directory."""
    return f"sqlite:///{out.resolve()}/mlflow.db"


def ui_command(uri: str) -> str | None:
    """Return what to type to see the runs of a database; a server shows them already."""
    if not _is_database(uri):
        return None
    mlflow = "mlflow" if shutil.which("mlflow") else f"{shlex.quote(sys.executable)} -m mlflow"
    store = shlex.quote(public(absolute(uri)))
    return f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {mlflow} ui --backend-store-uri {store} --workers 1 --port 5000"


def prepare(uri: str, artifacts: Path) -> None:
    """Create the sqlite database of a URI exactly once, however many processes ask at the same time."""
    if not uri.startswith("sqlite:///"):
        return
    database = Path(absolute(uri).removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        if database.exists():
            return
        _mlflow()
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        # MLflow cannot repair a database whose making was interrupted: make it aside, then move it in.
        fresh = database.with_name(f"{database.name}.new")
        fresh.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{fresh}", artifacts.resolve().as_uri()).engine.dispose()
        fresh.replace(database)


class Mirror:
    """Copy a sweep's directory to MLflow from one thread; an MLflow that is away delays nothing and loses nothing."""

    def __init__(self, uri: str, sweep_dir: Path, *, experiment: str, tags: Mapping[str, str]) -> None:
        self.uri, self.dir = absolute(uri), sweep_dir.resolve()
        self.last_error: str | None = None
        self._trials: dict[str, SpooledTrial] = {}
        self._client: Any = None
        self._stop = self._ended = False
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._sole = FileLock(self.dir / "mlflow.lock", timeout=0)
        self._thread = threading.Thread(target=self._loop, name="mlflow-mirror", daemon=True)
        old = read_json(self.dir / "mlflow.json")
        self._closed: dict[str, Any] = old.get("closing") or {}  # how an earlier process closed the sweep
        if old.get("tracking_uri") != public(self.uri):  # another store has other ids
            old |= NOTHING
        # A sweep that is resumed stays in the experiment that it began in.
        home = old.get("experiment") or experiment
        given = {"tracking_uri": public(self.uri), "experiment": home, "tags": dict(tags), "closing": None}
        self._record: dict[str, Any] = {"sweep": uuid.uuid4().hex, **NOTHING, **old, **given}
        self.keep_record = True

    def start(self) -> None:
        """Start the thread that does all the work."""
        self._save()
        self._thread.start()

    def watch(self, trial_id: str) -> None:
        """Mirror a trial that starts or resumes."""
        with self._lock:
            trial = self._trials.setdefault(trial_id, SpooledTrial(self.dir / "trials" / trial_id))
            trial.reopen, trial.ended = True, False
        self._wake.set()

    def finish(self, trial_id: str) -> None:
        """Deliver the rest of a trial that has ended: its lines, its files, its status."""
        with self._lock:
            self._trials.setdefault(trial_id, SpooledTrial(self.dir / "trials" / trial_id)).ended = True
        self._wake.set()

    def supersede(self, trial_id: str) -> None:
        """Forget the run of a trial that is run again with more rounds; MLflow keeps it among its deleted ones."""
        runs, offsets, done = ({k: v for k, v in self._record[name].items() if k != trial_id} for name in PER_TRIAL)
        old = [run for run in [self._record["runs"].get(trial_id)] if run]
        self._save(runs=runs, offsets=offsets, done=done, superseded=[*self._record["superseded"], *old])

    def run_id(self, trial_id: str) -> str | None:
        """Return the MLflow run of a trial, once it has one."""
        run: str | None = self._record["runs"].get(trial_id)
        return run

    def page(self) -> str:
        """Return where MLflow shows the sweep, once it is there."""
        server = "http://127.0.0.1:5000" if _is_database(self.uri) else public(self.uri).rstrip("/")
        return f"{server}/#/experiments/{self._record['experiment_id']}/runs?workflowType=machine_learning"

    def owed(self) -> int:
        """Count the metric lines and the endings (of trials and of the sweep) that MLflow does not have yet."""
        owed = int(self._record["closing"] is not None and not self._ended)
        for trial_id, trial in list(self._trials.items()):
            owed += max(0, count_lines(trial.folder) - self._record["offsets"].get(trial_id, 0)) + trial.ended
        return owed

    def close(
        self,
        status: str,
        *,
        summary: Path | None = None,
        note: str | None = None,
        metrics: Mapping[str, float] | None = None,
        timeout: float = 30.0,
    ) -> int:
        """Deliver everything, end the sweep's run, and return how many lines and endings are still owed."""
        self._end(status, os.path.relpath(summary, self.dir) if summary else None, note, metrics or {})
        self._thread.join(timeout)
        self._stop = True
        owed = self.owed()
        self.last_error = (self.last_error or f"not done within {timeout:g} s") if owed else None
        return owed

    def deliver_all(self, status: str, summary: str | None, note: str | None, metrics: Mapping[str, float]) -> None:
        """Bring MLflow up to a directory in which nothing runs any more, from this thread."""
        for path in sorted(self.dir.glob("trials/*/trial.json")):
            self.finish(path.parent.name)
        try:
            with self._sole:
                self._end(status, summary, note, metrics)
                self._deliver(closing=True)
        except Exception as error:
            self.last_error = self._explain(error)

    def _end(self, status: str, summary: str | None, note: str | None, metrics: Mapping[str, float]) -> None:
        """Put on record how the sweep ended (an MLflow that is away hears it later) and end what still runs."""
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        closing = {"status": status, "summary": summary, "note": note, "metrics": finite}
        # Closed again with the same result, it must not add a second point to the charts.
        same = closing == {key: self._closed.get(key) for key in closing}
        self._save(closing={**closing, "time": self._closed["time"] if same else time.time()})
        for trial_id in list(self._trials):
            self.finish(trial_id)
        self._wake.set()

    def _save(self, **changes: Any) -> None:
        """Change the record by replacing its values, so that other threads may read them, and write it."""
        with self._lock:
            self._record |= changes
            if self.keep_record:
                fresh = self.dir / "mlflow.json.new"
                try:
                    fresh.write_text(json.dumps(self._record, indent=1))
                    fresh.replace(self.dir / "mlflow.json")
                except OSError:
                    fresh.unlink(missing_ok=True)
                    raise

    def _loop(self) -> None:
        pause = POLL
        while not self._stop:
            closing = self._record["closing"] is not None
            try:
                self._deliver(closing)
                if closing:
                    break
                pause, self.last_error = POLL, None
            except Exception as error:
                self.last_error = self._explain(error)
                pause = min(2 * pause, 1.0 if closing else SLOWEST)
            self._wake.wait(pause)
            self._wake.clear()
        self._sole.release(force=True)

    def _explain(self, error: Exception) -> str:
        text = " ".join(str(error).replace(self.uri, public(self.uri)).split())
        return f"{type(error).__name__}: {text}"[:300]

    def _deliver(self, closing: bool) -> None:
        """Bring MLflow up to the files, once; raises when something could not be delivered."""
        if self._client is None:
            self._open()
        failed: Exception | None = None
        for trial_id, trial in list(self._trials.items()):
            if self._stop:
                return
            try:
                self._mirror(trial_id, trial)
            except Exception as error:
                if _is_away(error):
                    raise
                failed = error  # what is wrong with one trial must not hold up the others
        if closing and not self._ended:
            self._close()
        if failed:
            raise failed

    def _open(self) -> None:
        """Find or create the experiment and the sweep's own run, and take up what earlier processes left undone."""
        if not self._sole.is_locked:
            self._sole.acquire()  # one writer per sweep, over all processes
        artifacts = self.dir.parent / "mlartifacts"
        prepare(self.uri, artifacts)
        client = _mlflow().MlflowClient(tracking_uri=self.uri)
        name, key = self._record["experiment"], self._record["sweep"]
        found = client.get_experiment_by_name(name)
        location = artifacts.as_uri() if _is_database(self.uri) else None
        # Else MLflow's pages are those for prompts and agents.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        experiment = found.experiment_id if found else client.create_experiment(name, location, kind)
        parent = _find(client, experiment, key)
        if parent is None or parent != self._record["parent"]:  # another store, or ours was emptied: send all again
            self._save(**NOTHING)
        if parent is None:
            tags = {"orchestrator.key": key}
            parent = client.create_run(experiment, written_at(self.dir / "sweep.yaml"), tags, self.dir.name).info.run_id
        self._save(experiment_id=experiment, parent=parent)
        self._log(client, parent, tags=self._record["tags"])
        client.update_run(parent, status="RUNNING")
        for run in self._record["superseded"]:
            client.delete_run(run)
        self._save(superseded=[])
        for path in sorted(self.dir.glob("trials/*/status.json")):
            if read_json(path).get("status") in ENDS and path.parent.name not in self._trials:
                self.finish(path.parent.name)
        self._client = client

    def _mirror(self, trial_id: str, trial: SpooledTrial) -> None:
        ended = trial.ended  # asked before the lines are read: then they are all there
        status, error = self._status(trial) if ended else ("RUNNING", None)
        sent = self._record["offsets"].get(trial_id, 0)
        if not ended or self._record["done"].get(trial_id) != status or sent < count_lines(trial.folder):
            run = self._record["runs"].get(trial_id) or self._describe(trial_id, trial)
            if trial.reopen:
                self._client.update_run(run, status="RUNNING")
                self._log(self._client, run, tags={NOTE: ""})
                self._save(done={key: value for key, value in self._record["done"].items() if key != trial_id})
                trial.reopen = False
            trial.read(sent)
            self._send(trial_id, trial, run)
            if not ended or trial.pending:
                return
            self._finish(trial, run, status, error)
            self._save(done={**self._record["done"], trial_id: status})
        with self._lock:
            if trial.ended:  # else it was resumed meanwhile
                self._trials.pop(trial_id, None)

    def _status(self, trial: SpooledTrial) -> tuple[str, str | None]:
        told = read_json(trial.folder / "status.json")
        if told.get("status") in ENDS:
            return told["status"], told.get("error")
        killed = (self._record["closing"] or {}).get("status") == "KILLED"
        return ("KILLED", None) if killed else ("FAILED", "The trial ended without leaving a status.")

    def _describe(self, trial_id: str, trial: SpooledTrial) -> str:
        """Find or create a trial's run; it is put on record when it is complete, so a crash half-way is repaired."""
        about = json.loads((trial.folder / "trial.json").read_text())
        edition = f"@{about['edition']}" if "edition" in about else ""  # run again with more rounds
        key, name = f"{self._record['sweep']}/{trial_id}{edition}", str(about.get("name", trial_id))
        tags = {"orchestrator.key": key, "mlflow.parentRunId": self._record["parent"], "mlflow.runName": name}
        experiment = self._record["experiment_id"]
        run = _find(self._client, experiment, key)
        if run is None:
            run = str(self._client.create_run(experiment, written_at(trial.folder / "trial.json"), tags).info.run_id)
        path = trial.folder / "experiment.yaml"
        params = parameters(yaml.safe_load(path.read_text())) if path.exists() else {}
        self._log(self._client, run, params=params, tags={**about.get("tags", {}), **tags})
        if about.get("data"):
            self._client.log_inputs(run, [_dataset(about["data"])])
        self._save(runs={**self._record["runs"], trial_id: run})
        return run

    def _send(self, trial_id: str, trial: SpooledTrial, run: str) -> None:
        while trial.pending and not self._stop:
            points: list[Point] = []
            tags: dict[str, str] = {}
            taken = 0
            for _, more, news in trial.pending:
                if taken and len(points) + len(more) > METRICS:
                    break
                points, tags, taken = points + more, tags | news, taken + 1
            self._log(self._client, run, points, tags=tags)
            self._save(offsets={**self._record["offsets"], trial_id: trial.pending[taken - 1][0]})
            del trial.pending[:taken]

    def _finish(self, trial: SpooledTrial, run: str, status: str, error: str | None) -> None:
        for name in ("experiment.yaml", "metrics.jsonl"):
            if (trial.folder / name).exists():
                self._client.log_artifact(run, str(trial.folder / name))
        if any(trial.folder.glob("artifacts/*")):
            self._client.log_artifacts(run, str(trial.folder / "artifacts"))
        tags = {"orchestrator.stopped_early": "true"} if status == "STOPPED" else {}
        if shared := reused(trial.readable()):
            tags["reused"] = "; ".join(shared)
        if status == "FAILED" and error:
            tags[NOTE] = "\n".join(["```", *error.strip().splitlines()[-20:], "```"])
        self._log(self._client, run, tags=tags)
        self._client.set_terminated(run, ENDS[status], written_at(trial.folder / "status.json"))

    def _close(self) -> None:
        parent, closing = self._record["parent"], self._record["closing"]
        stamp = int(closing["time"] * 1000)
        points = [(valid_name(key), value, stamp, 0) for key, value in closing["metrics"].items()]
        self._log(self._client, parent, points, tags={NOTE: closing["note"]} if closing["note"] else {})
        for name in ("sweep.yaml", closing["summary"] or "summary.json", "report.html"):
            if (self.dir / name).exists():
                self._client.log_artifact(parent, str(self.dir / name))
        if (self.dir / "pictures").is_dir():
            self._client.log_artifacts(parent, str(self.dir / "pictures"), "pictures")
        self._client.set_terminated(parent, ENDS.get(closing["status"], "FAILED"), stamp)
        self._ended = True

    @staticmethod
    def _log(
        client: Any,
        run: str,
        points: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log any number of things in as few requests as MLflow allows."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(*point) for point in points]
        settings = [Param(key, value) for key, value in (params or {}).items()]
        labels = [RunTag(valid_name(key), str(value)[-8000:]) for key, value in (tags or {}).items()]
        for i in range(max(-(-len(metrics) // METRICS), -(-len(settings) // ENTRIES), -(-len(labels) // ENTRIES))):
            some, few = slice(i * METRICS, (i + 1) * METRICS), slice(i * ENTRIES, (i + 1) * ENTRIES)
            client.log_batch(run, metrics[some], settings[few], labels[few])


def _mlflow() -> Any:
    """Import MLflow, which takes seconds, with defaults that the user's environment may override."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow

    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the mirror tells in a line what MLflow cannot do
    return mlflow


def _find(client: Any, experiment: str, key: str) -> str | None:
    runs = client.search_runs([experiment], f"tags.`orchestrator.key` = '{key}'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _dataset(data: Mapping[str, Any]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = str(data.get("source", ""))
    kind, place = ("http", "url") if source.startswith("http") else ("local", "uri")
    dataset = Dataset(str(data["name"]), str(data.get("digest", ""))[:36], kind, json.dumps({place: source}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])


def _is_away(error: Exception) -> bool:
    """Tell a server that cannot answer from one that refuses what it was given."""
    code = getattr(error, "get_http_status_code", None)
    return code is not None and code() >= 500


def _is_database(uri: str) -> bool:
    return re.match(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:", uri) is not None


def absolute(uri: str) -> str:
    """Return a database's URI with its whole path."""
    path = uri.removeprefix("sqlite:///")
    return uri if path == uri else f"sqlite:///{Path(path).resolve()}"


def public(uri: str) -> str:
    """Leave out a password: run directories and messages are passed around."""
    return re.sub(r"//[^/@]*@", "//", uri)
