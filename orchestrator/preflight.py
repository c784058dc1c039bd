"""What is checked before anything starts, so that a mistake costs seconds and not hours."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from orchestrator import memory
from orchestrator.data import DATASETS, SOURCES, Absent, DataError, Dataset, check, load, outline
from orchestrator.driver import data_key, split_for
from orchestrator.evaluate import known_metrics
from orchestrator.experiment import Experiment, dump
from orchestrator.models import Network
from orchestrator.resources import Share, concurrency, least_share, share
from orchestrator.space import Trial
from orchestrator.sweep_file import Search
from orchestrator.worker import network
from orchestrator.yaml_file import InputError

GPU_MEMORY = 16 * 2**30  #: bytes, of a GPU that is not on this machine: the least that one rents for training
ROUNDS = 1_000_000  #: of a run: all of them are planned before the first


def check_metric(metric: str, trials: Sequence[Trial]) -> None:
    """Refuse to rank by a metric that some trial will not report."""
    kind = metric.split("/")[0]
    for trial in trials:
        e = trial.experiment
        if metric not in (known := known_metrics(e.task)):
            near = ", ".join(m for m in known if m.startswith(f"{kind}/"))
            raise InputError([f"search.metric: {metric} is not reported by {e.task} (trial {trial.id}); it has {near}"])
        if kind in ("generic", "personal") and kind not in e.evaluate.what:
            raise InputError([f"search.metric: {metric} is not reported: evaluate.what lacks '{kind}'"])
        if kind == "validation" and not (e.data.validation and "personal" in e.evaluate.what):
            raise InputError([f"search.metric: {metric} needs data.validation > 0 and evaluate.what with 'personal'"])


class Checked:
    """Data sets, partitions and networks, each made once so that what is wrong with them shows now.

    Where nothing is to be started, a known data set that is not there is noted and no more.
    """

    def __init__(self, dry: bool = False) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.dry = dry
        self.missing: dict[str, str] = {}  # what to do about it
        self._digests: dict[Any, str] = {}
        self._built: dict[Any, Network] = {}  # kinds of networks, without their numbers
        self._memory: dict[Any, int] = {}

    def check(self, trial: Trial) -> None:
        """Load a trial's data, cut its partition and build its network."""
        e = trial.experiment
        key = data_key(e)
        phases = (phase.rounds for _, phase in e.chain().phases())
        if (rounds := sum(e.rounds if own is None else own for own in phases)) > ROUNDS:
            raise InputError(
                [f"rounds (trial {trial.id}): {rounds:,} in all its phases; at most {ROUNDS:,} are possible"]
            )
        try:
            if key not in self.datasets:
                self.datasets[key] = self._load(key, e)
            if key in self.missing:
                images = (SOURCES[e.data.name].sizes or (None,))[0]
                check(e.data.name, images, self.datasets[key].classes, e.data.clients, e.data.classes_per_client)
            elif (e.data, e.seed) not in self._digests:
                self._digests[e.data, e.seed] = split_for(e, self.datasets[key]).digest
        except DataError as error:
            raise InputError([f"data (trial {trial.id}): {error}"]) from None
        form = self._form(e)
        if form not in self._built:
            try:
                built = network(e, self.datasets[key])
            except ValueError as error:
                raise InputError([f"model: {error}"]) from None
            if e.make_aggregation().private and any(b.is_floating_point() for b in built.buffers()):
                why = "noise would ruin the statistics of its batch norm"
                raise InputError([f"aggregation (trial {trial.id}): 'dp' does not fit model '{e.model.name}': {why}"])
            self._built[form] = built.to("meta")

    def _load(self, key: str, e: Experiment) -> Dataset:
        try:
            return load(e.data.name, e.data.root, download=not self.dry)
        except Absent as error:
            if not (self.dry and e.data.name in DATASETS):
                raise
            self.missing[key] = str(error)
            return outline(e.data.name)

    def memory(self, e: Experiment, gpu: bool) -> int:
        """Estimate the bytes that one client actor needs."""
        keeps = any(part.card.keeps for part in e.chain().parts)
        key = self._form(e), e.local.batch, bool(e.local.momentum), e.data.clients, keeps, gpu
        if key not in self._memory:
            self._memory[key] = memory.of_actor(e, self._built[self._form(e)], self.dataset(e), gpu)
        return self._memory[key]

    def gpu_share(self, e: Experiment) -> float:
        """Estimate the share of a GPU without which one client actor finds too little memory."""
        return least_share(self.memory(e, gpu=True), gpu_memory())

    def _form(self, e: Experiment) -> Any:
        return data_key(e), e.model, tuple(part.experts for part in e.chain().parts), e.aggregation[0]

    def bytes_kept(self, experiment: Experiment) -> int:
        """Estimate what a trial leaves: models of the last and best round, and two checkpoints with all memories."""
        memories = experiment.data.clients * any(part.card.keeps for part in experiment.chain().parts)
        return memory.weights(self._built[self._form(experiment)]) * (4 + 2 * (3 + memories)) + 2**20

    def dataset(self, experiment: Experiment) -> Dataset:
        """Return an experiment's data set."""
        return self.datasets[data_key(experiment)]

    def partition(self, experiment: Experiment) -> str:
        """Return the digest of an experiment's partition."""
        return self._digests[experiment.data, experiment.seed]


def check_space(trials: Sequence[Trial], checked: Checked, out: Path) -> None:
    """Refuse a sweep whose checkpoints and models do not fit on the disk."""
    needed = sum(checked.bytes_kept(trial.experiment) for trial in trials)
    there = next(path for path in (out, *out.parents) if path.exists())
    if needed > (free := shutil.disk_usage(there).free):
        have = f"{len(trials)} trial(s) need about {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free there"
        raise InputError([f"--out {out}: {have}; make room, or choose another --out"])


def knock(address: str) -> None:
    """Refuse the address of a cluster where nobody answers, for which Ray would wait minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise InputError(
                [f"--address {address}: nobody answers there ({error}); start the cluster first"]
            ) from None


def gpu_memory() -> float:
    """Return the bytes of the smallest GPU of this machine, or what is assumed of GPUs elsewhere."""
    there = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return float(min(there, default=GPU_MEMORY))


def shares(
    trials: Sequence[Trial], search: Search, options: argparse.Namespace, checked: Checked
) -> tuple[int, dict[str, Share]]:
    """Return how many trials would run at a time on this machine, and what each would get; refuse what cannot fit."""
    cpus = options.num_cpus if options.num_cpus is not None else float(os.cpu_count() or 1)
    gpus = options.num_gpus if options.num_gpus is not None else float(torch.cuda.device_count())
    here = [{"CPU": cpus, "GPU": gpus, "node:here": 1.0}]
    at_a_time = concurrency([t.experiment for t in trials], search.concurrent, here, checked.gpu_share)
    return at_a_time, {t.id: share(t.experiment, here, at_a_time, "here", checked.gpu_share) for t in trials}


def crowd(trials: Sequence[Trial], got: Mapping[str, Share], at_a_time: int, checked: Checked) -> tuple[float, bool]:
    """Return the bytes that trials need at one time, at most: on each GPU if they use any, else on the machine."""
    each = [(got[t.id], checked.memory(t.experiment, got[t.id].gpu > 0)) for t in trials]
    on_gpus = [max(1, min(int(1 / s.gpu + 1e-9), s.actors * at_a_time)) * bytes for s, bytes in each if s.gpu]
    if on_gpus:
        return max(on_gpus), True
    return sum(sorted((s.actors * bytes for s, bytes in each), reverse=True)[:at_a_time]), False


def warn(needed: float, on_gpu: bool, console: Console) -> None:
    """Say so if actors are likely to need more memory than there is; it is an estimate, and refuses nothing."""
    if not on_gpu:
        there, what = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "this machine has"
    elif torch.cuda.is_available():
        there, what = gpu_memory(), "a GPU here has"
    else:
        return  # GPUs by name only, as tests have them
    if needed > there:
        console.print(
            f"warning: client actors are likely to need {needed / 2**30:.1f} GiB of memory at a time, and {what} "
            f"{there / 2**30:.1f}; lower search.concurrent, cluster.actors or local.batch",
            highlight=False,
            soft_wrap=True,
        )


def show(
    trials: Sequence[Trial],
    search: Search,
    options: argparse.Namespace,
    checked: Checked,
    console: Console,
    more: str = "",
) -> None:
    """Print what would run, and what it would ask for where it is known what there is."""
    # What a cluster has is known only once it is joined, unless it is said.
    known = not options.address or None not in (options.num_cpus, options.num_gpus)
    at_a_time, got = shares(trials, search, options, checked) if known else (0, {})
    for trial in trials:
        console.print(f"# trial {trial.id}: {trial.name}", markup=False, highlight=False)
        if trial.id in got:
            one = got[trial.id]
            needs = checked.memory(trial.experiment, one.gpu > 0) / 2**30
            each = f"{one.cpu:g} CPU, {one.gpu:g} GPU and about {needs:.1f} GiB of memory each"
            console.print(f"# asks for {one.actors} client actor(s) with {each}")
        console.print(dump(trial.experiment), markup=False, highlight=False)
    for reason in checked.missing.values():
        console.print(f"not here yet: {reason}", markup=False, highlight=False)
    where = ""
    if got:
        needed, on_gpu = crowd(trials, got, at_a_time, checked)
        place = "in all"
        if on_gpu:
            known = torch.cuda.is_available()
            place = "on each GPU" if known else f"on each GPU (of {gpu_memory() / 2**30:g} GiB, as none is here to ask)"
        where = "there" if options.address else "on this machine"
        where = f", {at_a_time} at a time {where}, with about {needed / 2**30:.1f} GiB of memory {place}"
    console.print(f"{len(trials)} trial(s){where}{more}; nothing was started.")
