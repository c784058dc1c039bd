"""From measurements to the table of results.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

HEAD = """# Benchmarks

`make bench` made this. A ratio is the median over rounds, with the tenth and ninetieth percentile, of the time that a
round of the contender took over that of the same round of the reference, run right after it: the same SGD steps on the
same images from the same weights, which is checked. `plain` is a loop in plain PyTorch in {cores} processes with one
thread each; `tuned` is the same loop in the fastest configuration found; the null run is `plain` against itself, and
shows what cannot be told apart. CPU time and memory (PSS) are those of all processes of a contender. `ready` is the
time from the start of its first process to the end of its first round; bytes are what clients are sent and send.

Machine: {cpu}, {cores} cores, {memory_gb} GB; Python {python}, torch {torch}, ray {ray}; {date}.
"""


#: The parts of a round, as its metrics have them.
WORDS = {
    "clients": "training",
    "wait": "messages and waiting for the last actor",
    "move": "placing weights in shared memory",
    "server": "the server's half",
}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Write a median with the tenth and ninetieth percentile."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):.{digits}f} ({tenths[0]:.{digits}f} to {tenths[-1]:.{digits}f})"


def ratios(pairs: Sequence[dict[str, Any]], reference: str, what: int) -> list[float]:
    """Return the ratio of each round: `what` is 0 for wall time and 1 for CPU time."""
    return [t[p["name"]][what] / t[reference][what] for p in pairs for t in p["rounds"] if t[reference][what]]


def side_by_side(found: dict[str, Any]) -> list[str]:
    """Return the table of one workload."""
    lines = [
        "| | wall / plain | CPU / plain | wall / tuned | CPU / tuned | ready | peak memory | MB a round | accuracy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(pair["name"] for pair in found["pairs"]):
        pairs = [pair for pair in found["pairs"] if pair["name"] == name]
        cells = [spread(ratios(pairs, reference, what)) for reference in ("plain", "tuned") for what in (0, 1)]
        middle = {key: statistics.median(p[key] for p in pairs) for key in ("ready_s", "memory_mb", "accuracy")}
        moved = pairs[0]["bytes"]
        cells += [f"{middle['ready_s']:.0f} s", f"{middle['memory_mb'] / 1024:.2f} GB"]
        cells += [f"{moved / 1e6:.1f}" if moved else "-", f"{middle['accuracy']:.3f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ours = [pair for pair in found["pairs"] if pair["name"] == "fedtail"]
    beyond = [seconds for pair in ours for seconds in pair["beyond_s"]]
    rounds = [parts for pair in ours for parts in pair["profile"]]
    shares = {part: statistics.median(r[part] / sum(r.values()) for r in rounds) for part in rounds[0]}
    return [
        *lines,
        "",
        f"A round of ours beyond the training of `plain`: {spread(beyond)} s. Where its time goes: "
        + ", ".join(f"{WORDS[part]} {share:.1%}" for part, share in shares.items())
        + ".",
    ]


def growth(found: dict[str, Any]) -> list[str]:
    """Return what ten times the population costs."""
    turns = [turn for run in found["runs"] for turn in run["rounds"]]
    wall, cpu = ([turn["10000"][i] / turn["1000"][i] for turn in turns] for i in (0, 1))
    memory = [run["memory_mb"]["10000"] / run["memory_mb"]["1000"] for run in found["runs"]]
    return [f"10,000 clients over 1,000: wall {spread(wall)}, CPU {spread(cpu)}, memory {spread(memory)}."]


def sweep(found: dict[str, Any]) -> list[str]:
    """Return what a sweep saves."""
    by_hand = 16 * statistics.mean(found["single_s"])
    return [
        f"Sixteen trials, two at a time: {16 * 3600 / found['together_s']:.0f} trials per hour, "
        f"{by_hand / found['together_s']:.2f} times those of one command after another.",
        "Sixteen values of a hyperparameter that only touches predictions: "
        + ", ".join(
            f"{many / one:.2f} times one run of {rounds} rounds ({one:.0f} s)"
            for rounds, (one, many) in found["post_hoc_s"].items()
        )
        + ".",
    ]


def command(found: dict[str, Any]) -> list[str]:
    """Return what the command costs around its rounds."""
    return [
        f"By `python -m orchestrator.tune`: {found['first_round_s']:.0f} s from the command to the first finished "
        f"round; peak memory {found['memory_mb'] / 1024:.2f} GB with Ray and MLflow; checkpoints and "
        f"the log take {found['written_s'] / found['rounds_s']:.1%} of the rounds' time; the process that runs Tune, "
        f"MLflow and the display takes {found['command_cpu'] / found['all_cpu']:.1%} of all CPU time."
    ]


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [HEAD.format(**found["machine"])]
    for name in sorted(key for key in found if key.startswith("W") and "pairs" in found[key]):
        lines += [f"## {name}: {found[name]['about']}", "", *side_by_side(found[name]), ""]
        if name == "W1" and "command" in found:
            lines += [*command(found["command"]), ""]
    if "W5" in found:
        lines += [f"## W5: {found['W5']['about']}", "", *growth(found["W5"]), ""]
    if "W6" in found:
        lines += ["## W6: sweeps", "", *sweep(found["W6"]), ""]
    return "\n".join(lines)
