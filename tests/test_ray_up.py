"""A cluster for real: `ray up` on hosts made of namespaces, a sweep as a job, a host lost meanwhile, `ray down`."""

import importlib.util
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import hosts
import pytest
import yaml
from conftest import driver, finish
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from cluster.local import text
from orchestrator.experiment import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
CLIENT = "ray::ClientActor"
SWEEP = """\
search: {metric: generic/acc}
experiment:
  data: {name: digits, clients: 8, alpha: 0.5, imbalance: 10}
  local: {lr: 0.05, batch: 8, epochs: 3}
  rounds: 30
  clients_per_round: 8
  evaluate: {every: 10}
  cluster: {actors: 2}
  seed: !grid [0, 1]
"""


@contextmanager
def started(folder, *names):
    """Make hosts, and see that nothing of them is left."""
    if importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("jobs need Ray's dashboard: pip install --constraint constraints.txt --editable '.[dev,cluster]'")
    if reason := hosts.lacking():
        pytest.skip(f"no hosts can be made here: {reason}")
    with hosts.Hosts(folder, *names) as found:
        yield found
    assert found.prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.5)
    return found


def done(process, seconds=300):
    """Wait for a command of the laptop; return what it printed."""
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out = process.communicate()[0] + f"\n(killed after {seconds} s)"
    assert process.returncode == 0, out
    return out


def insist(start):
    """Run a command that starts Ray; on a busy machine Ray may take longer than it allows itself."""
    for _ in range(3):
        process = start()
        out, _ = process.communicate(timeout=400)
        if process.returncode == 0:
            return
    pytest.fail(out)


def rounds(trial):
    log = trial / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def alone(trial):
    """Return the fingerprint of the same experiment run in this process."""
    tree = yaml.safe_load((trial / "experiment.yaml").read_text())
    return finish(driver(Experiment.model_validate(tree))).fingerprint()


ASK = """\
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error.reason)
"""


def test_a_sweep_on_three_hosts_of_which_one_is_lost(tmp_path):
    with started(tmp_path, "head", "one", "two") as machines:
        on_three(machines, tmp_path)


def on_three(machines, tmp_path):
    address, laptop = machines.address, machines.laptop
    file, home = str(tmp_path / "local.yaml"), tmp_path / "head" / "home"
    options = ["--head", address["head"], "--workers", address["one"], address["two"], "--user", "root"]
    Path(file).write_text(text([*options, "--key", str(tmp_path / "id"), "--environment", sys.prefix]))
    (tmp_path / "small.yaml").write_text(SWEEP)

    done(laptop("ray", "get-auth-token", "--generate"))
    insist(lambda: laptop("ray", "up", "--yes", "--no-config-cache", file))
    done(laptop("ray", "rsync-up", file, str(tmp_path / "small.yaml"), "~/small.yaml"))
    tunnel = laptop("ray", "dashboard", file)
    jobs = "http://127.0.0.1:8265"
    wait_for(lambda: "401" in done(laptop("python", "-c", ASK, f"{jobs}/api/jobs/")), 120, "a dashboard with a lock")
    assert "refused" in done(laptop("python", "-c", ASK, f"http://{address['head']}:8265/"))

    # Nobody waits here for the workers: the sweep does.
    submit = ["ray", "job", "submit", "--address", jobs, "--working-dir", ".", "--"]
    command = ["python", "-m", "orchestrator.tune", "~/small.yaml", "--out", "~/runs"]
    job = laptop(*submit, *command, RAY_AUTH_MODE="token")
    folder = home / "runs" / "small"
    first, second = (folder / "trials" / id for id in ("0000", "0001"))
    wait_for(lambda: rounds(first) >= 3 or job.poll() is not None, 400, "the first rounds")
    for name in ("head", "one", "two"):
        assert (tmp_path / name / "home/.ray/auth_token").stat().st_mode & 0o777 == 0o600
    at = [name for name in address if any(CLIENT in line for line in machines.processes(name))]
    assert len(at) == 2, "two actors on machines of one CPU each"
    victim = next(name for name in at if name != "head")
    machines.lose(victim)
    assert json.loads((first / "status.json").read_text())["status"] == "RUNNING"
    assert rounds(first) < 30

    done(job, 900)
    summary = json.loads((folder / "summary.json").read_text())
    assert [trial["status"] for trial in summary["trials"]] == ["FINISHED", "FINISHED"]
    assert json.loads((first / "status.json").read_text())["restarts"] >= 1
    for trial, found in zip((first, second), summary["trials"], strict=True):
        assert found["fingerprint"] == alone(trial)

    tunnel.kill()
    tunnel.communicate()
    done(laptop("ray", "down", "--yes", file))
    left = [name for name in address if name != victim]
    wait_for(lambda: not any(machines.processes(name) for name in left), 300, "all of Ray to be gone")


PLAN = {
    "cluster_name": "elastic",
    "max_workers": 1,
    "idle_timeout_minutes": 5,
    "provider": {
        "type": "external",  # the wheel lacks what the name `fake_multinode` needs
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0},
        "gpu": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    **{f"{when}_commands": [] for when in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
}


def test_machines_with_gpus_come_from_nothing(tmp_path):
    """A cluster that has only its head when the sweep begins, as in cluster.yaml, starts what the sweep asks for."""
    with started(tmp_path, "head") as machines:
        home = tmp_path / "head" / "home"
        (home / "ray_bootstrap_config.yaml").write_text(json.dumps(PLAN))
        sweep = yaml.safe_load(SWEEP.replace("!grid [0, 1]", "0").replace("rounds: 30", "rounds: 4"))
        sweep["experiment"]["cluster"]["gpu_per_actor"] = 0.5
        (home / "small.yaml").write_text(yaml.safe_dump(sweep))
        elastic = {
            "PATH": f"{sys.prefix}/bin:$PATH",
            "PYTHONPATH": str(hosts.ROOT),
            "RAY_OVERRIDE_RESOURCES": "",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_NODE_TYPE_NAME": "ray.head.default",
        }
        exports = " ".join(f'{name}="{value}"' for name, value in elastic.items())
        start = "ray stop --force; ray start --head --num-cpus=0 --include-dashboard=false --disable-usage-stats"
        plan = "--autoscaling-config=$HOME/ray_bootstrap_config.yaml"
        insist(lambda: machines.shell("head", f"export {exports}; {start} {plan}"))
        tune = "python -m orchestrator.tune ~/small.yaml --address auto --out ~/runs"
        out = done(machines.shell("head", f"export PATH={elastic['PATH']} PYTHONPATH={hosts.ROOT}; {tune}"), 900)
        assert "0 CPU, 0 GPU, 1 machine(s)" in out
        folder = home / "runs" / "small"
        summary = json.loads((folder / "summary.json").read_text())
        (trial,) = summary["trials"]
        assert trial["status"] == "FINISHED"
        assert trial["fingerprint"] == alone(folder / "trials" / trial["id"])
