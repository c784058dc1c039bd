"""The limit: FedAvg as a plain PyTorch loop without any framework, in one or more processes.

`plain` is what a careful user writes. `tuned` is the same in the fastest configuration found for each network; to look
for it on your machine: `python benchmarks/plain.py TASK.npz [ROUNDS]`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from meter import cpu
from task import Task, has_norms, read, write


@dataclass(frozen=True)
class Setting:
    """How a plain loop runs."""

    processes: int
    threads: int
    channels_last: bool = False
    fused: bool = False  #: the optimizer in one kernel
    keep_memory: bool = False  #: what a step has freed is not given back to the kernel, which would clear it anew


CORES = len(os.sched_getaffinity(0))
PLAIN = Setting(processes=CORES, threads=1)
ONE_PROCESS = Setting(processes=1, threads=CORES)
#: The fastest found here, by network.
TUNED = {
    "cnn_small": Setting(CORES, 1, keep_memory=True),
    "cnn_mupfl": Setting(CORES, 1, channels_last=True, keep_memory=True),
    "resnet8": Setting(CORES, 1, channels_last=True, keep_memory=True),
    "resnet18": Setting(CORES, 1, channels_last=True, keep_memory=True),
}


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  #: as malloc.h of glibc numbers them


@dataclass
class Report:
    """What one process did of a round."""

    steps: int
    samples: int
    trained: int  #: samples without those that batch norm leaves over
    training_s: float


class Loop:
    """FedAvg: the clients of a round are dealt to the processes, which share one vector of weights."""

    def __init__(self, path: str | Path, setting: Setting) -> None:
        self.task, self.round = Task(path), 0
        self.weights = self.task.weights.clone().share_memory_()
        self.sums = torch.zeros(setting.processes, len(self.weights)).share_memory_()
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for place in range(setting.processes):
            ours, theirs = spawn.Pipe()
            arguments = (str(path), setting, self.weights, self.sums[place], theirs)
            process = spawn.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def advance(self) -> Report:
        """Run the next round."""
        chosen = list(zip(self.task.clients[self.round], self.task.seeds[self.round], strict=True))
        for pipe, share in zip(self.pipes, self.deal(chosen), strict=True):
            pipe.send(share)
        reports = [pipe.recv() for pipe in self.pipes]
        samples = sum(report.samples for report in reports)
        torch.sum(self.sums, 0, out=self.weights)
        self.weights /= samples
        self.round += 1
        steps, trained = sum(r.steps for r in reports), sum(r.trained for r in reports)
        return Report(steps, samples, trained, max(r.training_s for r in reports))

    def deal(self, chosen: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Deal clients to processes: the largest first, each to the one that has least."""
        shares: list[list[tuple[int, int]]] = [[] for _ in self.pipes]
        for client, seed in sorted(chosen, key=lambda pair: -self.task.size(pair[0])):
            min(shares, key=lambda share: sum(self.task.size(c) for c, _ in share)).append((client, seed))
        return shares

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def serve(path: str, setting: Setting, weights: torch.Tensor, total: torch.Tensor, pipe: Connection) -> None:
    """Train the clients that are asked for, round after round, and add up their weights."""
    torch.set_num_threads(setting.threads)
    if setting.keep_memory:
        libc = ctypes.CDLL("libc.so.6")
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(parameter, 1 << 30)
    task = Task(path, setting.channels_last)
    model, mine, _ = task.model(), torch.empty_like(weights), task.x
    norms = has_norms(model)
    pipe.send(None)
    while (share := pipe.recv()) is not None:
        began, report = time.perf_counter(), Report(0, 0, 0, 0.0)
        total.zero_()
        for client, seed in share:
            write(model, weights)
            report.steps += task.train(model, client, seed, setting.fused)
            report.samples += task.size(client)
            report.trained += task.trained(client, norms)
            total.add_(read(model, out=mine), alpha=task.size(client))
        report.training_s = time.perf_counter() - began
        pipe.send(report)


def main() -> None:
    """Measure all settings in turns, and print the CPU seconds of a round of each."""
    path, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    settings = [Setting(CORES, 1, *flags) for flags in itertools.product((False, True), repeat=3)]
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    loops = {setting: Loop(path, setting) for setting in settings}
    for _ in range(1 + rounds):  # the first warms up
        for setting, loop in loops.items():
            before = sum(cpu(process.pid) for process in loop.processes)
            loop.advance()
            seconds[setting].append(sum(cpu(process.pid) for process in loop.processes) - before)
    for setting in sorted(settings, key=lambda s: statistics.median(seconds[s][1:])):
        print(f"{statistics.median(seconds[setting][1:]):7.3f} s  {setting}")
    for loop in loops.values():
        loop.close()


if __name__ == "__main__":
    main()
