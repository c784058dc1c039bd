"""What a sweep found: summary.json for scripts, a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from orchestrator.checkpoint import status_of, write_json
from orchestrator.experiment import Search

SCHEMA = 1
HEADLINE = "generic/acc", "personal/acc_dist", "personal/acc_owned", "personal/acc_worst10"


def lower_is_better(metric: str) -> bool:
    """Tell losses, costs and clock times from accuracies."""
    return metric.startswith(("train/", "time/", "bytes/", "clients/"))


def history(directory: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a trial's log."""
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def describe_trial(directory: Path, run_id: str | None) -> dict[str, Any]:
    """Return a trial's record: status, last and best of every metric, and where the best was."""
    trial = json.loads((directory / "trial.json").read_text(encoding="utf-8"))
    status = status_of(directory)
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    best_at: dict[str, dict[str, Any]] = {}
    lines = history(directory)
    for line in lines:
        for metric, value in line["metrics"].items():
            last[metric] = value
            sign = -1 if lower_is_better(metric) else 1
            if metric not in best or sign * value > sign * best[metric]:
                best[metric], best_at[metric] = value, {"phase": line["phase"], "round": line["round"]}
    return {
        "id": trial["id"],
        "name": trial["name"],
        "params": trial["params"],
        "status": status["status"],
        "error": status.get("error"),
        "last": last,
        "best": best,
        "best_at": best_at,
        "seconds": sum(line["metrics"].get("time/round", 0.0) for line in lines),
        "run_id": run_id,
        "fingerprint": status.get("fingerprint"),
        "reused": [],
    }


def write_summary(folder: Path, search: Search, run_ids: Mapping[str, str | None]) -> dict[str, Any]:
    """Write summary.json and return it."""
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


def best_trial(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the finished trial whose last value of the chosen metric is best."""
    metric, sign = summary["metric"], 1 if summary["mode"] == "max" else -1
    ranked = [t for t in summary["trials"] if t["status"] in ("FINISHED", "STOPPED") and metric in t["last"]]
    return max(ranked, key=lambda t: sign * t["last"][metric], default=None)


def table(summary: Mapping[str, Any]) -> Table:
    """Return the trials as a table for people, the best one marked."""
    best = best_trial(summary)
    shown = [*dict.fromkeys((*HEADLINE, summary["metric"]))]
    result = Table(title=f"{summary['name']}: last round of each trial", title_justify="left")
    for column in ("", "trial", "name", "status", *shown, "seconds"):
        result.add_column(column, justify="left" if column in ("", "trial", "name", "status") else "right")
    for t in summary["trials"]:
        values = [_number(t["last"].get(m)) for m in shown]
        mark = "*" if best is not None and t["id"] == best["id"] else ""
        result.add_row(mark, t["id"], t["name"], t["status"], *values, f"{t['seconds']:.1f}")
    return result


def markdown(summary: Mapping[str, Any], metrics: Sequence[str] = HEADLINE) -> str:
    """Return the trials as a Markdown table, for notes."""
    rows = [["trial", "name", "status", *metrics]]
    for trial in summary["trials"]:
        rows.append([trial["id"], trial["name"], trial["status"], *(_number(trial["last"].get(m)) for m in metrics)])
    head, *body = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
