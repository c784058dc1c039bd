"""The work that one process does for any client: it holds data, network and algorithm, but no client's memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from algorithms.aggregations import Aggregation
from algorithms.base import Algorithm, Model, State, Tap
from algorithms.params import Params
from algorithms.priors import PRIORS
from orchestrator import evaluate, models, segmentation
from orchestrator.augment import AUGMENTS, centre
from orchestrator.client import CALL, MEMORY, STRAGGLER, Client, stream
from orchestrator.data import Dataset, ImageFiles, Split
from orchestrator.experiment import Experiment
from orchestrator.gate import fault, form
from orchestrator.jobs import Job, Result
from orchestrator.memo import Memo
from orchestrator.uploads import Part, fold
from orchestrator.values import CPU, extra, models_in, place, size

Store = Tensor | ImageFiles  # bytes [N, C, H, W], in memory or in files
REMEDY = "lower the learning rate, or set failures.bad_update: skip"


class ClientFailed(RuntimeError):
    """A client method raised, or its update cannot be used; says which client, where, and why."""


def claim(gpu: float) -> torch.device:
    """Return this process's device, its memory capped to the given share of a GPU; the CPU where there is none."""
    if not gpu or not torch.cuda.is_available():
        return CPU
    torch.cuda.set_per_process_memory_fraction(min(1.0, gpu), 0)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return torch.device("cuda", 0)


class Worker:
    """Serves any client of an experiment: holds the data, the network and the algorithm, but no client's memory."""

    def __init__(self, experiment: Experiment, dataset: Dataset, split: Split, device: torch.device = CPU) -> None:
        self.experiment, self.split, self.device = experiment, split, device
        self.parts: tuple[Algorithm, ...] = experiment.chain().parts
        self.loss = experiment.local.make_loss()
        self.prior = PRIORS[experiment.local.prior]
        self.aggregation = experiment.make_aggregation()
        self.network = network(experiment, dataset).to(device).eval()
        self.norms = [
            (module, f"{name}.weight")
            for name, module in self.network.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        self._channels_last = device == CPU and self.network.channels_last
        stem, stage = self.network.halves()
        self._pieces = {"body": self.network.body, "stem": stem, "stage": stage, "head": self.network.head}
        self._names = {
            piece: [(f"{'head' if piece == 'head' else 'body'}.{n}", n) for n in module.state_dict()]
            for piece, module in self._pieces.items()
        }
        self.x_train, self.y_train = self._store(dataset.x_train), torch.from_numpy(dataset.y_train)
        self.x_test, self.y_test = self._store(dataset.x_test), torch.from_numpy(dataset.y_test)
        owns = np.bincount(dataset.y_train[split.server].ravel(), minlength=dataset.outputs)
        self.counts = torch.from_numpy(np.vstack([split.counts, owns])).to(device, torch.float32)  # the server's last
        self.everywhere = self.counts[: split.server_id].sum(0)
        self.mean, self.std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (dataset.mean, dataset.std))
        named = dataset.augment if experiment.local.augment == "auto" else experiment.local.augment
        self._augment, self.augmented, self.size = AUGMENTS.get(named), named != "none", dataset.shape[1:]
        self.block = segmentation.BLOCK if dataset.segmented else evaluate.BLOCK  # images per forward pass
        self._memo: Memo | None = None

    @cached_property
    def tests(self) -> evaluate.SortedTest:
        """The test images, sorted by their labels."""
        return evaluate.SortedTest(self.y_test.numpy(), self.counts.shape[1])

    @cached_property
    def held_out(self) -> evaluate.SortedTest:
        """The images that clients hold out, of all of them, sorted by their labels."""
        rows = np.concatenate(self.split.validation)
        return evaluate.SortedTest(self.y_train.numpy(), self.counts.shape[1], rows)

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """Height and width of the map of features that the body makes of an image."""
        with torch.no_grad():
            return tuple(self.network.body(torch.zeros(1, len(self.mean), *self.size, device=self.device)).shape[2:])

    # Networks as functions of their weights ------------------------------------------------------------------------

    def features(self, w: Model, x: Tensor) -> Tensor:
        """Return the body's features; batch norm trains exactly where its weights are being trained."""
        if self._memo is not None:  # in two pieces, so that clients that differ in the last stage share the rest
            return self.stage(w, self.stem(w, x))
        return self._through("body", w, x)

    def stem(self, w: Model, x: Tensor) -> Tensor:
        """Return what the body's last stage is given; `w` need not name that stage's weights."""
        return self._through("stem", w, x)

    def stage(self, w: Model, f: Tensor) -> Tensor:
        """Return the features that the last stage makes of its input; `w` need not name any weights before it."""
        return self._through("stage", w, f)

    def _through(self, piece: str, w: Model, x: Tensor) -> Tensor:
        weights = {short: w[name] for name, short in self._names[piece]}
        if self._memo is not None:
            for module, _ in self.norms:
                module.eval()
            return self._once(piece, x, weights.values(), lambda: self._call(piece, weights, x))
        for module, name in self.norms:
            if name in w:
                module.training = w[name].requires_grad
        return self._call(piece, weights, x)

    def _once(self, what: str, x: Tensor, weights: Iterable[Tensor], make: Callable[[], Tensor]) -> Tensor:
        """While predicting, share what weights make of x among all who share these."""
        assert self._memo is not None
        weights = list(weights)
        key = what, x.data_ptr(), *((t.data_ptr(), t._version) for t in weights)
        return self._memo.get(key, (x, *weights), make)  # these are held, so that keys stay unique

    def _call(self, piece: str, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if self._channels_last:
            # A copy, always: of a single channel PyTorch takes both formats for the same, and oneDNN is slower by it.
            weights = {n: t.clone(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in weights.items()}
            x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x
        return functional_call(self._pieces[piece], weights, (x,))  # type: ignore[arg-type, no-any-return]

    def logits(self, w: Model, x: Tensor) -> Tensor:
        """Return the whole model's logits of images."""
        if self._memo is None:
            return self.head(w, self.features(w, x))
        weights = (w[name] for piece in ("body", "head") for name, _ in self._names[piece])
        return self._once("logits", x, weights, lambda: self.head(w, self.features(w, x)))

    def head(self, w: Model, h: Tensor, each: bool = False) -> Tensor:
        """Return the head's logits of features, or those of each expert."""
        if type(self.network.head) is nn.Linear and not each:
            return F.linear(h, w["head.weight"], w["head.bias"])  # a third of the cost of the call below
        weights = {short: w[name] for name, short in self._names["head"]}
        if not each:
            return functional_call(self.network.head, weights, (h,))  # type: ignore[no-any-return]
        if self.network.experts:
            return functional_call(self.network.head, weights, (h,), {"each": True})  # type: ignore[no-any-return]
        return self.head(w, h)[None]  # a single expert is an ordinary network

    @contextmanager
    def tapped(self, tap: Tap | None) -> Iterator[None]:
        """While inside, what the instrumented layers put out goes through the tap, if there is one."""

        def hook(name: str, tap: Tap) -> Callable[..., Tensor]:
            return lambda module, inputs, output: tap(name, output)

        layers = self.network.activations
        hooks = [self.network.get_submodule(n).register_forward_hook(hook(n, tap)) for n in layers if tap]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    # Images --------------------------------------------------------------------------------------------------------

    def _store(self, images: Any) -> Store:
        return images if isinstance(images, ImageFiles) else torch.from_numpy(images).to(self.device)

    def images(self, store: Store, rows: Any) -> Tensor:
        """Return the images of some rows as the network wants them."""
        if isinstance(store, ImageFiles):
            return self._scaled(centre(torch.from_numpy(store[rows]), self.size))
        return self._scaled(store[torch.as_tensor(rows, device=store.device)])

    def stored(self, files: ImageFiles, parts: Sequence[Any]) -> Iterator[Tensor]:
        """Yield the images of several sets of rows, as large as they are stored; the next set is read meanwhile."""
        asked: Callable[[], Any] | None = None
        for i, rows in enumerate(parts):
            pixels = (asked or files.ask(rows))()
            asked = files.ask(parts[i + 1]) if i + 1 < len(parts) else None
            yield self._scaled(torch.from_numpy(pixels))

    def augment(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Vary stored images at random as the experiment says, and bring them to the size that the network wants."""
        if self._augment is None:
            return centre(x, self.size)
        return self._augment(x, rng, self.size, -self.mean / self.std)

    def _scaled(self, pixels: Tensor) -> Tensor:
        return (pixels.to(self.device).float() / 255 - self.mean) / self.std

    # Jobs ----------------------------------------------------------------------------------------------------------

    def client(
        self, id: int, part: int, memory: Mapping[int, Mapping[str, Any]], origin: Params, seed: int, **call: Any
    ) -> Client:
        """Return a client with its memory; one that has none yet gets its initial one, whenever that happens."""
        algorithm = self.parts[part]
        if id in memory:
            fields: Mapping[str, Any] = memory[id]
        elif id == self.split.server_id:
            fields = {}  # what the server remembers is in its own state
        else:
            newborn = Client(self, id, stream(self.experiment.seed, MEMORY, part, id))
            self._seed(newborn.rng.initial_seed())
            fields = algorithm.client_state(newborn, origin)
        client = Client(self, id, seed, **call)
        client.state = State(place(fields, self.device))
        self._seed(seed)
        return client

    def _seed(self, seed: int) -> None:
        """Seed what draws without a generator of its own, e.g. dropout; `torch.manual_seed` takes a millisecond."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def do(self, job: Job, shared: tuple[Any, ...], origin: Params) -> Result:
        """Do a job: a pure function of its arguments, on any machine and in any order."""
        result = Result()
        tasks: dict[str, Callable[..., None]] = {
            "run": self._run,
            "predict": partial(evaluate.predict, self),
            "count": partial(evaluate.count, self),
            "moments": partial(evaluate.moments, self),
            "compare": partial(segmentation.compare, self),
            "confuse": partial(segmentation.confuse, self),
            "segment": partial(segmentation.segment, self),
        }
        began = time.perf_counter()
        tasks[job.task](job, place(shared, self.device), place(origin, self.device), result)
        result.seconds = time.perf_counter() - began
        return result

    def do_all(self, jobs: Sequence[Job], shared: tuple[Any, ...], origin: Params) -> list[Result]:
        """Do neighbouring jobs; of those that send something to be added up, return one result for all.

        They are a whole branch of the tree in which uploads are added: 2**n jobs, or fewer at the end of a call.
        """
        if len(jobs) == 1 or jobs[0].task != "run":
            return [self.do(job, shared, origin) for job in jobs]
        total = Result()
        for done, job in enumerate(jobs, start=1):
            total.take(self.do(job, shared, origin))
            if not self.aggregation.each:
                # Which branches are complete now: after 1, 2, 3, 4 jobs those of height 0, 1, 0, 2.
                height = (len(jobs) - 1).bit_length() if done == len(jobs) else (done & -done).bit_length() - 1
                begin = job.place >> height << height
                total.parts = [p for p in total.parts if p.first < begin] + fold(
                    (p for p in total.parts if p.first >= begin), height
                )
        return [total]

    def _run(self, job: Job, shared: tuple[Any, ...], origin: Params, result: Result) -> None:
        local = getattr(self.parts[job.part], job.method)
        proxy = None if job.proxy is None else job.proxy.to(self.device)
        sent = models_in(shared) if type(self.aggregation) is not Aggregation else {}
        for id in job.ids:
            seed = stream(self.experiment.seed, CALL, job.round, job.call, id)
            who = "the server" if id == self.split.server_id else f"client {id}"
            try:
                call = {"lr": job.lr, "proxy": proxy, "progress": job.progress, "work": self._work(job.round, id)}
                client = self.client(id, job.part, job.memory, origin, seed, **call)
                value = local(client, *shared, *(() if job.each is None else (place(job.each[id], self.device),)))
                memory = place(client.state.fields(), CPU)
            except Exception as error:
                where = f"{who}, round {job.round}, {type(self.parts[job.part]).__name__}.{job.method}"
                raise ClientFailed(f"{where}: {error}\n{traceback.format_exc()}") from None
            if bad := fault(value, memory, origin):
                why = f"{who}, round {job.round}: {bad}"
                if not job.skip_bad:
                    raise ClientFailed(f"{why}; {REMEDY}")
                result.rejected[id] = why
                continue
            result.bytes_up, result.bytes_extra = (
                result.bytes_up + size(value),
                result.bytes_extra + extra(value, origin),
            )
            loss, steps = client.losses["images"] if client.losses["images"][1] else client.losses["features"]
            result.losses.append(loss)
            result.steps += steps
            if memory or id in job.memory:
                result.memory[id] = memory
            if job.keys is None:
                result.values[id] = place(value, CPU)
            else:
                value = self.aggregation.limited(value, sent)
                part = Part(job.keys[id], form(value), [id], value, job.place)
                same = None if self.aggregation.each else next((p for p in result.parts if p.fits(part)), None)
                if same is None:
                    result.parts.append(part)
                else:
                    same.add(part)
        for part in result.parts:
            part.total = part.total.to(CPU)

    def _work(self, round: int, id: int) -> float:
        """Return the share of its steps that a client manages in a round: all of them, unless it is a straggler."""
        share, seed = self.experiment.failures.stragglers, self.experiment.seed
        if not share or id == self.split.server_id:
            return 1.0
        slow, work = np.random.default_rng(stream(seed, STRAGGLER, round, id)).random(2)
        return float(work) if slow < share else 1.0

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """While inside, clients that share a body share the features of the images at hand."""
        self._memo = Memo()
        try:
            with torch.no_grad():
                yield
        finally:
            self._memo = None


def network(experiment: Experiment, dataset: Dataset) -> models.Network:
    """Build the experiment's network with its initial weights."""
    model = experiment.model
    assert model.name is not None
    cosine = experiment.local.make_loss().cosine
    asked = {model.experts, *(part.experts for part in experiment.chain().parts)} - {None}
    if len(asked) > 1:
        raise ValueError(f"model and algorithms want different numbers of experts: {sorted(asked, key=str)}")
    experts = asked.pop() if asked else None
    return models.build(
        model.name,
        dataset.shape,
        dataset.outputs,
        width=model.width,
        experts=experts,
        cosine=cosine,
        seed=experiment.seed,
    )
