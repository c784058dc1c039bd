"""The files that describe clusters: valid by Ray's own rules, closed to strangers, and made of pinned versions."""

import re
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import tiny
from ray.autoscaler._private.util import prepare_config, validate_config
from rich.console import Console

from cluster.local import EXAMPLE, text
from orchestrator import machines
from orchestrator.resources import HEAD, planned, share, with_those_to_come
from orchestrator.yaml_file import InputError

ROOT = Path(__file__).parents[1]
CLOUD, LOCAL, KUBERAY = (ROOT / name for name in ("cluster.yaml", "cluster/local.yaml", "cluster/kuberay-rayjob.yaml"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())


def launched(path):
    """Return the cluster as `ray up` completes it, once its rules are satisfied."""
    complete = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(complete)
    return complete


@pytest.mark.parametrize("path", [CLOUD, LOCAL], ids=lambda p: p.stem)
def test_ray_accepts_the_file_and_starts_a_closed_cluster(path):
    config = launched(path)
    for who in ("head", "worker"):
        (start,) = (c for c in config[f"{who}_start_ray_commands"] if "ray start" in c)
        assert start.index("export RAY_AUTH_MODE=token;") < start.index("ray start")
        assert "0.0.0.0" not in start
        assert any("chmod 600 ~/.ray/auth_token" in c for c in config[f"{who}_setup_commands"])
    (head,) = (c for c in config["head_start_ray_commands"] if "ray start" in c)
    assert "--dashboard-host=127.0.0.1" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("path", [CLOUD, LOCAL], ids=lambda p: p.stem)
def test_nodes_install_this_project_at_the_versions_that_were_tested(path):
    config = launched(path)
    commands = "\n".join(config["head_setup_commands"] + config["worker_setup_commands"])
    assert commands.count("--constraint constraints.txt --editable '.[cluster]'") == 2
    assert commands.count("uv venv --python 3.11") == 2
    assert not re.search(r"\.whl|nightly|latest|dev0|pip install -U", commands)
    assert PINS["ray"] == "2.60.0"
    assert {"boto3", "aiohttp-cors", "opencensus"} <= set(PINS), "what the extra `cluster` brings is pinned too"
    for here in config["file_mounts"].values():
        assert here.startswith("~") or (ROOT / here).exists()
    # All that the package consists of is copied.
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in packages} <= set(config["file_mounts"].values())


def test_machines_in_the_cloud_come_on_demand_and_end_for_good():
    config = launched(CLOUD)
    gpu = config["available_node_types"]["gpu"]
    assert gpu["min_workers"] == 0 < gpu["max_workers"] <= config["max_workers"]
    assert config["available_node_types"][config["head_node_type"]]["max_workers"] == 0
    assert config["provider"]["cache_stopped_nodes"] is False
    marked = [line for line in CLOUD.read_text().splitlines() if re.search(r"# \([123]\)", line)]
    assert len(marked) == 3


def test_aws_knows_every_field_of_its_machines():
    """Checked with Amazon's own description of the request that starts a machine."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import ParamValidator

    shape = session.get_service_model("ec2").operation_model("RunInstances").input_shape
    for kind in launched(CLOUD)["available_node_types"].values():
        report = ParamValidator().validate(kind["node_config"] | {"MinCount": 1, "MaxCount": 1}, shape)
        assert not report.has_errors(), report.generate_report()


def test_the_local_file_is_made_from_the_cloud_file():
    assert LOCAL.read_text() == text(EXAMPLE), (
        "type: python -m cluster.local " + " ".join(EXAMPLE) + " > cluster/local.yaml"
    )
    cloud, local = launched(CLOUD), launched(LOCAL)
    assert local["provider"] == {"type": "local", "head_ip": EXAMPLE[1], "worker_ips": EXAMPLE[3:]}
    assert local["head_setup_commands"] == cloud["head_setup_commands"]
    assert local["file_mounts"] == cloud["file_mounts"]
    assert local["max_workers"] == 2


def test_an_environment_that_is_there_replaces_the_installation_and_nothing_else():
    made, given = yaml.safe_load(text(EXAMPLE)), yaml.safe_load(text([*EXAMPLE, "--environment", "/opt/venv"]))
    assert {key for key in made if made[key] != given[key]} == {"setup_commands"}
    commands = "\n".join(given["setup_commands"])
    assert "uv" not in commands
    assert 'PATH="/opt/venv/bin:$PATH"' in commands
    assert "chmod 600 ~/.ray/auth_token" in commands


def test_the_kuberay_job_is_closed_pinned_and_keeps_its_results():
    volume, job = yaml.safe_load_all(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == PINS["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert len(images) == 1
    assert not images.pop().endswith(":latest")
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    assert "dashboard-host" not in cluster["headGroupSpec"]["rayStartParams"]
    for pod in pods:
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
    # What the command writes is on the volume that outlives the cluster.
    (mount,) = pods[0]["containers"][0]["volumeMounts"]
    assert f"--out {mount['mountPath']}" in job["spec"]["entrypoint"]
    assert pods[0]["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_image_is_of_the_pinned_ray():
    lines = (ROOT / "cluster/Dockerfile").read_text().splitlines()
    assert f"FROM rayproject/ray:{PINS['ray']}-py311-gpu" in lines
    assert any("--constraint constraints.txt" in line for line in lines)


# What a sweep makes of such a file on the cluster's head --------------------------------------------------------------

HERE = {"CPU": 0.0, "node:here": 1.0, HEAD: 1.0}
GPU = {"CPU": 4.0, "GPU": 1.0}


def test_a_sweep_counts_on_machines_that_are_still_to_come(tmp_path):
    plan = launched(CLOUD)
    plan["available_node_types"]["gpu"]["resources"] = {"CPU": 4, "GPU": 1}  # as Ray asks AWS
    path = tmp_path / "ray_bootstrap_config.yaml"
    path.write_text(yaml.safe_dump(plan))
    least, most = planned(path)
    assert (least, most) == (0, [GPU] * 4)
    assert with_those_to_come([HERE], most) == [HERE, *[GPU] * 4]
    there = GPU | {"node:1.2.3.4": 1.0, "memory": 1e9}
    assert with_those_to_come([HERE, there], most) == [HERE, there, *[GPU] * 3]
    assert with_those_to_come([HERE, *[there] * 5], most) == [HERE, *[there] * 5]
    assert len(with_those_to_come([HERE | GPU], most)) == 5, "the head is not one of those that come on demand"
    path.write_text(yaml.safe_dump(plan | {"max_workers": 3}))
    assert planned(path) == (0, [GPU] * 3)

    wanted = tiny(cluster={"actors": 4, "gpu_per_actor": 1})
    with pytest.raises(InputError, match="the cluster has 0 CPU and 0 GPU on 1 machine"):
        share(wanted, [HERE], 1, "here")
    assert share(wanted, with_those_to_come([HERE], most), 1, "here").actors == 4


def test_of_machines_of_ones_own_only_the_number_is_known_before(tmp_path):
    path = tmp_path / "ray_bootstrap_config.yaml"
    path.write_text(yaml.safe_dump(launched(LOCAL)))
    assert planned(path) == (2, [])
    assert planned(tmp_path / "nothing") == (0, [])


def test_a_sweep_waits_for_machines_that_are_starting_and_then_does_with_what_is_there(
    ray_cluster, monkeypatch, capsys
):
    here = ray_cluster.util.get_node_ip_address()
    (node,) = (node["Resources"] for node in ray_cluster.nodes())
    monkeypatch.setattr(machines, "planned", lambda: (0, [GPU]))
    assert machines.machines(here, Console()) == [node, GPU]
    assert machines.machines("192.0.2.99", Console()) == [node], "a plan that is found on another machine than the head"
    monkeypatch.setattr(machines, "planned", lambda: (2, []))
    monkeypatch.setattr(machines, "MACHINES_S", 2.5)
    began = time.monotonic()
    assert machines.machines(here, Console()) == [node]
    assert time.monotonic() - began > 2.5
    assert capsys.readouterr().out == "1 of 3 machines are there; waiting for the others\n"
