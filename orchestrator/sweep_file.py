"""A file with a sweep: how to search, an experiment with open leaves, cases, presets; how it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_serializer, field_validator

import algorithms
from orchestrator import table_file
from orchestrator.experiment import (
    Cluster,
    Data,
    Evaluate,
    Experiment,
    Failures,
    Local,
    Part,
    as_published,
    problems,
    task_of,
)
from orchestrator.fields import Count, Named, Positive, listed, read_scheduler, seconds
from orchestrator.space import check
from orchestrator.yaml_file import Document, InputError, Keys, dotted, emit, laid_over, load, parse, short, told


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


@dataclass(frozen=True)
class Sweep:
    """What a file holds: how to search, and an experiment, some leaves of which may be left open.

    With `cases`, each of them is laid over the experiment: so methods are compared, each with settings of its own.
    """

    search: Search
    experiment: dict[str, Any]
    document: Document = field(default_factory=lambda: Document({}, {}), compare=False, repr=False)
    cases: tuple[dict[str, Any], ...] = ()
    table: table_file.Table | None = field(default=None, compare=False, repr=False)

    def variants(self) -> list[Sweep]:
        """Return a sweep for each case, or this one where there are none."""
        return [
            Sweep(self.search, laid_over(self.experiment, case), self.document.within(("cases", i)))
            for i, case in enumerate(self.cases)
        ] or [self]


#: Where a name stands for a mapping.
_SHORT: dict[Keys, Callable[[str], Any]] = {
    ("model",): lambda name: {"name": name},
    ("local", "loss"): lambda name: {name: {}},
    ("aggregation",): lambda name: {name: {}},
}


def read(
    path: Path | None = None, text: str | None = None, overrides: Sequence[str] = (), preset: str | None = None
) -> Sweep:
    """Read a sweep from a file or a text, as a preset or `path=value` overrides change it; check every candidate."""
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
