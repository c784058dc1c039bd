"""`python -m cluster.local`: the cluster of cluster.yaml on machines of your own, which `ray up` reaches by ssh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
#: what stands in the committed cluster/local.yaml
EXAMPLE = ["--head", "192.168.1.10", "--workers", "192.168.1.11", "192.168.1.12"]


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m cluster.local", description=__doc__)
    parser.add_argument("--head", required=True, help="address of the machine that keeps the results")
    parser.add_argument("--workers", required=True, nargs="+", help="addresses of the other machines")
    parser.add_argument("--user", default="ubuntu", help="whom to log in as on all of them (default: ubuntu)")
    parser.add_argument("--key", default="~/.ssh/id_ed25519", help="the private key for that, without a passphrase")
    parser.add_argument("--environment", help="a virtual environment that all of them have there; default: make one")
    return parser


def on_premises(cloud: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the cluster on the given machines: all as in the cloud but where they come from."""
    gone = ("max_workers", "idle_timeout_minutes", "available_node_types", "head_node_type")
    local = {key: value for key, value in cloud.items() if key not in gone}
    local["provider"] = {"type": "local", "head_ip": options.head, "worker_ips": options.workers}
    local["auth"] = {"ssh_user": options.user, "ssh_private_key": options.key}
    if options.environment:
        keep = [command for command in cloud["setup_commands"] if "/uv" not in command]
        # What is imported is what was synced, also where the environment has the project already.
        path = "echo 'export PYTHONPATH=$HOME/fedtail  # fedtail' >> ~/.bashrc"
        local["setup_commands"] = [c.replace("$HOME/fedtail/.venv", options.environment) for c in (*keep, path)]
    stop, start = cloud["head_start_ray_commands"]
    # What an earlier cluster of this name has left would make Ray skip the setup of machines, and the newer of Ray's
    # two autoscalers never starts the last of the machines that it is given.
    forget = f"rm -f /tmp/ray/cluster-{cloud['cluster_name']}.state"
    local["head_start_ray_commands"] = [stop, forget, f"export RAY_enable_autoscaler_v2=0; {start}"]
    # `ray down` does not visit these machines: left without a head Ray ends by itself, but wholly only where watched.
    stop, start = cloud["worker_start_ray_commands"]
    watched = start.replace("ray start", "setsid nohup ray start --block") + " > ~/ray.log 2>&1 < /dev/null &"
    local["worker_start_ray_commands"] = [stop, watched]
    return local


class _Dumper(yaml.SafeDumper):
    """Writes every command on lines of its own."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def text(argv: Sequence[str]) -> str:
    """Return the file for the given command line."""
    cloud = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    local = on_premises(cloud, arguments().parse_args(argv))
    command = " ".join(["python -m cluster.local", *argv])
    return f"# Made from cluster.yaml by\n#     {command}\n" + yaml.dump(
        local, Dumper=_Dumper, sort_keys=False, width=110
    )


if __name__ == "__main__":
    sys.stdout.write(text(sys.argv[1:]))
