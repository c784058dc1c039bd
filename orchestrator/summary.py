"""What a sweep found: summary.json for scripts, a table for people."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.sweep_file import Search

SCHEMA = 1
HEADLINE = "generic/acc", "personal/acc_dist", "personal/acc_owned", "personal/acc_worst10"
OF_PIXELS = "generic/miou", "generic/macc", "personal/miou", "personal/macc", "personal/miou_worst10"  #: segmentation


def headline(trials: Iterable[Mapping[str, Any]], metric: str = "") -> tuple[str, ...]:
    """Return the metrics that are told first of such trials; while they have none, the one searched for decides."""
    reported = {metric, *(metric for trial in trials for metric in trial["last"])}
    return OF_PIXELS if any(metric.endswith(("/miou", "/macc")) for metric in reported) else HEADLINE


def lower_is_better(metric: str) -> bool:
    """Tell losses, costs and clock times from accuracies."""
    return metric.startswith(("train/", "time/", "bytes/", "clients/"))


def history(directory: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a trial's log."""
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reused(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which rounds of a log were taken over from other trials."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if "reused" in line and "round" in line:
            found.setdefault((str(line.get("phase")), str(line["reused"])), []).append(line["round"])
    return [f"{phase}: rounds {rounds[0]} to {rounds[-1]} of {trial}" for (phase, trial), rounds in found.items()]


def extremes(
    lines: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Return the last and the best value of every metric in a log, and where the best was."""
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    best_at: dict[str, dict[str, Any]] = {}
    for line in lines:
        for metric, value in line["metrics"].items():
            last[metric] = value
            sign = -1 if lower_is_better(metric) else 1
            if metric not in best or sign * value > sign * best[metric]:
                best[metric], best_at[metric] = value, {"phase": line["phase"], "round": line["round"]}
    return last, best, best_at


def describe_trial(directory: Path, run_id: str | None) -> dict[str, Any]:
    """Return a trial's record: status, last and best of every metric, and where the best was."""
    from orchestrator.checkpoint import status_of  # torch comes with it, which takes longer than most of a report

    trial = json.loads((directory / "trial.json").read_text(encoding="utf-8"))
    status, lines = status_of(directory), history(directory)
    last, best, best_at = extremes(lines)
    return {
        "id": trial["id"],
        "name": trial["name"],
        "params": trial["params"],
        "status": status["status"],
        "error": status.get("error"),
        "last": last,
        "best": best,
        "best_at": best_at,
        "seconds": sum(line["metrics"].get("time/round", 0.0) for line in lines if "reused" not in line),
        "run_id": run_id,
        "fingerprint": status.get("fingerprint"),
        "reused": reused(lines),
    }


def write_summary(folder: Path, search: Search, run_ids: Mapping[str, str | None]) -> dict[str, Any]:
    """Write summary.json and return it."""
    from orchestrator.checkpoint import write_json

    trials = [describe_trial(path, run_ids.get(path.name)) for path in sorted((folder / "trials").iterdir())]
    summary = {
        "schema": SCHEMA,
        "name": folder.name,
        "metric": search.metric,
        "mode": search.mode,
        "trials": trials,
    }
    write_json(folder / "summary.json", summary)
    return summary


@dataclass(frozen=True)
class Configuration:
    """Trials that differ only in their seed."""

    name: str
    trials: tuple[Mapping[str, Any], ...]

    def values(self, metric: str) -> list[float]:
        """Return the last value of a metric in each trial that has ended and reports it."""
        ended = (t for t in self.trials if t["status"] in ("FINISHED", "STOPPED"))
        return [t["last"][metric] for t in ended if metric in t["last"]]

    def show(self, metric: str) -> str:
        """Return the mean over seeds and, where there are several, the standard deviation."""
        values = self.values(metric)
        if not values:
            return "-"
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        return f"{mean(values):.4f}{spread}"


def configurations(summary: Mapping[str, Any]) -> list[Configuration]:
    """Group a sweep's trials by everything but the seed, in the order in which they appear."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for trial in summary["trials"]:
        params = {k: v for k, v in trial["params"].items() if k != "seed"}
        groups.setdefault(json.dumps(params, sort_keys=True), []).append(trial)
    return [Configuration(re.sub(r" seed=\d+", "", ts[0]["name"]), tuple(ts)) for ts in groups.values()]


def best(summary: Mapping[str, Any]) -> Configuration | None:
    """Return the configuration whose mean over seeds of the chosen metric's last value is best."""
    metric, sign = summary["metric"], 1 if summary["mode"] == "max" else -1
    ranked = [c for c in configurations(summary) if c.values(metric)]
    return max(ranked, key=lambda c: sign * mean(c.values(metric)), default=None)


def table(summary: Mapping[str, Any]) -> Table:
    """Return the configurations as a table for people, the best one marked."""
    winner, metric = best(summary), summary["metric"]
    shown = list(dict.fromkeys((*headline(summary["trials"], metric), metric)))
    several = any(len(c.trials) > 1 for c in configurations(summary))
    title = f"{summary['name']}: last round{', mean ± standard deviation over seeds' if several else ''}"
    result = Table(title=title, title_justify="left")
    for column in ("", "trial", "name", "status", *shown, "seconds"):
        result.add_column(column, justify="left" if column in ("", "trial", "name", "status") else "right")
    for c in configurations(summary):
        mark = "*" if winner is not None and c.trials == winner.trials else ""
        ids, states = ([t[key] for t in c.trials] for key in ("id", "status"))
        status = states[0] if len(set(states)) == 1 else f"{states.count('FINISHED')} of {len(states)} FINISHED"
        seconds = f"{sum(t['seconds'] for t in c.trials):.1f}"
        result.add_row(mark, " ".join(ids), c.name, status, *(c.show(m) for m in shown), seconds)
    return result


def markdown(summary: Mapping[str, Any], metrics: Sequence[str] = ()) -> str:
    """Return the configurations as a Markdown table, for notes and READMEs."""
    metrics = metrics or headline(summary["trials"], summary["metric"])
    rows = [["name", "seeds", *metrics]]
    for c in configurations(summary):
        rows.append([c.name, str(len(c.values(metrics[0]) or c.trials)), *(c.show(m) for m in metrics)])
    head, *body = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def main() -> int:
    """Run `python -m orchestrator.summary DIR/NAME [METRIC...]`: print a sweep's results as a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.summary", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR/NAME")
    usual = f"default: {' '.join(HEADLINE)}; of segmentation {' '.join(OF_PIXELS)}"
    parser.add_argument("metrics", nargs="*", metavar="METRIC", help=usual)
    options = parser.parse_args()
    path = options.directory / "summary.json"
    if not path.is_file():
        parser.error(f"{path} does not exist; give the directory of a sweep that has ended")
    summary = json.loads(path.read_text(encoding="utf-8"))
    sys.stdout.write(markdown(summary, options.metrics) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
