"""An experiment and its parts: frozen, validated, a default for every key; and how a file with one is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_serializer,
    field_validator,
    model_validator,
)

import algorithms
from algorithms.aggregations import AGGREGATIONS, Aggregation
from algorithms.base import Chain
from algorithms.losses import LOSSES, Loss
from algorithms.priors import PRIORS
from orchestrator.fields import (
    SMALLEST,
    Complaint,
    Count,
    Named,
    NotNegative,
    Number,
    Positive,
    Whole,
    combinable,
    complaints,
    either,
    fitting,
    gpu_share,
    labelled,
    listed,
    of_pixels,
    read_aggregation,
    read_chain,
    read_loss,
    read_scheduler,
    seconds,
    some,
    within,
)
from orchestrator.yaml_file import Document, InputError, Keys, dotted, emit, load, parse, short, told

if TYPE_CHECKING:
    from orchestrator.table_file import Table

__all__ = [
    "Cluster",
    "Complaint",
    "Data",
    "Evaluate",
    "Experiment",
    "Failures",
    "InputError",
    "Local",
    "Model",
    "Named",
]
__all__ += ["Schedule", "Search", "Sweep", "complaints", "dump", "dump_sweep", "listed", "problems", "read"]
__all__ += ["read_experiment", "shown"]

# The parts ----------------------------------------------------------------------------------------------------------


class Part(BaseModel):
    """A part of an experiment: frozen, and with no keys but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return {} if value is None else value


def as_published(name: Any) -> bool:
    """Tell whether a data set is never cut to another imbalance than its own."""
    from orchestrator.data.sources import SOURCES

    return isinstance(name, str) and name in SOURCES and SOURCES[name].as_published


def task_of(name: Any) -> str:
    """Return what is usually learned from a data set."""
    from orchestrator.data.sources import SEGMENTED

    return "segmentation" if isinstance(name, str) and name in SEGMENTED else "classification"


class Data(Part):
    """What is learned, and how it is spread over the clients."""

    name: str = "digits"
    root: str | None = None
    clients: Count = 20
    partition: Literal["per_class", "per_class_capped", "grouped_equal", "by_user", "foreground"] = Field(
        default=None, validate_default=True
    )
    classes_per_client: Count = 1
    alpha: Positive = 0.5
    imbalance: Annotated[Number, Field(ge=1)] = Field(default=None, validate_default=True)
    test_alloc: Literal["floor", "ceil_owned"] = "floor"
    validation: Annotated[Number, Field(ge=0, lt=0.9)] = 0.0

    @field_validator("partition", mode="before")
    @classmethod
    def _divided(cls, partition: Any, info: ValidationInfo) -> Any:
        usual = "foreground" if task_of(info.data.get("name")) == "segmentation" else "per_class"
        return usual if partition is None else partition

    @field_validator("partition")
    @classmethod
    def _of_users(cls, partition: str, info: ValidationInfo) -> str:
        from orchestrator.data.sources import WITH_USERS

        if partition == "by_user" and (name := info.data.get("name")) not in WITH_USERS:
            able = ", ".join(WITH_USERS)
            raise ValueError(
                f"'by_user' keeps each user's images together, but '{name}' names no users; it can: {able}"
            )
        return partition

    @field_validator("alpha")
    @classmethod
    def _drawn(cls, alpha: float, info: ValidationInfo) -> float:
        if alpha != cls.model_fields["alpha"].default and info.data.get("partition") == "by_user":
            raise ValueError("is of partitions by class; by_user goes by users alone: leave alpha out")
        return alpha

    @field_validator("classes_per_client")
    @classmethod
    def _known(cls, number: int, info: ValidationInfo) -> int:
        if number > 1 and info.data.get("partition", "foreground") != "foreground":
            raise ValueError("is of partition foreground; with any other, clients have the classes that they are dealt")
        return number

    @field_validator("imbalance", mode="before")
    @classmethod
    def _usual(cls, imbalance: Any, info: ValidationInfo) -> Any:
        return (1.0 if as_published(info.data.get("name")) else 10.0) if imbalance is None else imbalance

    @field_validator("imbalance")
    @classmethod
    def _cut(cls, imbalance: float, info: ValidationInfo) -> float:
        name = info.data.get("name")
        if imbalance != 1 and as_published(name):
            raise ValueError(f"'{name}' has class sizes of its own and is used as published; leave imbalance out")
        return imbalance


class Model(Part):
    """The network; in a file its name alone will do, or nothing: then it is the usual one for the data set."""

    name: str
    width: Count | None = None
    experts: Count | None = None

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from orchestrator.models import MODELS

        if name not in MODELS:
            raise ValueError(f"there is no model '{name}'; {algorithms.nearest(name, MODELS)}")
        return name

    @field_validator("width", "experts")
    @classmethod
    def _taken(cls, value: int | None, info: ValidationInfo) -> int | None:
        from orchestrator.models import MODELS

        name = str(info.data.get("name"))
        if value is not None and name in MODELS and info.field_name not in MODELS[name].options:
            able = ", ".join(other for other in MODELS if info.field_name in MODELS[other].options)
            raise ValueError(f"model '{name}' takes none; those that do: {able}")
        return value


class Schedule(Part):
    """When the learning rate changes: at given rounds, or every so many."""

    at: tuple[Annotated[Whole, Field(ge=0)], ...] = ()
    every: Count | None = None
    factor: Positive = 0.1

    @model_validator(mode="after")
    def _one(self) -> Schedule:
        if self.at and self.every:
            raise ValueError("give either 'at' or 'every', not both")
        if not self.at and not self.every and self.factor != Schedule.model_fields["factor"].default:
            raise ValueError("'factor' alone changes nothing; give 'at' (rounds) or 'every' (a number of rounds) too")
        return self

    def rate(self, lr: float, round: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        changes = round // self.every if self.every else sum(round >= at for at in self.at)
        return float(lr * self.factor**changes)


class Local(Part):
    """How a client learns."""

    lr: Positive = 0.05
    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    batch: Count = 32
    epochs: Count = 1
    schedule: Schedule | None = None
    loss: Annotated[Named, BeforeValidator(read_loss)] = Field(default="ce", validate_default=True)
    prior: str = Field(default="none", validate_default=True)
    augment: Literal["auto", "none", "flip", "crop_flip", "crop_flip_cutout", "resized_crop_flip"] = "auto"

    @field_validator("prior")
    @classmethod
    def _fits(cls, prior: str, info: ValidationInfo) -> str:
        if prior not in PRIORS:
            raise ValueError(f"there is no prior '{prior}'; {algorithms.nearest(prior, PRIORS)}")
        if "loss" in info.data:
            loss = info.data["loss"][0]
            others, users = sorted(PRIORS.keys() - {"none"}), [name for name in LOSSES if LOSSES[name].uses_prior]
            if LOSSES[loss].takes == "own_counts":
                if prior not in ("none", "local"):
                    raise ValueError(f"loss '{loss}' is one of each client's own counts; leave the prior out")
            elif LOSSES[loss].uses_prior and prior == "none":
                raise ValueError(f"loss '{loss}' needs a class prior; choose one of {', '.join(others)}")
            elif not LOSSES[loss].uses_prior and prior != "none":
                raise ValueError(f"loss '{loss}' uses no prior; choose none, or one that does: {', '.join(users)}")
        return prior

    @field_serializer("loss")
    def _plain(self, loss: Named) -> Any:
        return {loss[0]: loss[1]} if loss[1] else loss[0]

    def make_loss(self) -> Loss:
        """Build the loss."""
        name, knobs = self.loss
        return LOSSES[name](**knobs)


class Evaluate(Part):
    """When the models are tested, and which; they always are at the end of a phase."""

    every: Count = 5
    what: Annotated[tuple[Literal["generic", "personal"], ...], AfterValidator(some)] = ("generic", "personal")


class Failures(Part):
    """What breaks, where that is part of what is studied, and what is done when something breaks."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    stragglers: Annotated[Number, Field(ge=0, le=1)] = 0.0
    retries: Annotated[Whole, Field(ge=0)] = 3
    client_timeout_s: Positive | None = None
    timeout: Literal["fail", "skip"] = "fail"
    bad_update: Literal["fail", "skip"] = "fail"
    checkpoint_s: NotNegative = 30.0


Actors = Annotated[Count, Field(le=10_000)]


class Cluster(Part):
    """Where the clients run."""

    actors: Annotated[Actors | Literal["auto", "per_client"], WrapValidator(either)] = "auto"
    gpu_per_actor: Annotated[NotNegative | Literal["auto"], WrapValidator(either), AfterValidator(gpu_share)] = "auto"
    cpu_per_actor: Annotated[Number, Field(ge=SMALLEST)] = 1.0
    threads: Count = 1
    driver_gpu: NotNegative = 0.0


class Experiment(Part):
    """Everything that determines one run."""

    data: Data = Data()
    task: Literal["classification", "segmentation"] = Field(default=None, validate_default=True)
    model: Model = Field(default=None, validate_default=True)
    algorithm: Annotated[tuple[Named, ...], BeforeValidator(read_chain)] = Field(
        default=algorithms.DEFAULT, validate_default=True
    )
    local: Local = Field(default=Local(), validate_default=True)
    aggregation: Annotated[Named, BeforeValidator(read_aggregation)] = Field(default="mean", validate_default=True)
    rounds: Count = 20
    clients_per_round: Count = Field(default=None, validate_default=True)
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0
    evaluate: Evaluate = Evaluate()
    failures: Failures = Failures()
    cluster: Cluster = Cluster()

    @field_validator("task", mode="before")
    @classmethod
    def _usual_task(cls, task: Any, info: ValidationInfo) -> Any:
        return task_of(info.data.get("data", Data()).name) if task is None else task

    @field_validator("task")
    @classmethod
    def _of_data(cls, task: str, info: ValidationInfo) -> str:
        if "data" in info.data:
            data = info.data["data"]
            labelled(task, data.name, data.partition, data.test_alloc)
        return task

    @field_validator("model", mode="before")
    @classmethod
    def _usual(cls, model: Any, info: ValidationInfo) -> Any:
        from orchestrator.models import default_model

        model = {"name": model} if isinstance(model, str) else {} if model is None else model
        if isinstance(model, Mapping) and model.get("name") is None:
            name, task = info.data.get("data", Data()).name, info.data.get("task", "classification")
            return {**model, "name": default_model(name, task)}
        return model

    @field_validator("model")
    @classmethod
    def _able(cls, model: Model, info: ValidationInfo) -> Model:
        from orchestrator.models import MODELS

        if (task := info.data.get("task")) and MODELS[model.name].task != task:
            able = ", ".join(name for name in MODELS if MODELS[name].task == task)
            raise ValueError(f"'{model.name}' is a network for {MODELS[model.name].task}; those for {task}: {able}")
        return model

    @field_validator("algorithm")
    @classmethod
    def _defined(cls, chain: tuple[Named, ...], info: ValidationInfo) -> tuple[Named, ...]:
        if info.data.get("task") == "segmentation":
            of_pixels(chain)
        return chain

    @field_validator("local")
    @classmethod
    def _fits(cls, local: Local, info: ValidationInfo) -> Local:
        if "algorithm" in info.data:
            fitting(info.data["algorithm"], local.loss, local.prior, info.data.get("task") == "segmentation")
        if info.data.get("task") == "segmentation" and local.augment not in ("auto", "none", "flip"):
            why = "would move the labels of pixels otherwise than their pixels"
            raise within("augment", f"'{local.augment}' {why}; for segmentation choose flip or none")
        return local

    @field_validator("aggregation")
    @classmethod
    def _combinable(cls, aggregation: Named, info: ValidationInfo) -> Named:
        if {"algorithm", "local"} <= info.data.keys():
            combinable(info.data["algorithm"], info.data["local"].prior, aggregation)
        return aggregation

    @field_validator("clients_per_round", mode="before")
    @classmethod
    def _some(cls, number: Any, info: ValidationInfo) -> Any:
        return min(10, info.data.get("data", Data()).clients) if number is None else number

    @field_validator("clients_per_round")
    @classmethod
    def _present(cls, number: int, info: ValidationInfo) -> int:
        if "data" in info.data and number > info.data["data"].clients:
            raise ValueError(f"must be <= data.clients, which is {info.data['data'].clients}, not {number}")
        return number

    @field_serializer("algorithm")
    def _plain(self, chain: tuple[Named, ...]) -> list[dict[str, Any]]:
        return [{name: knobs} for name, knobs in chain]

    @field_serializer("aggregation")
    def _named(self, aggregation: Named) -> Any:
        return {aggregation[0]: aggregation[1]} if aggregation[1] else aggregation[0]

    def make_aggregation(self) -> Aggregation:
        """Build the rule by which the server combines uploads."""
        name, knobs = self.aggregation
        return AGGREGATIONS[name](**knobs)

    def chain(self) -> Chain:
        """Build the algorithms."""
        return algorithms.build(({name: knobs} for name, knobs in self.algorithm), self.local.prior)


class Search(Part):
    """How a sweep looks for the best of its experiments."""

    metric: str = "personal/acc_dist"
    mode: Literal["max", "min"] = "max"
    samples: Count = 1
    searcher: Literal["random", "grid", "optuna"] = "random"
    scheduler: Annotated[Named, BeforeValidator(read_scheduler)] = Field(default="fifo", validate_default=True)
    concurrent: Count | None = None
    budget: Annotated[Positive | None, BeforeValidator(seconds)] = None

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        from orchestrator.evaluate import known_metrics

        if metric not in known_metrics():
            raise ValueError(f"there is no metric '{metric}'; {algorithms.nearest(metric, known_metrics())}")
        return metric

    @field_serializer("scheduler")
    def _plain(self, scheduler: Named) -> Any:
        return {scheduler[0]: scheduler[1]} if scheduler[1] else scheduler[0]


# Files --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What a file holds: how to search, and an experiment, some leaves of which may be left open.

    With `cases`, each of them is laid over the experiment: so methods are compared, each with settings of its own.
    """

    search: Search
    experiment: dict[str, Any]
    document: Document = field(default_factory=lambda: Document({}, {}), compare=False, repr=False)
    cases: tuple[dict[str, Any], ...] = ()
    table: Table | None = field(default=None, compare=False, repr=False)

    def variants(self) -> list[Sweep]:
        """Return a sweep for each case, or this one where there are none."""
        return [
            Sweep(self.search, laid_over(self.experiment, case), self.document.within(("cases", i)))
            for i, case in enumerate(self.cases)
        ] or [self]


def laid_over(tree: Any, case: Any) -> Any:
    """Return a tree in which everything that a case says is as the case says it."""
    if not isinstance(tree, dict) or not isinstance(case, dict):
        return case
    return {**tree, **{key: laid_over(tree.get(key), value) for key, value in case.items()}}


def problems(tree: Mapping[str, Any], model: type[Part] = Experiment) -> list[Complaint]:
    """Say everything that is wrong with an experiment whose leaves are all filled in."""
    try:
        model.model_validate(tree)
    except ValidationError as error:
        return complaints(error, model)
    return []


#: Where a name stands for a mapping.
_SHORT: dict[Keys, Callable[[str], Any]] = {
    ("model",): lambda name: {"name": name},
    ("local", "loss"): lambda name: {name: {}},
    ("aggregation",): lambda name: {name: {}},
}


def shown(path: Keys, tree: Mapping[str, Any]) -> str:
    """Write a path for people: an algorithm that occurs once goes by its name, `algorithm.<name>.<hyperparameter>`."""
    entries = listed(tree.get("algorithm"))
    if path[:1] == ("algorithm",) and len(path) > 2 and isinstance(entries, list):
        same = sum(isinstance(entry, Mapping) and path[2] in entry for entry in entries)
        path = (path[0], *path[2:]) if same == 1 else path
    return dotted(path)


def read(
    path: Path | None = None, text: str | None = None, overrides: Sequence[str] = (), preset: str | None = None
) -> Sweep:
    """Read a sweep from a file or a text, as a preset or `path=value` overrides change it; check every candidate."""
    from orchestrator import table_file
    from orchestrator.space import check

    name = "<text>" if path is None else str(path)
    content = text if text is not None else "" if path is None else load(path)
    document = _preset(parse(content, lambda line, column: f"{name}:{line}:{column}"), preset)
    table = table_file.take(document, path)
    root = _rooted(document)
    _spell_out(root)
    for override in overrides:
        _override(root, override)
    tree = dict(root.value)
    searched, cases = tree.pop("search", None), tree.pop("cases", None)
    found = [each._replace(path=("search", *each.path)) for each in problems(searched, Search)]
    if found:
        raise InputError([told(root.place(each.path, each.key), dotted(each.path), each.text) for each in found])
    sweep = Sweep(Search.model_validate(searched), tree, root, _cases(root, cases), table)
    if "metric" not in (searched or {}) and all(map(_segments, sweep.variants())):
        sweep = replace(sweep, search=sweep.search.model_copy(update={"metric": "personal/miou"}))
    check(sweep)
    if table is not None:
        table_file.check(sweep)
    return sweep


def _segments(sweep: Sweep) -> bool:
    """Tell whether a sweep is one of segmentation, as far as that is plain."""
    task, data = sweep.experiment.get("task"), sweep.experiment.get("data")
    return task == "segmentation" or (
        task is None and isinstance(data, dict) and task_of(data.get("name")) != "classification"
    )


def _preset(document: Document, name: str | None) -> Document:
    """Lay one of a file's presets over the rest of it."""
    tree = document.value
    presets = tree.pop("presets", None) if isinstance(tree, dict) and tree.keys() & {"search", "experiment"} else None
    if presets is not None and not (isinstance(presets, dict) and all(isinstance(p, dict) for p in presets.values())):
        raise InputError(
            [told(document.place(("presets",)), "presets", "must be a mapping of names to parts of a sweep")]
        )
    if name is None:
        return document
    if name not in (presets or {}):
        has = f"its presets are: {', '.join(presets)}" if presets else "it has none"
        raise InputError([f"--preset {name}: this file has no such preset; {has}"])
    return Document(laid_over(tree, (presets or {})[name]), document.within(("presets", name)).places)


def _cases(root: Document, cases: Any) -> tuple[dict[str, Any], ...]:
    if cases is None:
        return ()
    if not isinstance(cases, list) or not cases or not all(isinstance(case, dict) for case in cases):
        raise InputError([told(root.place(("cases",)), "cases", "must be a list of parts of an experiment")])
    return tuple(cases)


def _override(root: Document, override: str) -> None:
    keys, equals, value = override.partition("=")
    flag = f"--set {override if len(override) <= 200 else override[:199] + '…'}"
    if not equals or not all(keys.split(".")):
        raise InputError([f"{flag}: must be dotted.path=value"])
    path = keys.split(".")
    cases = root.value.get("cases") if isinstance(root.value.get("cases"), list) else []
    # What a case says for itself hides what the experiment says: set it there too, wherever the path leads somewhere.
    told_apart = [Document(case, {}) for case in cases if isinstance(case, dict) and path[0] in case]
    errors = []
    for document in ([] if cases and len(told_apart) == len(cases) else [root]) + told_apart:
        try:
            document.put(path, parse(value, lambda line, column: flag), _SHORT)
        except InputError as error:
            errors.append(error)
    if errors and len(errors) >= max(1, len(told_apart)):
        raise errors[0]
    _spell_out(root)


def _rooted(document: Document) -> Document:
    """Bring both forms of a file to one: an experiment's keys, and `search`."""
    tree = {} if document.value is None else document.value
    if not isinstance(tree, dict):
        raise InputError([f"{document.place(())}: must be a mapping of keys to values, not {short(tree)}"])
    beside = ["search", "experiment", "cases", "presets", "table"]
    if not tree.keys() & set(beside):
        return Document(tree, document.places)
    found = []
    for key in [key for key in tree if key not in beside]:
        near = algorithms.nearest(key, beside)
        hint = "move it under 'experiment'" if key in Experiment.model_fields else near
        text = f"unknown key '{key}' beside 'search' and 'experiment'; {hint}"
        found.append(told(document.place((key,), key=True), key, text))
    inner = {} if tree.get("experiment") is None else tree["experiment"]
    if not isinstance(inner, dict):
        place = document.place(("experiment",))
        found.append(f"{place}: experiment: must be a mapping of keys to values, not {short(inner)}")
    elif "search" in inner:
        place = document.place(("experiment", "search"), key=True)
        found.append(f"{place}: experiment.search: unknown key; 'search' stands beside 'experiment', not inside")
    if found:
        raise InputError(found)
    places = {at[1:] if at[:1] == ("experiment",) else at: where for at, where in document.places.items()}
    return Document({**inner, "search": tree.get("search"), "cases": tree.get("cases")}, places)


def _spell_out(root: Document) -> None:
    """Make the chain a list, so that every hyperparameter has one path only."""
    chain = root.value.get("algorithm")
    if isinstance(chain, dict) and len(chain) == 1:
        moved = {at: where for at, where in root.places.items() if at[:1] == ("algorithm",) and len(at) > 1}
        root.places = {at: where for at, where in root.places.items() if at not in moved}
        root.places |= {("algorithm", 0, *at[1:]): where for at, where in moved.items()}
    if "algorithm" in root.value:
        root.value["algorithm"] = listed(chain)
    cases = root.value.get("cases")
    for case in cases if isinstance(cases, list) else []:
        if isinstance(case, dict) and "algorithm" in case:
            case["algorithm"] = listed(case["algorithm"])


def read_experiment(path: Path) -> Experiment:
    """Read a file that leaves nothing open."""
    from orchestrator.space import leaves

    sweep = read(path)
    if leaves(sweep):
        raise InputError([f"{path}: must leave nothing open"])
    return Experiment.model_validate(sweep.experiment)


def dump(experiment: Experiment) -> str:
    """Write a resolved experiment as YAML that reads back to an equal one."""
    return emit(experiment.model_dump(mode="json"))


def read_back(trial: Path) -> Experiment:
    """Read the experiment that was written into a trial's directory."""
    return Experiment.model_validate(yaml.safe_load((trial / "experiment.yaml").read_text(encoding="utf-8")))


def filled_in(sweep: Sweep) -> Sweep:
    """Return the sweep with the defaults of today written out, so that it means the same tomorrow."""
    from orchestrator.data.sources import SOURCES

    parts: dict[str, type[Part]] = {
        "data": Data,
        "local": Local,
        "evaluate": Evaluate,
        "failures": Failures,
        "cluster": Cluster,
    }
    tree = dict(sweep.experiment)
    for name, part in parts.items():
        if isinstance(tree.get(name, {}), dict):
            tree[name] = part().model_dump(mode="json") | tree.get(name, {})
    given = [variant.experiment.get("data") for variant in sweep.variants()]
    by_name: dict[str, Callable[[str], bool]] = {
        "imbalance": as_published,
        "partition": lambda name: task_of(name) == "segmentation",
    }
    for key, special in by_name.items() if isinstance(tree["data"], dict) else ():
        own = key not in (sweep.experiment.get("data") or {})
        if own and any(name in str(given) for name in SOURCES if special(name)):  # in an open leaf, too
            del tree["data"][key]  # a default that goes by the data set
    tree = {"rounds": Experiment().rounds, "seed": 0} | tree
    return replace(sweep, experiment=tree)


def dump_sweep(sweep: Sweep) -> str:
    """Write a sweep with its open leaves as YAML that reads back to an equal one."""
    tree = {"search": sweep.search.model_dump(mode="json"), "experiment": sweep.experiment}
    return emit(tree | ({"cases": list(sweep.cases)} if sweep.cases else {}))
