"""The mirror of a run directory in MLflow: complete, without duplicates, whatever is down or dies in between."""

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from orchestrator import tracking
from orchestrator.sync import sync

ROOT = Path(__file__).parents[1]
START = 1763260000.123
NOWHERE = "http://127.0.0.1:9"
EXPERIMENT = {
    "data": {"name": "fashion_mnist", "alpha": 0.2},
    "algorithm": [{"fedprox": {"mu": 0.01}}, {"ecl": {"num_experts": 3}}],
    "rounds": 20,
}


class Directory:
    """Plays the processes that train: it only writes files."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True)
        (path / "sweep.yaml").write_text("search: {metric: generic/acc}\n")

    def trial(self, name: str, /, experiment: dict | None = None, **extra) -> Path:
        folder = self.path / "trials" / name
        (folder / "artifacts").mkdir(parents=True)
        about = {"id": name, "name": f"fedprox {name}", "params": {}, "tags": {"git": "abc"}, **extra}
        (folder / "trial.json").write_text(json.dumps(about))
        (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment or EXPERIMENT))
        self.status(name, "RUNNING")
        return folder

    def status(self, name: str, status: str, error: str | None = None) -> None:
        path = self.path / "trials" / name / "status.json"
        path.write_text(json.dumps({"status": status, "error": error}))

    def rounds(self, name: str, first: int, last: int, phase: str = "fedavg.train", late: float = 0, **metrics) -> None:
        with (self.path / "trials" / name / "metrics.jsonl").open("a") as file:
            for i in range(first, last + 1):
                values = metrics or {"train/loss": 1 / i, "generic/acc": i / 100}
                line = {"round": i, "phase": phase, "time": START + i + late, "metrics": values}
                file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """One real sqlite store for all tests of this file: making one takes seconds."""
    uri = tracking.default_uri(tmp_path_factory.mktemp("store"))
    tracking.prepare(uri, tmp_path_factory.mktemp("artifacts"))
    return uri


@pytest.fixture
def sweep(tmp_path) -> Directory:
    return Directory(tmp_path / "out" / tmp_path.name)


def client(uri: str):
    return tracking._mlflow().MlflowClient(tracking_uri=uri)


def mirror(uri: str, sweep: Directory, **tags: str) -> tracking.Mirror:
    return tracking.Mirror(uri, sweep.path, experiment=sweep.path.name, tags=tags)


def mirrored(uri: str, sweep: Directory, *trials: str) -> tracking.Mirror:
    """Mirror trials from start to end in one go."""
    m = mirror(uri, sweep)
    m.start()
    for trial in trials:
        m.watch(trial)
        m.finish(trial)
    assert m.close("FINISHED") == 0, m.last_error
    return m


def history(uri: str, run: str, key: str) -> list[tuple[int, float, int]]:
    return [(m.step, m.value, m.timestamp) for m in client(uri).get_metric_history(run, key)]


def written(last: int, first: int = 1, late: float = 0) -> list[tuple[int, float, int]]:
    return [(i, i / 100, int((START + i + late) * 1000)) for i in range(first, last + 1)]


def runs(uri: str, name: str) -> dict[str, list]:
    """All runs of an experiment by their name."""
    found: dict[str, list] = {}
    for run in client(uri).search_runs([client(uri).get_experiment_by_name(name).experiment_id]):
        found.setdefault(run.info.run_name, []).append(run)
    return found


def wait(true, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_import_is_fast_and_without_mlflow():
    code = "import sys, orchestrator.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_sweep_is_mirrored_while_it_runs(uri, sweep):
    folder = sweep.trial("0000", data={"name": "fashion_mnist", "digest": "d" * 64, "source": "/data"})
    m = mirror(uri, sweep, host="here")
    m.start()
    m.watch("0000")
    sweep.rounds("0000", 1, 5)
    # MLflow stores a batch's metrics before its tags.
    wait(lambda: m.run_id("0000") and "phase" in client(uri).get_run(m.run_id("0000")).data.tags)
    wait(lambda: len(history(uri, m.run_id("0000"), "generic/acc")) == 5)
    run = client(uri).get_run(m.run_id("0000"))
    assert run.info.status == "RUNNING"
    assert run.data.tags["phase"] == "fedavg.train"
    sweep.rounds("0000", 6, 9, phase="ecl.train")
    (folder / "artifacts" / "tables").mkdir()
    (folder / "artifacts" / "tables" / "per_class.csv").write_text("class,acc\n0,1\n")
    sweep.status("0000", "FINISHED")
    m.finish("0000")
    (sweep.path / "summary.json").write_text("{}")
    summary = sweep.path / "summary.json"
    assert m.close("FINISHED", summary=summary, note="best: 0000", metrics={"best/acc": 0.09}) == 0
    assert m.last_error is None

    assert history(uri, run.info.run_id, "generic/acc") == written(9)
    run, c = client(uri).get_run(run.info.run_id), client(uri)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "fedprox 0000"
    assert run.data.tags["phase"] == "ecl.train"
    assert run.data.tags["git"] == "abc"
    assert run.data.params["algorithm.fedprox.mu"] == "0.01"
    assert run.inputs.dataset_inputs[0].dataset.name == "fashion_mnist"
    assert {f.path for f in c.list_artifacts(run.info.run_id)} == {"experiment.yaml", "metrics.jsonl", "tables"}
    parent = c.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics == {"best/acc": 0.09}
    assert parent.data.tags["mlflow.note.content"] == "best: 0000"
    assert parent.data.tags["host"] == "here"
    assert {f.path for f in c.list_artifacts(parent.info.run_id)} == {"sweep.yaml", "summary.json"}
    assert (sweep.path.parent / "mlartifacts").is_dir()


def test_a_torn_last_line_waits_for_its_end(uri, sweep):
    folder = sweep.trial("0000")
    sweep.rounds("0000", 1, 2)
    whole = (folder / "metrics.jsonl").read_text()
    line = whole.splitlines(keepends=True)[1]
    (folder / "metrics.jsonl").write_text(whole[:-10])
    m = mirror(uri, sweep)
    m.start()
    m.watch("0000")
    wait(lambda: json.loads((sweep.path / "mlflow.json").read_text())["offsets"].get("0000") == 1)
    time.sleep(0.6)
    assert history(uri, m.run_id("0000"), "generic/acc") == written(1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[-10:])
    sweep.status("0000", "FINISHED")
    m.finish("0000")
    assert m.close("FINISHED") == 0
    assert history(uri, m.run_id("0000"), "generic/acc") == written(2)


@pytest.mark.parametrize("kept", [12, 10], ids=["appended again", "cut back to the checkpoint"])
def test_resume_makes_no_second_run_and_no_second_point(uri, sweep, kept):
    folder = sweep.trial("0000")
    sweep.rounds("0000", 1, 12)
    sweep.status("0000", "FAILED", "\n".join(f"line {i}" for i in range(50)))
    first = mirrored(uri, sweep, "0000")
    failed = client(uri).get_run(first.run_id("0000"))
    assert failed.info.status == "FAILED"
    note = failed.data.tags["mlflow.note.content"]
    assert "line 49" in note
    assert "line 29" not in note

    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:kept]))
    sweep.status("0000", "RUNNING")
    second = mirror(uri, sweep)
    second.start()
    second.watch("0000")
    wait(lambda: client(uri).get_run(first.run_id("0000")).info.status == "RUNNING")
    sweep.rounds("0000", 11, 20, late=3600.25)  # from the checkpoint of round 10, an hour later
    sweep.status("0000", "FINISHED")
    second.finish("0000")
    assert second.close("FINISHED") == 0
    assert second.run_id("0000") == first.run_id("0000")
    assert history(uri, second.run_id("0000"), "generic/acc") == written(12) + written(20, 13, late=3600.25)
    found = runs(uri, sweep.path.name)
    assert {name: len(same) for name, same in found.items()} == {sweep.path.name: 1, "fedprox 0000": 1}
    assert found["fedprox 0000"][0].info.status == "FINISHED"
    assert not found["fedprox 0000"][0].data.tags["mlflow.note.content"]


def test_a_file_that_is_cut_back_while_it_is_watched(uri, sweep):
    folder = sweep.trial("0000")
    sweep.rounds("0000", 1, 12)
    m = mirror(uri, sweep)
    m.start()
    m.watch("0000")
    wait(lambda: m.run_id("0000") and len(history(uri, m.run_id("0000"), "generic/acc")) == 12)
    (folder / "metrics.jsonl").unlink()
    sweep.rounds("0000", 1, 10, phase="x")  # a file of other bytes
    time.sleep(0.7)
    sweep.rounds("0000", 11, 15, phase="x", late=3600.25)
    sweep.status("0000", "FINISHED")
    m.finish("0000")
    assert m.close("FINISHED") == 0
    assert history(uri, m.run_id("0000"), "generic/acc") == written(12) + written(15, 13, late=3600.25)


def test_a_lost_record_is_repaired_by_the_tags(uri, sweep):
    sweep.trial("0000")
    sweep.rounds("0000", 1, 3)
    first = mirrored(uri, sweep, "0000")
    record = json.loads((sweep.path / "mlflow.json").read_text())
    record |= {"parent": None, "runs": {}, "offsets": {}, "done": {}}  # died right after create_run
    (sweep.path / "mlflow.json").write_text(json.dumps(record))
    second = mirrored(uri, sweep, "0000")
    assert second.run_id("0000") == first.run_id("0000")
    assert sorted(map(len, runs(uri, sweep.path.name).values())) == [1, 1]
    assert history(uri, first.run_id("0000"), "generic/acc") == written(3)


def test_statuses(uri, sweep):
    ends = {"0000": "FINISHED", "0001": "FAILED", "0002": "KILLED", "0003": "STOPPED", "0004": "RUNNING"}
    m = mirror(uri, sweep)
    m.start()
    for trial, status in ends.items():
        sweep.trial(trial)
        sweep.status(trial, status, "it broke" if status == "FAILED" else None)
        m.watch(trial)
        if status != "RUNNING":
            m.finish(trial)
    assert m.close("KILLED") == 0, m.last_error
    found = {run_id: client(uri).get_run(m.run_id(run_id)) for run_id in ends}
    told = [found[trial].info.status for trial in sorted(ends)]
    assert told == ["FINISHED", "FAILED", "KILLED", "FINISHED", "KILLED"]
    assert [t for t in found if "orchestrator.stopped_early" in found[t].data.tags] == ["0003"]
    assert "it broke" in found["0001"].data.tags["mlflow.note.content"]
    assert runs(uri, sweep.path.name)[sweep.path.name][0].info.status == "KILLED"


def test_what_is_not_a_finite_number_is_counted_and_not_stored(uri, sweep):
    folder = sweep.trial("0000")
    sweep.rounds("0000", 1, 1, loss=float("nan"), acc=0.5)
    sweep.rounds("0000", 2, 2, loss=float("inf"), acc=float("-inf"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "ti{"round": 3, "phase": "x"}\n')  # torn, then written over
    sweep.rounds("0000", 4, 4, **{"loss": 1.5, "acc@1": 0.25})
    sweep.status("0000", "FINISHED")
    run = mirrored(uri, sweep, "0000").run_id("0000")
    data = client(uri).get_run(run).data
    assert data.tags["orchestrator.nonfinite"] == "3"
    assert data.metrics == {"loss": 1.5, "acc": 0.5, "acc_1": 0.25}
    assert [step for step, *_ in history(uri, run, "loss")] == [4]


def test_many_lines_go_in_few_requests_within_the_limits(uri, sweep):
    sweep.trial("0000", {"wide": {f"p{i}": "x" * 7000 if i == 0 else i for i in range(250)}})
    sweep.rounds("0000", 1, 60, **{f"m/{i}": float(i) for i in range(40)})
    sweep.rounds("0000", 61, 61, **{f"n/{i}": float(i) for i in range(1500)})
    sweep.status("0000", "FINISHED")
    run = client(uri).get_run(mirrored(uri, sweep, "0000").run_id("0000"))
    assert len(run.data.metrics) == 1540
    assert len(history(uri, run.info.run_id, "m/7")) == 60
    assert len(run.data.params) == 250
    assert len(run.data.params["wide.p0"]) == 6000


def test_one_trial_that_mlflow_refuses_does_not_hold_up_the_others(uri, sweep):
    folder = sweep.trial("0000")
    (folder / "experiment.yaml").write_text("a: [unclosed")
    sweep.trial("0001")
    for trial in ("0000", "0001"):
        sweep.rounds(trial, 1, 2)
        sweep.status(trial, "FINISHED")
    m = mirror(uri, sweep)
    m.start()
    m.finish("0000")
    m.finish("0001")
    assert m.close("FINISHED", timeout=3) == 3  # two lines and an ending
    assert m.last_error
    assert client(uri).get_run(m.run_id("0001")).info.status == "FINISHED"


def test_parameters():
    chain = [{"fedprox": {"mu": 0.01}}, {"ecl": None}, "ldae", {"fedprox": {"mu": 1}}]
    flat = tracking.parameters({"data": {"name": "x", "root": None}, "algorithm": chain, "seeds": [0, 1]})
    assert flat == {
        "data.name": "x",
        "data.root": "None",
        "algorithm": "fedprox+ecl+ldae+fedprox",
        "algorithm.fedprox.mu": "0.01",
        "algorithm.3.fedprox.mu": "1",
        "seeds": "[0, 1]",
    }


def test_sync_into_another_store(uri, sweep, tmp_path):
    for trial, status in (("0000", "FINISHED"), ("0001", "STOPPED")):
        sweep.trial(trial)
        sweep.rounds(trial, 1, 4)
        sweep.status(trial, status)
    m = mirror(uri, sweep, host="here")
    m.start()
    m.finish("0000")
    m.finish("0001")
    assert m.close("FINISHED", note="done", metrics={"best": 1.0}) == 0
    record = (sweep.path / "mlflow.json").read_text()
    other = tracking.default_uri(tmp_path / "elsewhere")
    for _ in range(2):  # the second time changes nothing
        assert sync(sweep.path, other).owed() == 0
    assert (sweep.path / "mlflow.json").read_text() == record
    found = runs(other, sweep.path.name)
    assert {name: len(same) for name, same in found.items()} == {
        sweep.path.name: 1,
        "fedprox 0000": 1,
        "fedprox 0001": 1,
    }
    parent = found[sweep.path.name][0]
    assert (parent.data.metrics, parent.data.tags["host"], parent.info.status) == ({"best": 1.0}, "here", "FINISHED")
    assert len(history(other, parent.info.run_id, "best")) == 1
    for name in ("fedprox 0000", "fedprox 0001"):
        assert history(other, found[name][0].info.run_id, "generic/acc") == written(4)
    assert found["fedprox 0000"][0].info.run_id != m.run_id("0000")


def test_an_unreachable_server_costs_nothing_and_sync_delivers_later(uri, sweep):
    sweep.trial("0000")
    sweep.trial("0001")
    m = mirror(NOWHERE, sweep)
    m.start()
    m.watch("0000")
    m.watch("0001")
    sweep.rounds("0000", 1, 5)
    sweep.rounds("0001", 1, 2)
    sweep.status("0000", "FINISHED")
    m.finish("0000")
    began = time.monotonic()
    owed = m.close("KILLED", note="cut short", metrics={"best": 0.5}, timeout=2)
    assert time.monotonic() - began < 4
    assert owed == 7 + 2 + 1  # lines, endings of trials, ending of the sweep
    assert m.run_id("0000") is None
    m._thread.join()
    assert m.last_error
    assert "\n" not in m.last_error

    command = [sys.executable, "-m", "orchestrator.sync", str(sweep.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1), done.stderr
    assert "owes 10" in done.stdout
    done = subprocess.run([*command, "--tracking-uri", uri], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = runs(uri, sweep.path.name)
    assert history(uri, found["fedprox 0000"][0].info.run_id, "generic/acc") == written(5)
    assert found["fedprox 0000"][0].info.status == "FINISHED"
    assert found["fedprox 0001"][0].info.status == "KILLED"
    parent = found[sweep.path.name][0]
    assert parent.info.status == "KILLED"
    assert parent.data.metrics == {"best": 0.5}
    assert parent.data.tags["mlflow.note.content"] == "cut short"


def test_a_directory_has_one_writer(uri, sweep):
    sweep.trial("0000")
    sweep.rounds("0000", 1, 2)
    m = mirror(uri, sweep)
    m.start()
    m.watch("0000")
    wait(lambda: m.run_id("0000"))
    assert sync(sweep.path).owed() > 0
    assert client(uri).get_run(m.run_id("0000")).info.status == "RUNNING"
    sweep.status("0000", "FINISHED")
    m.finish("0000")
    assert m.close("FINISHED") == 0
    assert sync(sweep.path).owed() == 0


def test_passwords_stay_out_of_the_directory(sweep):
    m = mirror("http://me:canary@127.0.0.1:9", sweep)
    m.start()
    assert m.close("FINISHED", timeout=0.5) == 1
    wait(lambda: m.last_error)
    assert "canary" not in (sweep.path / "mlflow.json").read_text() + m.last_error
    m._thread.join()


def test_ui_command(uri, tmp_path, monkeypatch):
    assert tracking.ui_command(NOWHERE) is None, "a server needs no command"
    words = shlex.split(tracking.ui_command(f"sqlite:///{tmp_path}/a b.db"))
    assert words[0] == "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"
    assert f"sqlite:///{tmp_path}/a b.db" in words
    monkeypatch.setenv("PATH", "")
    assert shlex.split(tracking.ui_command(uri))[1:4] == [sys.executable, "-m", "mlflow"]


RACE = """
import pathlib, sys, time
sys.path.append("tests")
from test_tracking import Directory, tracking
out, name = pathlib.Path(sys.argv[1]), sys.argv[2]
tracking._mlflow()
sweep = Directory(out / name)
while len(list(out.glob("sweep*"))) < 4:
    time.sleep(0.01)
m = tracking.Mirror(tracking.default_uri(out), sweep.path, experiment="race", tags={})
m.start()
for trial in ("0000", "0001", "0002"):
    sweep.trial(trial, name=f"{name} {trial}")
    m.watch(trial)
for i in range(1, 21):
    for trial in ("0000", "0001", "0002"):
        sweep.rounds(trial, i, i)
    time.sleep(0.05)
for trial in ("0000", "0001", "0002"):
    sweep.status(trial, "FINISHED")
    m.finish(trial)
sys.exit(m.close("FINISHED", timeout=60))
"""


def test_four_sweeps_make_and_share_one_fresh_database(tmp_path):
    commands = [[sys.executable, "-c", RACE, str(tmp_path), f"sweep{i}"] for i in range(4)]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    store = tracking.default_uri(tmp_path)
    while any(process.poll() is None for process in processes):  # and a reader all the while
        if (tmp_path / "mlflow.db").exists():
            client(store).search_runs([e.experiment_id for e in client(store).search_experiments()])
        time.sleep(0.2)
    assert [process.wait() for process in processes] == [0] * 4
    found = runs(store, "race")
    names = [f"sweep{i}" for i in range(4)]
    assert sorted(found) == sorted(names + [f"{name} 000{j}" for name in names for j in range(3)])
    assert all(len(same) == 1 and same[0].info.status == "FINISHED" for same in found.values())
    for (run,) in (found[name] for name in found if name not in names):
        assert history(store, run.info.run_id, "generic/acc") == written(20)


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Server:
    """A real MLflow server on the loopback interface."""

    def __init__(self, folder: Path):
        # Below the ports that the system hands out by itself: nobody takes it while the server is away.
        self.port = next(port for port in random.sample(range(20_000, 32_000), 100) if free(port))
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = tracking.default_uri(folder)
        tracking.prepare(self.store, folder / "artifacts")
        self.artifacts, self.log = folder / "artifacts", folder / "log"

    def __enter__(self):
        options = f"--backend-store-uri {self.store} --artifacts-destination {self.artifacts} --workers 1"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *options.split()],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait(self.healthy, 90)
        except AssertionError:
            self.__exit__()
            raise AssertionError(f"the server did not come up ({self.error}): {self.log.read_text()}") from None
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):  # it may have been ended before
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def healthy(self) -> bool:
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return direct.open(f"{self.uri}/health", timeout=2).status == 200
        except OSError as error:
            self.error = repr(error)
            return False


def test_a_server_that_goes_away_and_comes_back(sweep, tmp_path):
    server = Server(tmp_path / "server")
    sweep.trial("0000")
    m = mirror(server.uri, sweep)
    round_times: list[float] = []

    def train(first: int, last: int) -> None:
        for i in range(first, last + 1):
            began = time.monotonic()
            sweep.rounds("0000", i, i)
            round_times.append(time.monotonic() - began)
            time.sleep(0.02)

    with server:
        m.start()
        m.watch("0000")
        train(1, 30)
        wait(lambda: m.run_id("0000"))
        worker = threading.Thread(target=train, args=(31, 120))
        worker.start()
    worker.join()  # wrote on while the server was killed
    wait(lambda: m.last_error)
    sweep.trial("0001")
    m.watch("0001")
    with server:
        sweep.rounds("0001", 1, 3)
        train(121, 130)
        for trial in ("0000", "0001"):
            sweep.status(trial, "FINISHED")
            m.finish(trial)
        assert m.close("FINISHED", timeout=60) == 0, m.last_error
    assert max(round_times) < 1
    found = runs(server.store, sweep.path.name)
    assert sorted(map(len, found.values())) == [1, 1, 1]
    assert {run.info.status for same in found.values() for run in same} == {"FINISHED"}
    assert history(server.store, m.run_id("0000"), "generic/acc") == written(130)
    assert history(server.store, m.run_id("0001"), "generic/acc") == written(3)
    assert any(server.artifacts.rglob("metrics.jsonl"))
