"""What trials leave in their directories, read for whoever mirrors it elsewhere; the files are the spool."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Point = tuple[str, float, int, int]  # key, value, timestamp, step


def parameters(experiment: Mapping[str, Any]) -> dict[str, str]:
    """Flatten an experiment to dotted paths; the chain `[name: {knob: 1}]` becomes `algorithm.name.knob`."""
    flat: dict[str, str] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{path}.{key}" if path else str(key), inner)
        elif path == "algorithm" and isinstance(value, list):
            names: list[str] = []
            for i, link in enumerate(value):
                name, fields = next(iter(link.items())) if isinstance(link, Mapping) and link else (str(link), None)
                walk(f"algorithm.{i}.{name}" if name in names else f"algorithm.{name}", fields or {})
                names.append(name)
            flat["algorithm"] = "+".join(names)
        else:
            flat[valid_name(path)] = str(value)[:6000]

    walk("", experiment)
    return flat


@dataclass
class SpooledTrial:
    """A trial being mirrored: what was asked for it, and how far its metrics are read."""

    folder: Path
    reopen: bool = False
    ended: bool = False
    at: int = 0  # bytes
    lines: int = 0
    nonfinite: int = 0
    steps: dict[str, int] = field(default_factory=dict)  # the last one of each metric
    pending: list[tuple[int, list[Point], dict[str, str]]] = field(default_factory=list)  # line number, points, tags

    def readable(self) -> list[dict[str, Any]]:
        """Return the lines that can be read."""
        path, found = self.folder / "metrics.jsonl", list[dict[str, Any]]()
        for raw in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError):
                found.append(json.loads(raw))
        return [line for line in found if isinstance(line, dict)]

    def read(self, sent: int) -> None:
        """Take in the complete lines that were added; the first `sent` of the file are delivered already."""
        path = self.folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self.at:
            return
        with path.open("rb") as file:
            file.seek(max(self.at - 1, 0))
            if self.at and file.read(1) != b"\n":  # no longer what we read: a resume cut it back to its checkpoint
                file.seek(0)
                self.at = self.lines = self.nonfinite = 0
                self.pending.clear()
            data = file.read()
        for raw in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self.at += len(raw)
            self.lines += 1
            points, tags = self._parse(raw)
            if self.lines > sent:
                self.pending.append((self.lines, points, tags))

    def _parse(self, raw: bytes) -> tuple[list[Point], dict[str, str]]:
        try:
            line = json.loads(raw)
            step, stamp, metrics = int(line["round"]), int(line["time"] * 1000), dict(line["metrics"])
        except (ValueError, KeyError, TypeError):  # torn by a crash, and written on by the resume
            return [], {}
        points: list[Point] = []
        for key, value in metrics.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                self.nonfinite += 1  # MLflow would store inf as 1.8e308
            elif self.steps.get(key, -1) < step:  # else a round that was run again: its first report stands
                points.append((valid_name(key), float(value), stamp, step))
                self.steps[key] = step
        counted = {"orchestrator.nonfinite": str(self.nonfinite)} if self.nonfinite else {}
        return points, {"phase": str(line.get("phase")), **counted}


def valid_name(text: str) -> str:
    """Make a name MLflow accepts."""
    safe = re.sub(r"[^\w\-. :/]", "_", text)
    return "/".join(part for part in safe.split("/") if part.strip("."))[:250] or "_"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON mapping, empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def count_lines(folder: Path) -> int:
    """Count the whole lines of a trial's log."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def written_at(path: Path) -> int:
    """Say when a file was written: so an import has the run's own times."""
    return int((path.stat().st_mtime if path.exists() else time.time()) * 1000)
