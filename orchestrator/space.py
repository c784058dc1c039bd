"""Open leaves: a sweep is an experiment with some leaves left open; here they are checked, drawn and filled in."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from algorithms.losses import LOSSES
from orchestrator.experiment import Experiment, problems, shown
from orchestrator.expressions import evaluate
from orchestrator.fields import Complaint, complaints
from orchestrator.yaml_file import InputError, Keys, Open, dotted, short, told

if TYPE_CHECKING:
    from orchestrator.sweep_file import Sweep

MOST = 10_000  #: trials of a sweep
ENOUGH = 20  #: mistakes after which no more are looked for
LONGEST = 80  #: characters of a trial's name


@dataclass(frozen=True)
class Trial:
    """One experiment of a sweep: its number, what its open leaves became, and a name for people."""

    id: str
    params: dict[str, Any]
    experiment: Experiment
    name: str


def leaves(sweep: Sweep) -> dict[str, Open]:
    """Return the open leaves by their dotted paths, in the order of the file."""
    return {dotted(path): leaf for path, leaf in _leaves(sweep.experiment, ())}


def _leaves(node: Any, path: Keys) -> Iterator[tuple[Keys, Open]]:
    if isinstance(node, Open):
        yield path, node
    elif isinstance(node, dict | list):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(inner, (*path, key))


def _filled(node: Any, chosen: Mapping[Keys, Any], path: Keys = ()) -> Any:
    if isinstance(node, Open):
        return chosen[path]
    if isinstance(node, dict):
        return {key: _filled(inner, chosen, (*path, key)) for key, inner in node.items()}
    return [_filled(inner, chosen, (*path, i)) for i, inner in enumerate(node)] if isinstance(node, list) else node


def _tree(sweep: Sweep, chosen: dict[Keys, Any]) -> Any:
    """Fill in the leaves; in a grid of losses and priors, the prior of a loss that uses none is none."""
    derived = {path: leaf for path, leaf in _leaves(sweep.experiment, ()) if leaf.kind == "sample"}
    chosen |= dict.fromkeys(derived)
    tree, open_prior = _filled(sweep.experiment, chosen), ("local", "prior")
    for path, leaf in derived.items():
        try:
            chosen[path] = evaluate(leaf.values[0], tree, {shown(other, tree) for other in derived})
        except ValueError as error:
            raise InputError([told(leaf.mark, shown(path, tree), f"!sample: {error}")]) from None
    tree = _filled(sweep.experiment, chosen) if derived else tree
    if open_prior in chosen:
        loss = tree["local"].get("loss", "")
        kind = LOSSES.get(next(iter(loss), "") if isinstance(loss, dict) else str(loss))
        if kind is not None and not kind.uses_prior:
            chosen[open_prior] = tree["local"]["prior"] = "none"
    return tree


# Checking -----------------------------------------------------------------------------------------------------------


def check(sweep: Sweep) -> None:
    """Validate every candidate of every open leaf, each beside the first candidates of the others, and the search."""
    for variant in sweep.variants():
        _check_search(variant, bool(sweep.cases))
    _check_size(sweep)
    for variant in sweep.variants():
        _check(variant)


def _check_size(sweep: Sweep) -> None:
    """Refuse more trials than can be checked one by one."""
    if (count := sum(map(_count, sweep.variants()))) > MOST:
        text = f"a sweep of {count:,} trials; at most {MOST:,} are possible: open fewer leaves, or lower search.samples"
        raise InputError([told(sweep.document.place(()), "", text)])


def varied(path: str) -> bool:
    """Tell whether population based training may change a leaf of a run that has begun."""
    return path.startswith("local.") or (path.startswith("algorithm.") and path.count(".") > 2)


def _check_search(sweep: Sweep, cases: bool) -> None:
    """Refuse a searcher or scheduler that cannot handle this sweep."""
    search, opened = sweep.search, leaves(sweep)
    scheduler, found = search.scheduler[0], list[str]()

    def refuse(key: str, text: str, leaf: Open | None = None) -> None:
        place = sweep.document.place(("search", key)) if leaf is None else leaf.mark
        found.append(told(place, f"search.{key}", text))

    if search.searcher == "grid":
        for path, leaf in opened.items():
            if leaf.kind in ("uniform", "loguniform"):
                refuse(
                    "searcher", f"grid cannot try every value of {path}: give a list, or !quniform with a step", leaf
                )
        if search.samples > 1:
            refuse("samples", "grid tries every combination once; remove samples, or choose searcher random")
    if search.searcher == "optuna":
        if find_spec("optuna") is None:
            refuse("searcher", "optuna is not installed; type: pip install 'fedtail[search]'")
        if cases:
            refuse("searcher", "optuna compares values, not cases; give each case a file of its own")
        for path, leaf in opened.items():
            if leaf.kind == "grid" and path != "seed":
                refuse("searcher", f"optuna proposes the values of {path} itself: write !choice instead of !grid", leaf)
        if not any(leaf.kind not in ("grid", "sample") for leaf in opened.values()):
            refuse("searcher", "optuna has nothing to propose: leave a hyperparameter open")
        if scheduler in ("hyperband", "pbt"):
            refuse(
                "scheduler", f"{scheduler} needs all trials at the start and optuna proposes them one by one; use asha"
            )
    if scheduler in ("hyperband", "pbt") and search.concurrent is not None:
        refuse("concurrent", f"{scheduler} lets trials take turns; say how large each is by cluster.actors instead")
    if scheduler == "pbt":
        for path, leaf in opened.items():
            if not varied(path) and path != "seed":
                refuse(
                    "scheduler", f"pbt moves weights between trials, which must not differ in {path}; close it", leaf
                )
        if cases:
            refuse("scheduler", "pbt moves weights between trials, which must not be different cases")
        if not any(varied(path) and leaf.kind != "sample" for path, leaf in opened.items()):
            refuse("scheduler", "pbt has nothing to vary: open a leaf of local or a hyperparameter of an algorithm")
    if found:
        raise InputError(list(dict.fromkeys(found)))


def _check(sweep: Sweep) -> None:
    opened = dict(_leaves(sweep.experiment, ()))
    first = {path: _candidates(leaf)[0] for path, leaf in opened.items()}
    tree = _tree(sweep, dict(first))
    everywhere = problems(tree)
    messages = [_message(sweep, each, tree, opened, first, None) for each in everywhere]
    for path, leaf in opened.items():
        for value in _candidates(leaf)[1:]:
            chosen = first | {path: value}
            tree = _tree(sweep, chosen)
            new = [each for each in problems(tree) if each not in everywhere]
            messages += [_message(sweep, each, tree, opened, chosen, path) for each in new]
            if len(messages) > ENOUGH:
                raise InputError(list(dict.fromkeys(messages)))
    if messages:
        raise InputError(list(dict.fromkeys(messages)))


def _candidates(leaf: Open) -> list[Any]:
    """Return all values of a list, or the ends of a range and a point inside it that is hardly a whole number."""
    if leaf.kind == "sample":
        return [None]  # follows from the others
    if leaf.kind in ("choice", "grid"):
        return list(leaf.values)
    low, high = leaf.values[:2]
    if leaf.kind == "randint":
        return [low, high - 1]
    return [low, high] if leaf.kind == "quniform" else [low, high, low + (high - low) * (math.sqrt(5) - 1) / 2]


def _message(
    sweep: Sweep,
    complaint: Complaint,
    tree: Mapping[str, Any],
    opened: Mapping[Keys, Open],
    chosen: Mapping[Keys, Any],
    cause: Keys | None,
) -> str:
    """Tell a complaint at the open leaf it is about, or at the one that was varied, or at its own place."""
    path, text, key = complaint
    at = next((leaf for leaf in opened if path[: len(leaf)] == leaf), cause)
    if at is None:
        return told(sweep.document.place(path, key), shown(path, tree), text)
    values = {shown(leaf, tree): short(chosen[leaf]) for leaf in (at, cause or at)}
    return told(opened[at].mark, shown(path, tree), f"{text} ({_with(values)})")


def _with(values: Mapping[str, str]) -> str:
    return "with " + ", ".join(f"{path} = {value}" for path, value in values.items())


# Expanding ----------------------------------------------------------------------------------------------------------


def trials(sweep: Sweep, seed: int = 0) -> list[Trial]:
    """Expand a sweep into its distinct experiments: for every draw of the random leaves the product of the grids."""
    found: dict[str, Trial] = {}
    apart = _told_apart(sweep)
    _check_size(sweep)
    for i, variant in enumerate(sweep.variants()):
        for trial in _trials(variant, seed):
            params = {"case": i, **trial.params} if sweep.cases else trial.params
            name = _short(trial.name + apart[i])
            numbered = replace(trial, id=f"{len(found):04d}", params=params, name=name)
            found.setdefault(trial.experiment.model_dump_json(), numbered)
    alike: dict[str, list[Trial]] = {}
    for trial in found.values():
        alike.setdefault(trial.name, []).append(trial)
    names = {trial.id: name for group in alike.values() for trial, name in _named_apart(group)}
    return [replace(trial, name=names[trial.id]) for trial in found.values()]


def _named_apart(alike: Sequence[Trial]) -> Iterator[tuple[Trial, str]]:
    """Name trials that would go by one name by what differs in their experiments too."""
    settings = [dict(_plain_leaves(t.experiment.model_dump(), ())) for t in alike] if len(alike) > 1 else [{}]
    for trial, own in zip(alike, settings, strict=True):
        apart = (path for path, value in own.items() if any(s.get(path) != value for s in settings))
        yield trial, _short(trial.name + "".join(f" {path[-1]}={_compact(own[path])}" for path in apart))


def _told_apart(sweep: Sweep) -> list[str]:
    """Return for each case what tells it from others that run the same algorithms."""
    settings = [{path: _compact(leaf) for path, leaf in _plain_leaves(case, ())} for case in sweep.cases]
    chains = [[next(iter(e)) if isinstance(e, dict) else e for e in _entries(case)] for case in sweep.cases]
    told = []
    for i, own in enumerate(settings):
        others = [other for j, other in enumerate(settings) if j != i and chains[j] == chains[i]]
        apart = {path: value for path, value in own.items() if any(o.get(path) != value for o in others)}
        told.append("".join(f" {path[-1]}={value}" for path, value in apart.items()))
    return told or [""]


def _entries(case: Mapping[str, Any]) -> list[Any]:
    chain = case.get("algorithm", [])
    return chain if isinstance(chain, list) else [chain]


def _plain_leaves(node: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield what a part of an experiment says, leaves that are open left out: these are named by their values."""
    if isinstance(node, dict | list):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _plain_leaves(inner, (*path, key))
    elif not isinstance(node, Open):
        yield path, node


def _trials(sweep: Sweep, seed: int) -> list[Trial]:
    grids, random = _grids(sweep)
    opened = [path for path, leaf in _leaves(sweep.experiment, ()) if leaf.kind != "sample"]
    values = [[_nth(leaf, i) for i in _numbers(leaf)] for leaf in grids.values()]
    found: list[Trial] = []
    for draw in range(_draws(sweep)):
        drawn = {path: _draw(leaf, path, seed, draw) for path, leaf in random.items()}
        for point in itertools.product(*values):
            at = drawn | dict(zip(grids, point, strict=True))
            found.append(_trial(sweep, {path: at[path] for path in opened}))
    return found


def _grids(sweep: Sweep) -> tuple[dict[Keys, Open], dict[Keys, Open]]:
    """Return the leaves of which every value is tried, and those that are drawn."""
    opened = {path: leaf for path, leaf in _leaves(sweep.experiment, ()) if leaf.kind != "sample"}
    grids = {path: leaf for path, leaf in opened.items() if leaf.kind == "grid" or sweep.search.searcher == "grid"}
    return grids, {path: leaf for path, leaf in opened.items() if path not in grids}


def _draws(sweep: Sweep) -> int:
    return sweep.search.samples if _grids(sweep)[1] else 1  # the same again would only be removed


def _count(sweep: Sweep) -> int:
    """Return how many trials there are, equal ones included."""
    sizes = (r.stop - r.start for r in map(_numbers, _grids(sweep)[0].values()))
    return _draws(sweep) * math.prod(sizes)


def _numbers(leaf: Open) -> range:
    """Number the values of a leaf that has finitely many."""
    if leaf.kind in ("choice", "grid"):
        return range(len(leaf.values))
    low, high, step = (*leaf.values, 1)[:3]
    return range(low, high) if leaf.kind == "randint" else range(round(low / step), round(high / step) + 1)


def _nth(leaf: Open, number: int) -> Any:
    """Return the value of a leaf that has this number."""
    if leaf.kind in ("choice", "grid"):
        return leaf.values[number]
    return number if leaf.kind == "randint" else _multiple(number, leaf.values[2])


def fill(sweep: Sweep, values: Mapping[str, Any], id: str) -> Trial:
    """Make a trial from given values of the open leaves, named by their dotted paths."""
    paths = [path for path, leaf in _leaves(sweep.experiment, ()) if leaf.kind != "sample"]
    return replace(_trial(sweep, {path: values[dotted(path)] for path in paths}), id=id)


def _trial(sweep: Sweep, chosen: dict[Keys, Any]) -> Trial:
    experiment = _experiment(sweep, chosen)
    labels = _labels(list(chosen))
    params = {dotted(path): value for path, value in chosen.items()}
    name = _name(experiment, {labels[path]: value for path, value in chosen.items() if path in labels})
    return Trial("", params, experiment, name)


def _experiment(sweep: Sweep, chosen: dict[Keys, Any]) -> Experiment:
    tree = _tree(sweep, chosen)
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        values = {shown(path, tree): short(value) for path, value in chosen.items()}
        raise InputError(
            [
                told(sweep.document.place(path, key), shown(path, tree), f"{text} ({_with(values)})")
                for path, text, key in complaints(error, Experiment)
            ]
        ) from None


def _draw(leaf: Open, path: Keys, seed: int, draw: int) -> Any:
    """Draw a value; a leaf's stream has its path in it, so that opening another leaf does not change it."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, draw, zlib.crc32(dotted(path).encode()))))
    if leaf.kind == "choice":
        return leaf.values[int(rng.integers(len(leaf.values)))]
    low, high = leaf.values[:2]
    if leaf.kind == "randint":
        return int(rng.integers(low, high))
    if leaf.kind == "uniform":
        return float(rng.uniform(low, high))
    if leaf.kind == "loguniform":
        return min(max(float(np.exp(rng.uniform(np.log(low), np.log(high)))), low), high)
    numbers = _numbers(leaf)
    return _multiple(int(rng.integers(numbers.start, numbers.stop)), leaf.values[2])


def _multiple(times: int, step: float) -> float:
    value = times * step
    return value if isinstance(value, int) else float(f"{value:.12g}")


def _labels(paths: list[Keys]) -> dict[Keys, str]:
    """Name leaves by their last key, or the last two where that is not enough; algorithms name themselves."""
    named = [path for path in paths if path[0] != "algorithm" or len(path) > 2]
    lasts = Counter(path[-1] for path in named)
    return {path: dotted(path[-1:] if lasts[path[-1]] == 1 else path[-2:]) for path in named}


def _name(experiment: Experiment, values: Mapping[str, Any]) -> str:
    words = ["+".join(name for name, _ in experiment.algorithm)]
    words += [f"{label}={_compact(value)}" for label, value in values.items()]
    return _short("".join(c if c.isprintable() else "?" for c in " ".join(words)))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _compact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else short(value).replace('"', "").replace(" ", "")


def tune_domain(leaf: Open) -> Any:
    """Return the Ray Tune domain of an open leaf, for schedulers that draw anew while trials run."""
    from ray import tune

    make = {"grid": tune.grid_search, "choice": tune.choice}.get(leaf.kind)
    return make(list(leaf.values)) if make else getattr(tune, leaf.kind)(*leaf.values)
