"""The real command seen from outside: start-up, memory, what MLflow and checkpoints cost, and sweeps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meter
import yaml
from workloads import Workload

BY_HAND = 4  #: so many of the sixteen trials are run one after another by hand; their mean stands for all


def start(folder: Path, name: str, tree: dict[str, Any], search: str = "") -> subprocess.Popen[bytes]:
    """Start the command on an experiment; an open leaf is a text that begins with its tag."""
    text = yaml.safe_dump({"experiment": tree}, width=10**6).replace("'!grid", "!grid").replace("]'", "]")
    (folder / f"{name}.yaml").write_text(f"{search}\n{text}")
    words = ["-m", "orchestrator.tune", str(folder / f"{name}.yaml"), "--out", str(folder / f"runs-{name}"), "--quiet"]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, start_new_session=True)


def seconds(folder: Path, name: str, tree: dict[str, Any], search: str = "") -> float:
    """Run the command to its end; return its wall time, and fail if a trial did."""
    began = time.monotonic()
    if start(folder, name, tree, search).wait() != 0:
        raise RuntimeError(f"the sweep {name} failed; run {folder / name}.yaml by hand to see why")
    return time.monotonic() - began


def run(workload: Workload, folder: Path) -> dict[str, Any]:
    """Run a workload by the command, from its start to the end of its rounds."""
    print("  the command ...", end=" ", flush=True)
    tree = workload.experiment().model_dump(mode="json", exclude_unset=True)
    began = time.monotonic()
    process = start(folder, "command", tree)
    log = folder / "runs-command" / "command" / "trials" / "0000" / "metrics.jsonl"
    cpu: dict[str, list[float]] = {"all": [], "command": []}
    first = None
    with meter.Peak(process.pid) as peak:
        while process.poll() is None:
            lines = log.read_text().splitlines() if log.exists() else []
            if lines and first is None:
                first = time.monotonic() - began
            if 1 <= len(lines) < tree["rounds"]:
                cpu["all"].append(meter.cpu(process.pid))
                cpu["command"].append(sum(map(int, meter.tree(process.pid)[process.pid][11:13])) / meter.TICK)
            time.sleep(0.1)
    if process.returncode != 0 or first is None:
        raise RuntimeError(f"the command failed; run it by hand: python -m orchestrator.tune {folder}/command.yaml")
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    metrics = [json.loads(line)["metrics"] for line in log.read_text().splitlines()]
    return {
        "first_round_s": first,
        "memory_mb": peak.megabytes,
        "written_s": sum(m["time/checkpoint"] + m["time/tracking"] for m in metrics),
        "rounds_s": sum(m["time/train"] for m in metrics),
        "command_cpu": cpu["command"][-1] - cpu["command"][0],
        "all_cpu": cpu["all"][-1] - cpu["all"][0],
    }


def sweep(folder: Path) -> dict[str, Any]:
    """W6: sixteen short trials in one sweep, two at a time, against commands one after another."""
    print("W6: a sweep of 16 short trials", flush=True)
    tree = {
        "data": {"name": "fashion_mnist", "clients": 50, "alpha": 0.5, "imbalance": 100},
        "rounds": 20,
        "clients_per_round": 10,
        "evaluate": {"every": 20},
    }
    together = seconds(folder, "together", tree | {"seed": f"!grid {list(range(16))}"}, "search: {concurrent: 2}")
    single = [seconds(folder, f"single{seed}", tree | {"seed": seed}) for seed in range(BY_HAND)]
    values: tuple[Any, str] = 0.5, f"!grid {[round(i / 15, 3) for i in range(16)]}"
    post_hoc = {
        rounds: [
            seconds(
                folder,
                f"{name}{rounds}",
                tree | {"algorithm": ["fedavg", {"ecl": {"expert_logit_weight": value}}], "rounds": rounds},
            )
            for name, value in zip(("one", "many"), values, strict=True)
        ]
        for rounds in (20, 100)
    }
    return {"together_s": together, "single_s": single, "post_hoc_s": post_hoc}
