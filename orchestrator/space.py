"""Open leaves: a sweep is an experiment with some leaves left open; here they are checked, drawn and filled in."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from algorithms.losses import LOSSES
from orchestrator.experiment import Complaint, Experiment, Sweep, complaints, problems, shown
from orchestrator.yaml_file import InputError, Keys, Open, dotted, short, told

__all__ = ["InputError", "Open", "Trial", "check", "leaves", "trials", "tune_domain"]

MOST = 10_000  #: trials of a sweep
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
    tree, open_prior = _filled(sweep.experiment, chosen), ("local", "prior")
    if open_prior in chosen:
        loss = tree["local"].get("loss", "")
        kind = LOSSES.get(loss if isinstance(loss, str) else next(iter(loss), ""))
        if kind is not None and not kind.uses_prior:
            chosen[open_prior] = tree["local"]["prior"] = "none"
    return tree


# Checking -----------------------------------------------------------------------------------------------------------


def check(sweep: Sweep) -> None:
    """Validate every candidate of every open leaf, each beside the first candidates of the others."""
    for variant in sweep.variants():
        _check(variant)


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
    if messages:
        raise InputError(list(dict.fromkeys(messages)))


def _candidates(leaf: Open) -> list[Any]:
    """Return all values of a list, or the ends of a range and a point inside it that is hardly a whole number."""
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
    for i, variant in enumerate(sweep.variants()):
        for trial in _trials(variant, seed):
            params = {"case": i, **trial.params} if sweep.cases else trial.params
            numbered = replace(trial, id=f"{len(found):04d}", params=params)
            found.setdefault(trial.experiment.model_dump_json(), numbered)
    return list(found.values())


def _trials(sweep: Sweep, seed: int) -> list[Trial]:
    opened = dict(_leaves(sweep.experiment, ()))
    grids = {path: leaf for path, leaf in opened.items() if leaf.kind == "grid"}
    random = {path: leaf for path, leaf in opened.items() if leaf.kind != "grid"}
    draws = sweep.search.samples if random else 1  # the same again would only be removed
    if (count := draws * math.prod(len(leaf.values) for leaf in grids.values())) > MOST:
        raise InputError([f"a sweep of {count:,} trials; at most {MOST:,} are possible: open fewer leaves"])
    labels = _labels(list(opened))
    found: list[Trial] = []
    for draw in range(draws):
        drawn = {path: _draw(leaf, path, seed, draw) for path, leaf in random.items()}
        for point in itertools.product(*(leaf.values for leaf in grids.values())):
            at = drawn | dict(zip(grids, point, strict=True))
            chosen = {path: at[path] for path in opened}
            experiment = _experiment(sweep, chosen)
            params = {dotted(path): value for path, value in chosen.items()}
            name = _name(experiment, {labels[path]: value for path, value in chosen.items() if path in labels})
            found.append(Trial("", params, experiment, name))
    return found


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
    step = leaf.values[2]
    value = int(rng.integers(round(low / step), round(high / step) + 1)) * step
    return value if isinstance(value, int) else float(f"{value:.12g}")


def _labels(paths: list[Keys]) -> dict[Keys, str]:
    """Name leaves by their last key, or the last two where that is not enough; algorithms name themselves."""
    named = [path for path in paths if path[0] != "algorithm" or len(path) > 2]
    lasts = Counter(path[-1] for path in named)
    return {path: dotted(path[-1:] if lasts[path[-1]] == 1 else path[-2:]) for path in named}


def _name(experiment: Experiment, values: Mapping[str, Any]) -> str:
    words = ["+".join(name for name, _ in experiment.algorithm)]
    words += [f"{label}={_compact(value)}" for label, value in values.items()]
    name = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _compact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else short(value).replace('"', "").replace(" ", "")


def tune_domain(leaf: Open) -> Any:
    """Return the Ray Tune domain of an open leaf, for searchers that learn from earlier trials."""
    from ray import tune

    make = {"grid": tune.grid_search, "choice": tune.choice}.get(leaf.kind)
    return make(list(leaf.values)) if make else getattr(tune, leaf.kind)(*leaf.values)
