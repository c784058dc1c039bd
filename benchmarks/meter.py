"""A contender seen from outside: wall time, CPU time and memory of its whole process tree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> dict[int, list[str]]:
    """Return the processes that descend from one, itself included, each with the fields of its /proc/PID/stat."""
    found: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
    inside, fresh = {root}, {root}
    while fresh:
        fresh = {pid for pid, fields in found.items() if int(fields[1]) in fresh} - inside
        inside |= fresh
    return {pid: found[pid] for pid in inside if pid in found}


def cpu(root: int) -> float:
    """Return the CPU seconds that a process tree has used, those of its ended processes included."""
    return sum(sum(map(int, fields[11:15])) for fields in tree(root).values()) / TICK


def memory(root: int) -> float:
    """Return the megabytes of a process tree, shared pages counted once (PSS)."""
    total = 0
    for pid in tree(root):
        try:
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("\nPss:")[1].split()[0])
        except (OSError, IndexError):
            continue
    return total / 1024


class Peak:
    """The highest memory of a process tree while inside."""

    def __init__(self, root: int) -> None:
        self.root, self.megabytes = root, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def look(self) -> None:
        """Take one more look."""
        self.megabytes = max(self.megabytes, memory(self.root))

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.look()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Round:
    """What a round of a contender cost, and what it says of it."""

    wall: float
    cpu: float
    facts: dict[str, Any]


class Contender:
    """A contender in processes of its own; the first round and what came before it are measured apart."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.log, began = log, time.monotonic()
        # One thread for everything that is not asked to take more, as Ray has it too.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                env=environment,
            )
        with Peak(self.process.pid) as self.peak:
            self.first = self.round()
        self.ready_s = time.monotonic() - began

    def round(self) -> Round:
        """Let it run a round."""
        cpu_before, began = cpu(self.process.pid), time.perf_counter()
        facts = self._ask("")
        return Round(time.perf_counter() - began, cpu(self.process.pid) - cpu_before, facts)

    def save(self, path: Path) -> None:
        """Let it save its weights as an .npy file."""
        self._ask(str(path))

    def _ask(self, wish: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(wish + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]
        except (BrokenPipeError, json.JSONDecodeError):
            self.close()
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.process.args} has ended; the end of {self.log}:\n{tail}") from None

    def close(self) -> None:
        """End it: its input ends, and what has not gone after a while is killed."""
        assert self.process.stdin is not None
        started = tree(self.process.pid)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        time.sleep(1)  # for what its end ends
        for pid, fields in started.items():
            try:
                same = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19] == fields[19]
                if same:  # as old as the one that we started, so not another with its number
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
