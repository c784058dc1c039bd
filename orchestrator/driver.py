"""The round loop: the Driver, which owns all state; no Ray inside."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from algorithms.base import Algorithm, State, Sum
from algorithms.losses import Loss
from algorithms.params import Params
from orchestrator.checkpoint import CheckpointError, RunDirectory, fingerprint
from orchestrator.client import DROPOUT, NOISE, SAMPLING, SERVER, stream
from orchestrator.cohort import TALLEST, Cohort, NothingUsable, cut
from orchestrator.data import Dataset, Split, split
from orchestrator.evaluate import SortedTest
from orchestrator.experiment import Experiment
from orchestrator.gate import form, strangers
from orchestrator.jobs import Job, Result
from orchestrator.plan import Turn, plan
from orchestrator.privacy import epsilon
from orchestrator.scoring import Scored, examples_of, portraits_of, score
from orchestrator.uploads import Part, fold
from orchestrator.values import CPU, own, place, size
from orchestrator.worker import REMEDY, ClientFailed, Worker, network


def data_key(experiment: Experiment) -> str:
    """Return what tells data sets apart."""
    return f"{experiment.data.name}@{experiment.data.root or ''}"


def split_for(experiment: Experiment, dataset: Dataset) -> Split:
    """Cut the data set for the experiment's clients."""
    data = experiment.data
    return split(
        dataset,
        clients=data.clients,
        partition=data.partition,
        alpha=data.alpha,
        imbalance=data.imbalance,
        test_alloc=data.test_alloc,
        validation=data.validation,
        seed=experiment.seed,
        server_images=max(part.server_images for part in experiment.chain().parts),
        classes_per_client=data.classes_per_client,
    )


class Engine(Protocol):
    """Whoever does the jobs."""

    size: int  #: how many workers there are

    def put(self, value: Any) -> Any:
        """Make a value available to all workers, once, and return what to pass to `run`."""

    def run(self, jobs: Sequence[Job], shared: Any, origin: Any) -> list[Result]:
        """Do all jobs and return their results in the order of the jobs."""


class InProcess:
    """The engine without Ray: one worker in this process, job after job."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.size = worker, 1
        torch.set_num_threads(worker.experiment.cluster.threads)

    def put(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def run(self, jobs: Sequence[Job], shared: Any, origin: Any) -> list[Result]:
        """Do the jobs in order."""
        return [self.worker.do(job, shared, origin) for job in jobs]


class Driver:
    """Runs an experiment round by round and owns what must not be lost: the server's and all clients' memory."""

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        split: Split,
        engine: Engine,
        directory: Path | None = None,
        device: torch.device = CPU,
        also: Mapping[str, Algorithm] | None = None,
    ) -> None:
        """Take up the run of a directory, or begin it; `also`: settings to score in the end besides its own."""
        self.experiment, self.dataset, self.split, self.engine = experiment, dataset, split, engine
        self.device = device  # where the server's half computes; what is kept is on the CPU
        self.parts: tuple[Algorithm, ...] = experiment.chain().parts
        self.plan = plan(experiment)
        self.selectable = np.flatnonzero(split.counts.sum(1) > 0).tolist()
        self.directory = None if directory is None else RunDirectory(directory)
        self.history: list[dict[str, Any]] = []
        self.round = 0
        self.server = State({})
        self.proxy: torch.Tensor | None = None  # the class prior that an algorithm has left in its field `prior`
        # Whether anything has gone by the share of rounds done; a loss that may change does.
        self.asked_progress = type(experiment.local.make_loss()).at is not Loss.at
        self.aggregation = experiment.make_aggregation()
        self.releases = Counter[str]()  # "clients drawn/all clients" -> how often a noisy sum of them was made
        self.also, self.scored_too = also or {}, dict[str, dict[str, Any]]()
        self._saved, self._write_s, self._changed = time.monotonic(), 0.0, set[int]()
        self._written = {"tracking": 0.0, "checkpoint": 0.0}  # seconds that the writing after the last round took
        if not self._resume():
            self._enter(0, Params.of(network(experiment, dataset)))

    @cached_property
    def tests(self) -> SortedTest:
        """The test images, sorted by their labels."""
        return SortedTest(self.dataset.y_test, self.dataset.classes)

    # Rounds --------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every phase has run."""
        return self.round == len(self.plan)

    def _enter(self, part: int, model: Params) -> None:
        """Begin an algorithm of the chain, from a model."""
        self.part, self.origin = part, place(model, CPU)
        before = self.server.fields() if part else {}
        fields = self.parts[part].server_state(self.origin)
        fields |= {name: before[name] for name in self.parts[part].inherits if name in before}
        self.server = State(place(fields, CPU))
        self.proxy = before.get("prior", self.proxy)
        self.memory: dict[int, dict[str, Any]] = {}
        self.placed_origin = self.engine.put(self.origin)
        self._changed = set()
        if self.directory:
            self.directory.forget_clients()

    def advance(self) -> dict[str, Any]:
        """Run the next round, evaluate if it is due, write it down, and return its line of the log."""
        began = time.perf_counter()
        turn = self.plan[self.round]
        if turn.part != self.part:
            self._enter(turn.part, self.server.model)
        self._pending: dict[int, dict[str, Any]] = {}
        self._calls = {"clients": 0, "server": 0}  # apart, so that what the server does changes no client's randomness
        self._losses, self._steps, self._up, self._extra, self._down = list[float](), 0, 0, 0, 0
        self._clock = {"clients": 0.0, "wait": 0.0, "move": 0.0}
        self._rejected, self._late = dict[int, str](), dict[int, str]()
        seed = self.experiment.seed
        rng = np.random.default_rng(stream(seed, SERVER, self.round))
        torch.default_generator.manual_seed(stream(seed, SERVER, self.round, 1))
        if self.device.type == "cuda":
            torch.cuda.manual_seed(stream(seed, SERVER, self.round, 1))
        server = State(place(self.server.fields(), self.device))
        self._away: set[int] = set()
        drawn = self._draw(turn)
        try:
            turn.phase.step(server, Cohort(self, self.present(drawn), turn, rng, len(drawn)))  # type: ignore[arg-type]
            # The round is in: only now it counts.
            self.server = State(place(server.fields(), CPU))
            self.memory |= self._pending
            self._changed |= set(self._pending)
        except NothingUsable:
            if not self._rejected and not self._late:
                raise
            # Everything stays as it was before the round.
        self.round += 1
        metrics: dict[str, float] = {"time/train": time.perf_counter() - began}
        metrics |= {f"time/{part}": seconds for part, seconds in self._clock.items()}
        metrics["time/server"] = metrics["time/train"] - sum(self._clock.values())
        if self._steps:
            metrics["train/loss"] = math.fsum(self._losses) / self._steps
        metrics |= {"bytes/up": float(self._up), "bytes/down": float(self._down)}
        if self._extra:
            metrics["bytes/up_extra"] = float(self._extra)
        if self._away:
            metrics["clients/dropped"] = float(len(self._away))
        line = {"round": self.round, "phase": turn.name, "metrics": metrics}
        for name, found in (("rejected", self._rejected), ("late", self._late)):
            if found:
                metrics[f"clients/{name}"] = float(len(found))
                line[name] = list(found.values())
        return self._conclude(turn, line, turn.scores(self.experiment.evaluate.every))

    def _conclude(self, turn: Turn, line: dict[str, Any], scores_due: bool) -> dict[str, Any]:
        """Evaluate the round that has just been run if it is due, and write it down."""
        metrics = line["metrics"]
        if scores_due:
            started = time.perf_counter()
            also = self.also if self.done else {}
            scores, *others = self.evaluate(tuple(also.values()))
            metrics |= scores.metrics()
            if self.releases:
                metrics["privacy/epsilon"] = epsilon(self.aggregation, self.releases)
            metrics["time/evaluate"] = time.perf_counter() - started
            if turn.last and self.directory:
                self.directory.write_tables(turn.title, scores.tables())
            self.scored_too = {
                key: {"metrics": o.metrics(), "tables": o.tables(), "portraits": portraits_of(self, also[key])}
                for key, o in zip(also, others, strict=False)
            }
        if self.directory and (self.done or self.plan[self.round].part != turn.part):
            self.directory.write_portraits(turn.title, portraits_of(self, self.parts[self.part]))
            if self.dataset.segmented and turn.phase.scored:
                self.directory.write_arrays(turn.title, "examples", examples_of(self))
        metrics |= {f"time/{part}": seconds for part, seconds in self._written.items()}
        metrics["time/round"] = metrics["time/train"] + metrics.get("time/evaluate", 0.0)
        line["time"] = time.time()
        self.history.append(line)
        if self.directory:
            began = time.perf_counter()
            self.directory.log(line)  # which is all that tracking costs a round: somebody else reads it
            self._written = {"tracking": time.perf_counter() - began, "checkpoint": 0.0}
            self._checkpoint(turn.last)
        return line

    def _draw(self, turn: Turn) -> list[int]:
        """Draw the clients of this round, uniformly without replacement."""
        wanted = self.experiment.clients_per_round
        if turn.phase.everyone or wanted is None or wanted >= len(self.selectable):
            return list(self.selectable)
        rng = np.random.default_rng(stream(self.experiment.seed, SAMPLING, turn.index))
        return sorted(rng.choice(self.selectable, wanted, replace=False).tolist())

    def present(self, ids: Sequence[int]) -> list[int]:
        """Leave out the clients that do not answer in this round, whoever asks them; one always does."""
        share, seed = self.experiment.failures.dropout, self.experiment.seed
        if not share:
            return list(ids)
        away = {id for id in ids if np.random.default_rng(stream(seed, DROPOUT, self.round, id)).random() < share}
        away -= set(ids[:1]) if len(away) == len(ids) else set()
        self._away |= away
        return [id for id in ids if id not in away]

    def call(
        self,
        ids: Sequence[int],
        method: str,
        shared: tuple[Any, ...],
        keys: Mapping[int, Hashable] | None = None,
        each: Mapping[int, Any] | None = None,
    ) -> list[Result]:
        """Run a client method on clients, and keep what they remember until the round is in.

        The server may do a client's work too, alone: then nothing is sent, and its loss is not that of training.
        """
        who = "server" if list(ids) == [self.split.server_id] else "clients"
        shared, each = place(shared, CPU), None if each is None else place(each, CPU)
        local = self.experiment.local
        turn = self.plan[self.round]
        lr = local.lr if local.schedule is None else local.schedule.rate(local.lr, turn.index)
        job = Job(
            "run", self.part, method, (), self.round, self._calls[who], lr, turn.progress,
            proxy=self.proxy, skip_bad=who == "clients" and self.experiment.failures.bad_update == "skip",
        )  # fmt: skip
        jobs = [
            replace(
                job,
                ids=part,
                memory=self.remembered(part),
                keys=None if keys is None else {id: keys[id] for id in part},
                each=None if each is None else {id: each[id] for id in part},
                place=place,
            )
            for place, part in enumerate(cut(ids))
        ]
        began = time.perf_counter()
        reference = self.engine.put(shared)
        put = time.perf_counter()
        results = self.engine.run(jobs, reference, self.placed_origin)
        work = sum(result.seconds for result in results) / self.engine.size
        for part, seconds in (("move", put - began), ("clients", work), ("wait", time.perf_counter() - put - work)):
            self._clock[part] += seconds
        self._calls[who] += 1
        if who == "server":
            return results
        self._down += size(shared) * len(ids) + (0 if each is None else size(each))
        self._admit(ids, results, skip=job.skip_bad)
        for result in results:
            # Copied: what Ray hands out lies in its object store, and would keep the whole result there.
            self._pending |= {id: own(memory) for id, memory in result.memory.items()}
            self._rejected |= result.rejected
            self._late |= result.late
            self._losses += result.losses  # to be added exactly, so that their order is nothing
            self._steps += result.steps
            self._up, self._extra = self._up + result.bytes_up, self._extra + result.bytes_extra
        if ids and not any(result.parts or result.values for result in results):
            raise NothingUsable(f"no usable update from any of the {len(ids)} clients of round {self.round}")
        return results

    def _admit(self, ids: Sequence[int], results: Sequence[Result], skip: bool) -> None:
        """Let nothing pass that does not fit what the other clients sent, and no client twice."""
        heard = [id for r in results for id in (*(i for p in r.parts for i in p.ids), *r.values, *r.rejected, *r.late)]
        if sorted(heard) != sorted(ids):
            raise RuntimeError(f"asked clients {sorted(ids)}, but {sorted(heard)} answered")
        sent = [(part.form, part.ids) for r in results for part in r.parts]
        sent += [(form(value), [id]) for r in results for id, value in r.values.items()]
        odd = {id: f"client {id}, round {self.round}: {why}" for id, why in strangers(sent).items()}
        if odd and not skip:
            raise ClientFailed(f"{next(iter(odd.values()))}; {REMEDY}")
        for result in results:
            result.parts = [part for part in result.parts if odd.keys().isdisjoint(part.ids)]
            for id in odd:
                result.values.pop(id, None)
                result.memory.pop(id, None)
        self._rejected |= odd

    def combine(self, parts: Mapping[Hashable, Sequence[Part]], drawn: int | None) -> dict[Hashable, Sum]:
        """Combine uploads as the experiment says, and note what a private combination gives away."""
        if self.aggregation.private:
            population = len(self.selectable)
            self.releases[f"{population if drawn is None else drawn}/{population}"] += 1
        rng = torch.Generator().manual_seed(stream(self.experiment.seed, NOISE, self.round, self._calls["clients"]))
        found = {}
        for key, some in parts.items():
            ordered = some if self.aggregation.each else sorted(fold(some, TALLEST), key=lambda part: part.ids)
            total = self.aggregation.combined([part.total for part in ordered])
            found[key] = self.aggregation.released(total.widen(), rng)
        return found

    def remembered(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return what these clients remember, this round's own changes included."""
        found = {id: self._pending.get(id, self.memory.get(id)) for id in ids}
        return {id: memory for id, memory in found.items() if memory is not None}

    def evaluate(self, also: tuple[Algorithm, ...] = ()) -> Sequence[Scored]:
        """Score all models as they are now; `also`: other settings of the algorithm, which only predict otherwise."""
        self._pending = {}
        return score(self, also)

    # What must not be lost -----------------------------------------------------------------------------------------

    def _checkpoint(self, phase_ends: bool) -> None:
        """Write a checkpoint when enough time has passed to make its cost negligible, and at the end of a phase."""
        since = time.monotonic() - self._saved
        if phase_ends or since >= max(self.experiment.failures.checkpoint_s, 50 * self._write_s):
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write a checkpoint now."""
        assert self.directory is not None
        began = time.monotonic()
        run = {"round": self.round, "part": self.part, "origin": self.origin, "server": self.server.fields()}
        run |= {"proxy": self.proxy, "asked_progress": self.asked_progress, "releases": dict(self.releases)}
        self.directory.save(self.round, run, self.memory, self._changed)
        self._changed = set()
        self._saved = time.monotonic()
        self._write_s = self._saved - began
        self._written["checkpoint"] += self._write_s

    def _resume(self) -> bool:
        """Take up the run where its directory's checkpoint left it."""
        loaded = self.directory.load() if self.directory else None
        if loaded is None or self.directory is None:
            return False
        run, memory = loaded
        self.history = [line for line in self.directory.lines() if line["round"] <= run["round"]]
        unscored = self.directory.unscored if len(self.history) == run["round"] - 1 else None
        if unscored is None and len(self.history) != run["round"]:
            raise CheckpointError(
                f"{self.directory.path}/metrics.jsonl has {len(self.history)} of the {run['round']} rounds of the "
                "checkpoint; remove the trial's directory to run it anew"
            )
        self.round, self.part, self.origin = run["round"], run["part"], run["origin"]
        self.server, self.memory, self.proxy = State(run["server"]), memory, run["proxy"]
        self.asked_progress, self.releases = run["asked_progress"], Counter(run.get("releases", {}))
        self.placed_origin = self.engine.put(self.origin)
        if unscored is not None:  # trained by another run that predicts otherwise
            self._conclude(self.plan[self.round - 1], unscored, scores_due=True)
        return True

    def fingerprint(self) -> str:
        """Return a hash of everything that was computed: both halves' memory and all metrics but the clock's."""
        kept = [
            [line["round"], line["phase"], {k: v for k, v in line["metrics"].items() if not k.startswith("time/")}]
            for line in self.history
        ]
        return fingerprint(self.server.fields(), self.memory, kept)
