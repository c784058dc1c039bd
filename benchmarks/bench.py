"""Everything side by side: `python benchmarks/bench.py [W1 ... W6] [--peers] [--repeats N]`, or `make bench`.

Rounds are taken in turns: a round of each contender, then the same round of `plain` and of `tuned`, so that whatever
else the machine does hits all of them. What comes out are ratios; results.md has the table, results.json every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import commands
import numpy as np
import peers
import ratios
import torch
from meter import Contender, Round
from task import Task
from workloads import WORKLOADS, Workload, population, prepare

HERE = Path(__file__).parent
NOISE = 0.02  #: final accuracies further apart are not the same training


def words(name: str, task: Path) -> list[str]:
    """Return the command that starts a contender."""
    if name in peers.PEERS:
        return [str(peers.PYTHON), str(HERE / peers.PEERS[name]), str(task)]
    kind = {"null run": "plain", "one process": "one"}.get(name, name)
    script = ["run_ours.py", str(task)] if name == "fedtail" else ["run_plain.py", str(task), kind]
    return [sys.executable, str(HERE / script[0]), *script[1:]]


def pair(name: str, task: Path, rounds: int, log: Path) -> dict[str, Any]:
    """Run a contender against `plain` and `tuned`, round by round; fail if they do not do the same work."""
    print(f"  {name} ...", end=" ", flush=True)
    began = time.monotonic()
    runners: dict[str, Contender] = {}
    try:
        for who in (name, "plain", "tuned"):
            runners[who] = Contender(words(who, task), log)
        turns: list[dict[str, Round]] = [{who: runner.first for who, runner in runners.items()}]
        for _ in range(rounds - 1):
            turns.append({who: runner.round() for who, runner in runners.items()})
            runners[name].peak.look()
        accuracy = {}
        for who, runner in runners.items():
            runner.save(log.with_suffix(".npy"))
            accuracy[who] = Task(task).accuracy(torch.from_numpy(np.load(log.with_suffix(".npy"))))
    finally:
        for runner in runners.values():
            runner.close()
    for turn in turns:
        did = {(r.facts["steps"], r.facts["samples"]) for r in turn.values()}
        if len(did) != 1:
            raise RuntimeError(f"{name}: steps and samples of a round differ: {did}; its adapter is wrong")
    if max(accuracy.values()) - min(accuracy.values()) > NOISE:
        raise RuntimeError(f"{name}: the final accuracies differ: {accuracy}; its adapter is wrong")
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    last = turns[-1][name].facts
    return {
        "name": name,
        "ready_s": runners[name].ready_s,
        "memory_mb": runners[name].peak.megabytes,
        "accuracy": accuracy[name],
        "bytes": last.get("up", 0) + last.get("down", 0),
        # The first round warms up.
        "rounds": [{who: [r.wall, r.cpu] for who, r in turn.items()} for turn in turns[1:]],
        "profile": [turn[name].facts.get("profile", {}) for turn in turns[1:]],
        "beyond_s": [turn[name].wall - turn["plain"].facts["training_s"] for turn in turns[1:]],
    }


def side_by_side(name: str, workload: Workload, names: list[str], repeats: int, folder: Path) -> dict[str, Any]:
    """Run all contenders on a workload."""
    print(f"{name}: {workload.about}", flush=True)
    task = prepare(workload, folder, name)
    found = [
        pair(who, task, workload.rounds, folder / f"{name}-{who}.log".replace(" ", "-"))
        for _ in range(repeats)
        for who in names
    ]
    return {"about": workload.about, "pairs": found}


def growth(repeats: int, folder: Path) -> dict[str, Any]:
    """W5: rounds with 10,000 clients against rounds with 1,000, in turns."""
    print("W5: digits, 1,000 and 10,000 clients, 100 a round", flush=True)
    sizes, found = (1_000, 10_000), []
    tasks = {size: prepare(population(size, folder), folder, f"W5-{size}") for size in sizes}
    for _ in range(repeats):
        runners = {}
        try:
            for size, task in tasks.items():
                runners[size] = Contender(words("fedtail", task), folder / f"W5-{size}.log")
            turns = [{size: runner.round() for size, runner in runners.items()} for _ in range(9)]
            for runner in runners.values():
                runner.peak.look()
        finally:
            for runner in runners.values():
                runner.close()
        found.append(
            {
                "rounds": [{str(size): [r.wall, r.cpu] for size, r in turn.items()} for turn in turns],
                "memory_mb": {str(size): runner.peak.megabytes for size, runner in runners.items()},
                "ready_s": {str(size): runner.ready_s for size, runner in runners.items()},
            }
        )
    return {"about": "digits, 1,000 and 10,000 clients, 100 a round", "runs": found}


def machine() -> dict[str, Any]:
    """Say where this was measured."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu.partition(":")[2].strip() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": version("ray"),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure what was asked for and write it down beside what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="W1", help="W1 to W6 (default: all)")
    parser.add_argument("--peers", action="store_true", help="also Flower and pfl, in an environment made for them")
    parser.add_argument("--repeats", type=int, default=1, help="how often each pairing is begun anew (default: 1)")
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number, for a quick look")
    parser.add_argument("--data", help="the directory of the data sets (default: as the orchestrator finds them)")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where the numbers go, beside a table")
    asked = parser.parse_args()
    chosen = asked.workloads or [*WORKLOADS, "W5", "W6"]
    unknown = set(chosen) - {*WORKLOADS, "W5", "W6"}
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; choose from {', '.join(WORKLOADS)}, W5, W6")
    names = ["null run", "one process", "fedtail"]
    if asked.peers:
        names += peers.install()
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for name in chosen:
            if name == "W5":
                found[name] = growth(asked.repeats, folder)
            elif name == "W6":
                found[name] = commands.sweep(folder)
            else:
                workload = WORKLOADS[name].at(asked.data, asked.rounds)
                found[name] = side_by_side(name, workload, names, asked.repeats, folder)
                if name == "W1":
                    found["command"] = commands.run(workload, folder)
            found["machine"] = machine()
            asked.out.write_text(json.dumps(found, indent=1))
            asked.out.with_suffix(".md").write_text(ratios.markdown(found))
    print(f"written: {asked.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
