"""An experiment and its parts: frozen, validated, a default for every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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
    some,
    within,
)
from orchestrator.yaml_file import Keys, dotted, emit

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
        own = {"by_user": "users", "foreground": "the classes of pixels"}.get(
            partition := info.data.get("partition", "")
        )
        if own and alpha != cls.model_fields["alpha"].default:
            raise ValueError(f"is of partitions by class; {partition} goes by {own} alone: leave alpha out")
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


# As text ------------------------------------------------------------------------------------------------------------


def problems(tree: Mapping[str, Any], model: type[Part] = Experiment) -> list[Complaint]:
    """Say everything that is wrong with an experiment whose leaves are all filled in."""
    try:
        model.model_validate(tree)
    except ValidationError as error:
        return complaints(error, model)
    return []


def shown(path: Keys, tree: Mapping[str, Any]) -> str:
    """Write a path for people: an algorithm that occurs once goes by its name, `algorithm.<name>.<hyperparameter>`."""
    entries = listed(tree.get("algorithm"))
    if path[:1] == ("algorithm",) and len(path) > 2 and isinstance(entries, list):
        same = sum(isinstance(entry, Mapping) and path[2] in entry for entry in entries)
        path = (path[0], *path[2:]) if same == 1 else path
    return dotted(path)


def dump(experiment: Experiment) -> str:
    """Write a resolved experiment as YAML that reads back to an equal one."""
    return emit(experiment.model_dump(mode="json"))


def read_back(trial: Path) -> Experiment:
    """Read the experiment that was written into a trial's directory."""
    return Experiment.model_validate(yaml.safe_load((trial / "experiment.yaml").read_text(encoding="utf-8")))
