"""Kills of client actors, of drivers, of whole commands and of machines: the results have the same bits every time."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from chaos import (
    CLIENT,
    TRAINABLE,
    WORKING,
    called,
    end,
    finished,
    lines,
    logged,
    rounds,
    runs,
    started,
    status,
    stored,
    until,
)
from chaos import summary as trials_of
from conftest import driver, finish, tiny
from test_command import gone, in_process
from test_pool import on_ray
from test_tracking import ROOT

pytestmark = pytest.mark.chaos

ROUNDS = 400
RUN = f"""\
data: {{name: digits, clients: 6}}
algorithm: [scaffold, {{finetune: {{epochs: 1}}}}]
local: {{lr: 0.05, batch: 16}}
rounds: {ROUNDS}
clients_per_round: 3
evaluate: {{every: 10}}
failures: {{checkpoint_s: 0}}
"""


def kill(actors):
    """Kill actors, given by where they are."""
    for actor in actors:
        os.kill(actor["pid"], signal.SIGKILL)
    return [actor["pid"] for actor in actors]


def in_background(seconds, done, work):
    """Do something every few seconds until it is over; return a list of what was returned."""
    found = []

    def loop():
        while not done.wait(seconds):
            found.extend(work())

    threading.Thread(target=loop).start()
    return found


@pytest.mark.timeout(600)
def test_client_actors_killed_every_two_seconds_and_at_times_all_of_them(ray_cluster, chance):
    experiment = tiny(
        algorithm="scaffold",
        rounds=80,
        local={"lr": 0.01, "batch": 16, "epochs": 3},
        evaluate={"every": 20},
        failures={"retries": 20},
    )
    expected = finish(driver(experiment)).fingerprint()
    run, pool = on_ray(experiment, 3)
    done, all_gone = threading.Event(), []

    def some():
        """Kill all actors when they are three (again), at most three times, and else one of those that are ready."""
        ready = list(pool.where.values())
        if len(ready) == 3 and len(all_gone) < 3:
            all_gone.append(len(ready))
            return kill(ready)
        return kill([chance.choice(ready)]) if len(ready) > 1 else []

    try:
        until(lambda: run.evaluate() and len(pool.where) == 3)
        killed = in_background(2.0, done, some)
        finish(run)
        done.set()
        print(f"killed {len(killed)} client actors, all three at once {len(all_gone)} times")
        assert len(killed) >= 3
        assert all_gone
        assert len(killed) - 3 <= pool.restarts <= len(killed), "each death costs one new actor"
        assert run.fingerprint() == expected
    finally:
        done.set()
        pool.close()


def test_a_client_whose_actors_all_die_is_named(ray_cluster):
    run, pool = on_ray(tiny(local={"epochs": 100_000}, failures={"retries": 2}), 1)
    done = threading.Event()
    try:
        killed = in_background(0.5, done, lambda: kill(list(pool.where.values())))
        with pytest.raises(RuntimeError, match=r"clients \[\d+\] lost their actor 3 times in round 0; the last reason"):
            finish(run)
        assert len(set(killed)) == 3
    finally:
        done.set()
        pool.close()


class Command:
    """A run that is started and resumed until it is done."""

    def __init__(self, folder, scratch):
        (folder / "run.yaml").write_text(RUN)
        self.folder, self.scratch, self.out = folder, scratch, folder / "out"
        self.trial = self.out / "run" / "trials" / "0000"
        self.common = ["--out", self.out, "--num-cpus", 2]

    def start(self):
        fresh = not (self.out / "run" / "sweep.yaml").exists()
        what = [self.folder / "run.yaml"] if fresh else ["--name", "run", "--resume"]
        return started(*what, *self.common, scratch=self.scratch)

    def advance(self, process, more):
        """Wait for some more rounds."""
        before = rounds(self.trial)
        until(lambda: rounds(self.trial) >= before + more, process)

    def kill_driver(self, process, after):
        """Kill the trial's driver after some more rounds."""
        self.advance(process, after)
        victims = until(lambda: called(process.pid, TRAINABLE), process)  # Ray renames it for moments
        os.kill(victims[0], signal.SIGKILL)

    def check(self):
        """Bring the run to its end, and compare it with one that nobody disturbed."""
        code, out, err = finished("--name", "run", "--resume", *self.common, scratch=self.scratch)
        assert code == 0, out + err
        (trial,) = trials_of(self.out / "run")
        assert trial["status"] == "FINISHED"
        assert trial["fingerprint"] == in_process(self.trial)
        assert [line["round"] for line in lines(self.trial)] == list(range(1, ROUNDS + 2))
        found = runs(self.out / "mlflow.db", "run")
        assert sorted(status for status, _ in found.values()) == ["FINISHED"] * 2
        assert found[trial["run_id"]][1] in found, "one run below one parent, whatever happened"
        assert stored(self.out / "mlflow.db", trial["run_id"]) == logged(self.trial), "no point lost and none twice"
        assert not [*(self.trial / "checkpoint").glob(".*")], "no half files"
        assert not [*self.scratch.iterdir()], "the directories of those that were killed are gone too"
        return trial


def stop_while_writing(process, trial):
    """Stop the driver in the middle of a checkpoint, with a file half written."""

    def caught():
        pids = called(process.pid, TRAINABLE)  # Ray renames it for moments
        if pids and any((trial / "checkpoint").glob(".*")):
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.05)
            if any((trial / "checkpoint").glob(".*")):
                return True
            os.kill(pids[0], signal.SIGCONT)
        return False

    until(caught, process)


@pytest.mark.timeout(600)
def test_kill_9_of_everything_five_times(tmp_path, scratch, chance):
    """Of the whole process group, of the main process alone, and while a checkpoint is being written."""
    run = Command(tmp_path, scratch)
    ways = ["group", "group", "main", "while writing", "while starting"]
    chance.shuffle(ways)
    ids, sessions = set(), []
    for way in ways:
        print(way, "from round", rounds(run.trial))
        with run.start() as process:
            if way == "while starting" and rounds(run.trial):
                until(lambda process=process: called(process.pid, CLIENT), process)
            else:
                run.advance(process, chance.randint(1, 20))
            if way == "while writing":
                stop_while_writing(process, run.trial)
            time.sleep(chance.uniform(0, 0.3))
            if way == "main":
                process.kill()
                process.wait()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            until(lambda p=process: not any(called(p.pid, name) for name in WORKING), seconds=30)
            sessions.append(process.pid)
        if (run.out / "mlflow.db").exists():
            ids |= {id for id, (_, parent) in runs(run.out / "mlflow.db", "run").items() if parent}
        assert status(run.trial) in ("RUNNING", "FAILED")  # a driver may just have seen its command die
        assert rounds(run.trial) <= ROUNDS, "killed before its end"
    assert ids <= {run.check()["run_id"]}
    # Two watchers of Ray's look for their dead server for a minute before they give up.
    assert not [left for session in sessions for left in gone(session, 90)], "nothing of a dead command lives on"


@pytest.mark.timeout(600)
def test_kill_9_of_the_driver_while_the_command_goes_on(tmp_path, scratch, chance):
    """A driver that is lost once is replaced; a second time ends the trial in words, and it can be resumed."""
    run = Command(tmp_path, scratch)
    with run.start() as process:
        for _ in range(2):
            run.kill_driver(process, chance.randint(1, 30))
        out, err = process.communicate(timeout=120)
        assert process.returncode == 1, out + err
        assert "trial 0000 failed: the driver of the trial died" in out
        assert "Traceback" not in err
        assert not gone(process.pid)
    assert status(run.trial) == "FAILED"
    with run.start() as process:
        run.kill_driver(process, chance.randint(1, 20))
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
    run.check()


LOST_MACHINE = """
import os, sys, threading
sys.path.append("tests")
import ray
from ray.cluster_utils import Cluster
from conftest import driver, finish, tiny
from chaos import until
from test_pool import on_ray

experiment = tiny(algorithm="scaffold", rounds=20, local={"lr": 0.005, "batch": 16, "epochs": 10})
expected = finish(driver(experiment)).fingerprint()
cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
worker = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
run, pool = on_ray(experiment, 2)
until(lambda: run.evaluate() and len(pool.where) == 2)
assert len({place["node"] for place in pool.places()}) == 2, "an actor on each machine"
lost = threading.Timer(float(sys.argv[1]), cluster.remove_node, (worker,), {"allow_graceful": False})
lost.start()
finish(run)
lost.join()
assert pool.restarts >= 1, pool.restarts
assert len({place["node"] for place in pool.places()}) == 1
assert run.fingerprint() == expected
print("the same bits", flush=True)
os._exit(0)  # the test ends the rest of the cluster
"""


def test_a_machine_is_lost_in_the_middle_of_a_round(tmp_path, scratch, chance):
    words = [sys.executable, "-c", LOST_MACHINE, str(chance.uniform(0.1, 1.0))]
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    try:
        assert process.wait(timeout=180) == 0, said.read_text()
        assert "the same bits" in said.read_text()
    finally:
        end(process.pid)
