"""What the fault tests share: commands in a temporary place of their own, and looks at what they leave behind."""

import json
import os
import signal
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from test_command import command

TRAINABLE, CLIENT = "ray::ResourceTrainable", "ray::ClientActor"
WORKING = (TRAINABLE, CLIENT, "raylet")


@contextmanager
def started(*arguments, scratch, cwd=None, **environment):
    """Start the command with its temporary files in `scratch`; nothing of it outlives the test."""
    process = command(*arguments, cwd=cwd, env={**os.environ, "TMPDIR": str(scratch), **environment})
    try:
        yield process
    finally:
        if process.poll() != -signal.SIGKILL:  # else what it leaves is looked at
            end(process.pid)
        process.wait(timeout=60)


def end(session):
    """Kill every process of a session."""
    for pid, _ in members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finished(*arguments, scratch, seconds=240, **more):
    """Run the command to its end; return its exit code and what it printed on both streams."""
    with started(*arguments, scratch=scratch, **more) as process:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err


def members(session):
    """Return the live processes of a session: their ids and command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if stat[0] != "Z" and int(stat[3]) == session:
                found.append((int(path.name), (path / "cmdline").read_text().replace("\0", " ")))
    return found


def called(session, name):
    """Return the ids of a session's processes with a name in the first word of their command line."""
    return [pid for pid, words in members(session) if name in words.split(" ", 1)[0]]


def until(condition, process=None, seconds=120):
    """Wait for something to happen while a process lives; return what it is."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


def rounds(trial):
    """Return how many rounds a trial has written down."""
    log = trial / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def status(trial):
    """Return a trial's status, as its directory tells it."""
    path = trial / "status.json"
    return json.loads(path.read_text())["status"] if path.exists() else "WAITING"


def summary(folder):
    """Return the trials of a sweep's summary."""
    return json.loads((folder / "summary.json").read_text())["trials"]


def lines(trial):
    """Return the lines of a trial's log."""
    return [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]


def logged(trial):
    """Return every point that a trial's log has: (metric, step, value)."""
    return sorted((key, line["round"], value) for line in lines(trial) for key, value in line["metrics"].items())


def stored(database, run):
    """Return every point that MLflow's database has of a run, duplicates included."""
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", [run]))


def runs(database, experiment):
    """Return the runs of an experiment in MLflow's database: id -> (status, id of its parent)."""
    ask = """SELECT r.run_uuid, r.status, t.value FROM runs r JOIN experiments e USING (experiment_id)
             LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'mlflow.parentRunId'
             WHERE e.name = ? AND r.lifecycle_stage = 'active'"""
    with sqlite3.connect(database) as connection:
        return {id: (status, parent) for id, status, parent in connection.execute(ask, [experiment])}


def settings(**values):
    """Return the arguments that set leaves of an experiment; `__` stands for a dot."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
