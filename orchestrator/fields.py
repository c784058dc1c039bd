"""Values of an experiment: how they are typed and coerced, and what is said when they are wrong."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

import algorithms
from algorithms.aggregations import AGGREGATIONS
from algorithms.losses import LOSSES
from algorithms.priors import ESTIMATED
from orchestrator.privacy import accountant
from orchestrator.schedulers import SCHEDULERS
from orchestrator.yaml_file import Keys, dotted, short

LONGEST = 50  #: algorithms in a chain
SMALLEST = 1e-4  #: share of a CPU or a GPU that Ray can tell from none
Named = tuple[str, dict[str, Any]]  # of an algorithm or a loss: its name and all its hyperparameters


# What is wrong, and where -------------------------------------------------------------------------------------------


class Complaint(NamedTuple):
    """One mistake: its path, what is wrong and what would be right, and whether the key itself is the mistake."""

    path: Keys
    text: str
    key: bool = False


_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping of keys to values"),
    "finite_number": "a finite number",
    "string_type": "text",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:g}",
    "less_than_equal": "<= {le:g}",
    "literal_error": "{expected}",
    "wanted": "{wanted}",
}


def _unknown(key: str, known: Iterable[str]) -> str:
    known = list(known)
    return f"unknown key '{key}'; {algorithms.nearest(key, known) if known else 'there are none to set here'}"


def complaints(error: ValidationError, model: type[BaseModel] | None = None) -> list[Complaint]:
    """Translate what pydantic found."""
    found: list[Complaint] = []
    for each in error.errors(include_url=False):
        path, kind, context = each["loc"], each["type"], each.get("ctx", {})
        if kind == "within":
            found += [inner._replace(path=(*path, *inner.path)) for inner in context["complaints"]]
        elif kind == "extra_forbidden":
            found.append(Complaint(path, _unknown(str(path[-1]), _fields(model, path[:-1])), True))
        elif kind in _WANTED:
            wanted = _WANTED[kind].format(**context)
            found.append(Complaint(path, f"must be {wanted}, not {short(each['input'])}"))
        else:
            found.append(Complaint(path, str(context.get("error", each["msg"]))))
    return found


def _fields(model: type[BaseModel] | None, path: Keys) -> list[str]:
    for key in path:
        hint = model.model_fields[str(key)].annotation if model else None
        inside = [hint, *typing.get_args(hint)]
        model = next((t for t in inside if isinstance(t, type) and issubclass(t, BaseModel)), None)
    return list(model.model_fields) if model else []


def _within(found: Sequence[Complaint]) -> PydanticCustomError:
    text = "; ".join(f"{dotted(c.path)}: {c.text}" if c.path else c.text for c in found)
    return PydanticCustomError("within", "{text}", {"text": text, "complaints": list(found)})


def _wanted(what: str) -> PydanticCustomError:
    return PydanticCustomError("wanted", "must be {wanted}", {"wanted": what})


# Types of values ----------------------------------------------------------------------------------------------------


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):  # which is a number to Python, but not to a reader
        raise _wanted("a number")
    return value


def either(value: Any, alternatives: Any) -> Any:
    """Try each alternative of a union; if none fits, say in one line what would."""
    try:
        return alternatives(value)
    except ValidationError as error:
        kinds = [(_WANTED.get(each["type"], each["msg"]), each.get("ctx", {})) for each in error.errors()]
        raise _wanted(" or ".join(dict.fromkeys(text.format(**context) for text, context in kinds))) from None


Whole = Annotated[int, Field(lt=2**63), BeforeValidator(_no_truth)]
Count = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_truth)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]


def _typed(hint: Any, bounds: Mapping[str, Any]) -> Any:
    """Put bounds and strictness on the numbers in a hyperparameter's type."""
    if hint in (int, float):
        return Annotated[Whole if hint is int else Number, Field(**bounds)]
    inside = tuple(_typed(each, bounds) for each in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return Annotated[typing.Union[inside], WrapValidator(either)]  # noqa: UP007
    return types.GenericAlias(tuple, inside) if typing.get_origin(hint) is tuple else hint


@cache
def _adapters(kind: Any) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(kind)
    return {f.name: TypeAdapter(_typed(hints[f.name], f.metadata)) for f in dataclasses.fields(kind)}


def _knobs(kind: Any, given: Any) -> dict[str, Any]:
    """Return all hyperparameters of an algorithm or a loss of which some are given."""
    if not isinstance(given, Mapping):
        raise _within([Complaint((), f"must be a mapping of hyperparameters, not {short(given)}")])
    adapters, values, found = _adapters(kind), dict[str, Any](), list[Complaint]()
    for key, value in given.items():
        try:
            values[key] = adapters[key].validate_python(value)
        except KeyError:
            found.append(Complaint((key,), _unknown(str(key), adapters), True))
        except ValidationError as error:
            found += [each._replace(path=(key, *each.path)) for each in complaints(error)]
    if found:
        raise _within(found)
    try:
        made = kind(**values)
    except ValueError as error:
        raise _within([Complaint((), str(error))]) from None
    return {name: getattr(made, name) for name in adapters}


def read_loss(value: Any) -> Any:
    """Bring a loss to its name and all its hyperparameters."""
    return _read_named(value, "loss", LOSSES)


def read_aggregation(value: Any) -> Any:
    """Bring an aggregation to its name and all its hyperparameters."""
    return _read_named(value, "aggregation", AGGREGATIONS)


def read_scheduler(value: Any) -> Any:
    """Bring a scheduler to its name and all its numbers."""
    return _read_named(value, "scheduler", SCHEDULERS)


def _read_named(value: Any, what: str, known: Mapping[str, type[Any]]) -> Any:
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise _wanted(f"one {what}: a name, or {{name: {{hyperparameter: value}}}}")
    ((name, given),) = value.items()
    if name not in known:
        raise _within([Complaint((), f"there is no {what} '{name}'; {algorithms.nearest(str(name), known)}")])
    try:
        return name, _knobs(known[name], {} if given is None else given)
    except PydanticCustomError as error:
        raise _inside((name,), error) from None


def seconds(value: Any) -> Any:
    """Read a length of time: a number of seconds, or one with a unit as in 90s, 20m, 2h, 1d."""
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([smhd])", value)):
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    if isinstance(value, str):
        raise _wanted("a time such as 90s, 20m, 2h or 1d")
    return value


def _inside(path: Keys, error: PydanticCustomError) -> PydanticCustomError:
    found: list[Complaint] = (error.context or {})["complaints"]
    return _within([each._replace(path=(*path, *each.path)) for each in found])


def listed(value: Any) -> Any:
    """Spell out the short forms of a chain: a name, one mapping, names among mappings, no hyperparameters."""
    if isinstance(value, str) or (isinstance(value, Mapping) and len(value) == 1):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    entries = [{entry: {}} if isinstance(entry, str) else entry for entry in value]
    return [{k: {} if v is None else v for k, v in e.items()} if isinstance(e, Mapping) else e for e in entries]


def read_chain(value: Any) -> Any:
    """Bring a chain to names and all hyperparameters, with what must run before it."""
    entries = listed(value)
    if not isinstance(entries, list) or not entries:
        raise _wanted("an algorithm's name or a list of {name: {hyperparameter: value}}")
    if len(entries) > LONGEST:
        raise _within([Complaint((), f"{len(entries)} algorithms in a chain; at most {LONGEST} are possible")])
    chain, found = list[Named](), list[Complaint]()
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or len(entry) != 1:
            found.append(Complaint((i,), f"must be one {{name: {{hyperparameter: value}}}}, not {short(entry)}"))
            continue
        ((name, given),) = entry.items()
        try:
            kind = algorithms.find(str(name))
        except ValueError as error:
            found.append(Complaint((i, name), str(error), True))
            continue
        if kind.after and not chain:
            chain.append((kind.after, _knobs(algorithms.find(kind.after), {})))
        try:
            chain.append((str(name), _knobs(kind, given)))
        except PydanticCustomError as error:
            found += (_inside((i, name), error).context or {})["complaints"]
    if found:
        raise _within(found)
    return tuple(chain)


def within(key: str, text: str) -> PydanticCustomError:
    """Return a complaint about a key of what is being validated."""
    return _within([Complaint((key,), text)])


def labelled(task: str, name: str, partition: str, test_alloc: str) -> None:
    """Refuse a task for which a data set has no labels, and clients' data by labels that it does not have."""
    from orchestrator.data import DATASETS
    from orchestrator.data.sources import SEGMENTED

    if name in DATASETS and (name in SEGMENTED) != (task == "segmentation"):
        has = "every pixel" if name in SEGMENTED else "every image"
        able = [other for other in DATASETS if (other in SEGMENTED) == (task == "segmentation")]
        raise ValueError(f"'{name}' has a label for {has}, which is not what {task} learns; it can: {', '.join(able)}")
    if task == "segmentation" and partition != "foreground":
        why = "goes by the label of an image, but here an image has many"
        raise ValueError(f"data.partition '{partition}' {why}; choose foreground")
    if task == "segmentation" and test_alloc != "floor":
        raise ValueError(
            f"data.test_alloc '{test_alloc}' is of labels of images; here all are tested by all: leave it out"
        )
    if task == "classification" and partition == "foreground":
        raise ValueError("data.partition 'foreground' is of labels of pixels; choose another, or the task segmentation")


def of_pixels(chain: Sequence[Named]) -> None:
    """Refuse algorithms that are not defined where every pixel has a label."""
    reasons = {i: (name, algorithms.find(name).per_image) for i, (name, _) in enumerate(chain)}
    text = "'{}' does not do segmentation: {}; the catalogue (--list) says which methods do"
    if found := [Complaint((i, name), text.format(name, why), True) for i, (name, why) in reasons.items() if why]:
        raise _within(found)


def fitting(chain: Sequence[Named], loss: Named, prior: str, pixels: bool = False) -> None:
    """Refuse a loss or a prior that an algorithm of the chain, or a task of labels of pixels, cannot learn by."""
    try:
        parts = algorithms.build(({name: knobs} for name, knobs in chain), prior).parts
    except ValueError as error:
        raise _within([Complaint(("prior",), str(error))]) from None
    name, knobs = loss
    if pixels and ESTIMATED.get(prior):
        why = algorithms.find(ESTIMATED[prior]).per_image
        raise within("prior", f"prior '{prior}' does not do segmentation: {why}; choose local or global")
    if pixels and LOSSES[name](**knobs).cosine is not None:
        raise within("loss", f"loss '{name}' needs a cosine classifier, and no network for segmentation has one")
    reasons = dict.fromkeys(part.refuses(LOSSES[name](**knobs)) for part in parts)
    found = [Complaint(("loss",), f"loss '{name}' does not fit: {reason}") for reason in reasons if reason]
    if found:
        raise _within(found)


def combinable(chain: Sequence[Named], prior: str, aggregation: Named) -> None:
    """Refuse an aggregation that would combine nothing, or that promises what the chain cannot keep."""
    name, parts = aggregation[0], algorithms.build(({name: knobs} for name, knobs in chain), prior).parts
    if name != "mean" and not any(part.card.sums for part in parts):
        who = "+".join(part.name for part in parts)
        raise ValueError(f"'{name}' has nothing to combine: with {who} the server adds up no uploads; choose mean")
    if AGGREGATIONS[name].private:
        for part in parts:
            if part.card.singles:
                raise ValueError(
                    f"'{name}' hides sums, but {part.name} tells the server each client's {part.card.singles}"
                )
        try:
            accountant()
        except ImportError as error:
            raise ValueError(str(error)) from None


def some(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse an empty list."""
    if not values:
        raise _wanted("a list of at least one")
    return values


def gpu_share(value: float | str) -> float | str:
    """Refuse a fraction that leaves part of every GPU unused."""
    if isinstance(value, str) or value == 0:
        return value
    if value < SMALLEST:
        raise ValueError(f"must be 0 or at least {SMALLEST:g}, not {value:g}")
    if value > 1:
        if value != int(value):
            raise ValueError(f"must be a whole number above 1, not {value:g}; choose {int(value)} or {int(value) + 1}")
    elif 1 - (fit := math.floor(1 / value + 1e-9)) * value > 0.011:  # 0.33 is as good as a third
        good = [math.floor(1e4 / k) / 1e4 for k in (fit + 1, fit)]
        raise ValueError(
            f"must be a share 1/k of a GPU, not {value:g}, which leaves {1 - fit * value:.0%} of each GPU unused; "
            f"choose {good[0]:g} or {good[1]:g}"
        )
    return value
