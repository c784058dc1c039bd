"""Ray: a fixed pool of client actors, each pinned to a fraction of a GPU and serving any client."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from algorithms.params import Params
from orchestrator.data import DataError, Split
from orchestrator.experiment import Experiment
from orchestrator.jobs import Job, Result
from orchestrator.worker import ClientFailed, Worker, claim

BUNDLES = 2  #: messages to each actor in which a call would be sent if all were of the size of the first
START_S = 900.0  #: a pool with no live actor for this long gives up; a new machine in a cloud takes minutes


@ray.remote(max_restarts=0)
class ClientActor:
    """A process that does jobs; it keeps no truth, so its death costs no more than the job at hand."""

    def __init__(self, gpu: float) -> None:
        keep_memory()
        self.device = claim(gpu)

    def load(self, experiment: Experiment, dataset: Any, split: Split) -> dict[str, Any]:
        """Get ready to serve an experiment; return where this is."""
        torch.set_num_threads(experiment.cluster.threads)
        self.worker = Worker(experiment, dataset, split, self.device)
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
            "device": str(self.device),
        }

    def do(self, jobs: Sequence[Job], shared: tuple[Any, ...], origin: Params) -> list[Result]:
        """Do neighbouring jobs, one after another."""
        return self.worker.do_all(jobs, shared, origin)


class Pool:
    """The engine on Ray: sends jobs to idle actors, longest first, and again when an actor dies."""

    def __init__(self, actors: int, cpu: float, gpu: float) -> None:
        self.size, self.cpu, self.gpu = actors, cpu, gpu
        self.restarts = 0
        self.where: dict[Any, dict[str, Any]] = {}  # ready actors
        self._starting: dict[Any, Any] = {}  # future of load() -> actor
        self._answer_s, self._job_s = 0.0, 0.0  # what it takes to receive an answer and to do a job, as seen lately

    def load(self, experiment: Experiment, dataset: Any, split: Split) -> None:
        """Make all actors serve an experiment; the data set is a reference into the object store."""
        self.restarts = 0
        self._load = experiment, dataset, ray.put(split)
        self._sizes = np.append(split.counts.sum(1), len(split.server))
        self.failures = experiment.failures
        self._told = False  # those who are there hear of it with their first job: perhaps there is none
        if not self.where and not self._starting:
            self._tell()

    def _tell(self) -> None:
        """Let actors get ready, new ones if there are none."""
        alive = [*self.where, *self._starting.values()]
        self.where, self._starting = {}, {}
        for actor in alive or [self._create() for _ in range(self.size)]:
            self._starting[actor.load.remote(*self._load)] = actor
        self._told = True

    def places(self) -> list[dict[str, Any]]:
        """Return where the actors that are ready work: host, node, process, device."""
        return list(self.where.values())

    def put(self, value: Any) -> Any:
        """Put a value into the object store, once for all actors."""
        return ray.put(value)

    def run(self, jobs: Sequence[Job], shared: Any, origin: Any) -> list[Result]:
        """Do all jobs and return their results in order, some perhaps in one."""
        if not self._told:
            self._tell()
        results: dict[range, list[Result]] = {}
        waiting = [range(0, len(jobs))] if jobs else []
        flying: dict[Any, tuple[range, Any, float]] = {}
        attempts, work = [0] * len(jobs), [int(self._sizes[list(job.ids)].sum()) for job in jobs]
        idle, lonely_since = list(self.where), time.monotonic()
        while waiting or flying:
            while waiting and idle:
                some = self._next(waiting, work)
                actor = idle.pop()
                flying[actor.do.remote([jobs[i] for i in some], shared, origin)] = some, actor, time.monotonic()
            ready, _ = ray.wait([*flying, *self._starting], num_returns=1, timeout=1.0)
            for future in ready:
                if future in self._starting:
                    idle += self._arrive(future)
                    continue
                some, actor, _ = flying.pop(future)
                try:
                    began = time.perf_counter()
                    results[some] = ray.get(future)
                    self._answer_s += (time.perf_counter() - began - self._answer_s) / 8
                    self._job_s += (sum(r.seconds for r in results[some]) / len(some) - self._job_s) / 8
                    idle.append(actor)
                except RayTaskError as error:
                    raise error.cause if isinstance(error.cause, ClientFailed | DataError) else error from None
                except RayError as error:
                    self._bury(actor, [jobs[i] for i in some], max(attempts[i] for i in some), error)
                    for i in some:
                        attempts[i] += 1
                    waiting.append(some)
            for some in self._time_out(flying, jobs):
                results[some] = [_without(jobs[i], self.failures.client_timeout_s or 0) for i in some]
            lonely_since = time.monotonic() if self.where else lonely_since
            if time.monotonic() - lonely_since > START_S:
                raise RuntimeError(f"no client actor could be started within {START_S:.0f} s; see `ray status`")
        return [result for some in sorted(results, key=lambda some: some.start) for result in results[some]]

    def _next(self, waiting: list[range], work: Sequence[int]) -> range:
        """Take what an actor does next: the longest there is, of many jobs while much is left and few towards the end.

        Each is a whole branch of the tree in which uploads are added up, so that the actor can do so.
        """
        left = sum(map(len, waiting))
        most = 1 if self.failures.client_timeout_s else max(1, left // (BUNDLES * self.size), self._fewest(len(work)))
        while large := [some for some in waiting if len(some) > most]:
            for some in large:
                half = some.start + (1 << (len(some) - 1).bit_length() - 1)
                waiting.remove(some)
                waiting += range(some.start, half), range(half, some.stop)
        waiting.sort(key=lambda some: (sum(work[some.start : some.stop]), -some.start))
        return waiting.pop()

    def _fewest(self, jobs: int) -> int:
        """Return of how many jobs bundles must be, or answers would come faster than the driver can receive them."""
        wanted = self.size * self._answer_s / self._job_s if self._job_s else 0.0
        wanted = min(wanted, jobs / self.size)  # but nobody should be idle for that
        return 1 << math.ceil(math.log2(wanted)) if wanted > 1 else 1

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.where, *self._starting.values()]:
            ray.kill(actor)
        self.where, self._starting = {}, {}

    def _create(self) -> Any:
        return ClientActor.options(num_cpus=self.cpu, num_gpus=self.gpu).remote(self.gpu)  # type: ignore[attr-defined]

    def _arrive(self, future: Any) -> list[Any]:
        """Note that an actor is ready, or that it never will be."""
        actor = self._starting.pop(future)
        try:
            self.where[actor] = ray.get(future)
            return [actor]
        except RayActorError as error:
            self._replace(f"a client actor died while starting: {error}")
            return []

    def _bury(self, actor: Any, jobs: Sequence[Job], attempts: int, error: RayError) -> None:
        """Replace an actor that died at its jobs."""
        self.where.pop(actor, None)
        ray.kill(actor)  # it may only be out of reach, and would keep its place
        if attempts >= self.failures.retries:
            raise RuntimeError(
                f"clients {[id for job in jobs for id in job.ids]} lost their actor {attempts + 1} times in round "
                f"{jobs[0].round}; the last reason: {error}"
            )
        self._replace(str(error))

    def _replace(self, why: str) -> None:
        self.restarts += 1
        if self.restarts > 100 * self.size:
            raise RuntimeError(f"client actors keep dying ({self.restarts} so far); the last reason: {why}")
        actor = self._create()
        self._starting[actor.load.remote(*self._load)] = actor

    def _time_out(self, flying: dict[Any, tuple[range, Any, float]], jobs: Sequence[Job]) -> list[range]:
        """End the actors of jobs that take too long; return those jobs that are given up, the others are done again."""
        limit, given_up = self.failures.client_timeout_s or math.inf, list[range]()
        for future, (some, actor, since) in list(flying.items()):
            if time.monotonic() - since > limit * sum(len(jobs[i].ids) for i in some):
                ray.kill(actor)  # whose jobs are then found dead like any other
                if self.failures.timeout == "skip" and jobs[some[0]].task == "run":
                    del flying[future]
                    self.where.pop(actor, None)
                    self._replace(f"an actor took longer than {limit:g} s for each of its clients")
                    given_up.append(some)
        return given_up


def _without(job: Job, limit: float) -> Result:
    """Return what a round goes on with in place of clients that it does not wait for any longer."""
    return Result(late={id: f"client {id}, round {job.round}: no answer within {limit:g} s" for id in job.ids})


def keep_memory() -> None:
    """Let malloc keep what it has: giving activations back to the kernel after each step costs a fifth of the time."""
    trim_threshold, mmap_threshold = -1, -3
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)
