"""Watching a sweep: a live table on a terminal, plain lines elsewhere; both read what the trials write."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from orchestrator.summary import HEADLINE

SHOWN, OF_PIXELS = HEADLINE[:3], ("generic/miou", "personal/miou", "personal/macc")


class _Row:
    """What is known of one trial."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self.status, self.phase, self.round, self.offset = "waiting", "", 0, 0
        self.scores: dict[str, float] = {}


class View:
    """Follows the logs of the running trials from a thread of its own."""

    def __init__(self, folder: Path, trials: Mapping[str, tuple[str, int]], console: Console, quiet: bool) -> None:
        self.folder, self.console, self.quiet = folder, console, quiet
        self.rows = {id: _Row(name, rounds) for id, (name, rounds) in trials.items()}
        self.began, self.done_before = time.monotonic(), 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self._table, transient=True)
        self._thread = threading.Thread(target=self._follow, name="view", daemon=True)

    def __enter__(self) -> View:
        for row_id in self.rows:
            self._read(row_id, announce=False)
        self.done_before = sum(row.round for row in self.rows.values())
        if self.console.is_terminal and not self.quiet:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for row_id in self.rows:
            self._read(row_id)
        if self._live.is_started:
            self._live.stop()

    def add(self, id: str, name: str, rounds: int) -> None:
        """Follow one more trial."""
        with self._lock:
            self.rows = self.rows | {id: _Row(name, rounds)}

    def status(self, id: str, status: str) -> None:
        """Note that a trial has started or ended."""
        self._read(id)
        with self._lock:
            self.rows[id].status = status
        if status != "running":
            self._say(id, status)

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            for id, row in self.rows.items():
                if row.status == "running":
                    self._read(id)

    def _read(self, id: str, announce: bool = True) -> None:
        """Take in the whole lines that a trial has written since the last look."""
        row, path = self.rows[id], self.folder / "trials" / id / "metrics.jsonl"
        with self._lock:
            if not path.exists():
                return
            with path.open("rb") as file:
                file.seek(row.offset)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            row.offset += len(new)
            for line in map(json.loads, new.splitlines()):
                row.phase, row.round = line["phase"], line["round"]
                row.scores |= {k: line["metrics"][k] for k in (*SHOWN, *OF_PIXELS) if k in line["metrics"]}
                if announce and "time/evaluate" in line["metrics"]:
                    self._say(id, "")

    def _say(self, id: str, status: str) -> None:
        """Print a line where there is no live table."""
        if self.quiet or self._live.is_started:
            return
        row = self.rows[id]
        scores = "  ".join(f"{k} {v:.4f}" for k, v in row.scores.items())
        text = status or f"{row.phase}  {scores}"
        line = f"{self._clock():>6}  {id}  {row.name}  round {row.round}/{row.rounds}  {text}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _clock(self) -> str:
        return f"{time.monotonic() - self.began:.0f} s"

    def _left(self) -> str:
        """Guess the time left from the rounds done since the start."""
        total = sum(row.rounds for row in self.rows.values())
        done = sum(row.rounds if row.status in ("finished", "stopped") else row.round for row in self.rows.values())
        fresh = done - self.done_before
        if fresh <= 0:
            return "time left unknown yet"
        return f"about {(total - done) * (time.monotonic() - self.began) / fresh:.0f} s left"

    def _table(self) -> Table:
        with self._lock:
            rows: list[tuple[Any, ...]] = [(id, row) for id, row in self.rows.items()]
            # The running ones matter most; of a long list show those and as many others as fit.
            room = max(5, self.console.height - 8)
            rows = sorted(rows, key=lambda r: (r[1].status != "running", r[1].status == "waiting"))[:room]
            hidden = len(self.rows) - len(rows)
            more = f", {hidden} more trials not shown" if hidden else ""
            table = Table(caption=f"{self._clock()} gone, {self._left()}{more}", caption_justify="left")
            segmented = any(k in row.scores for row in self.rows.values() for k in OF_PIXELS)
            shown = OF_PIXELS if segmented else SHOWN
            for column in ("trial", "name", "status", "phase", "round", *shown):
                table.add_column(column, justify="right" if column in ("round", *shown) else "left")
            for id, row in sorted(rows):
                scores = [f"{row.scores[k]:.4f}" if k in row.scores else "" for k in shown]
                table.add_row(id, row.name, row.status, row.phase, f"{row.round}/{row.rounds}", *scores)
            return table
