"""The catalogue: what every algorithm, loss, prior and data set is, what it sends and keeps, and what can be set."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import algorithms
from algorithms.aggregations import AGGREGATIONS
from algorithms.base import Algorithm, Card
from algorithms.losses import LOSSES
from algorithms.priors import ESTIMATED, PRIORS
from orchestrator.checkpoint import status_of
from orchestrator.data import SOURCES

KINDS = "optimisation", "personalized", "class imbalance", "classifier", "preparation"
RESULTS = Path(__file__).parents[1] / "results"  #: kept with the code; an installed package has none
TESTED = "digits"  #: what every method is tested on

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class Knob:
    """A hyperparameter: its name, its default, what it may be, and what it is for."""

    name: str
    default: str
    range: str
    meaning: str


def knobs(kind: type[Any]) -> list[Knob]:
    """Return the hyperparameters of an algorithm or a loss."""
    hints, comments = typing.get_type_hints(kind), _comments(kind)
    return [
        Knob(f.name, _plain(f.default), _range(hints[f.name], f.metadata), comments.get(f.name, ""))
        for f in dataclasses.fields(kind)
    ]


def _plain(value: Any) -> str:
    """Write a value as YAML does."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def _range(hint: Any, bounds: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if hint is bool:
        return "true | false"
    kinds = typing.get_args(hint) or (hint,)
    words = [{int: "whole number", float: "number", str: "text"}.get(kinds[0], str(kinds[0]))]
    words += [f"{sign} {bounds[key]:g}" for key, sign in _SIGNS.items() if key in bounds]
    return " ".join(words) + (" or null" if type(None) in kinds else "")


def _comments(kind: type[Any]) -> dict[str, str]:
    """Return what the `#:` comments of a class and of those it extends say of their fields."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            lines, _ = inspect.getsourcelines(base)
            for line in lines:
                name, _, comment = line.partition("#:")
                if comment and ":" in name:
                    found[name.split(":")[0].strip()] = comment.strip()
    return found


def about(kind: type[Algorithm]) -> str:
    """Return the first sentence of an algorithm's file: its name and where it comes from."""
    text = ast.get_docstring(ast.parse(inspect.getsource(sys.modules[kind.__module__]))) or ""
    return " ".join(text.split("\n\n")[0].split())


def entries() -> Iterator[tuple[str, type[Algorithm]]]:
    """Yield every algorithm by its name, kind by kind."""
    for group in KINDS:
        for name in algorithms.names():
            if algorithms.find(name).card.kind == group:
                yield name, algorithms.find(name)


def seen(card: Card) -> str:
    """Say what the server gets to see of the clients."""
    return f"each client's {card.singles}" if card.singles else "sums only" if card.sums else ""


def run_on(results: Path) -> dict[str, list[str]]:
    """Return the data sets on which each method has been run to the end, as kept results tell."""
    found = defaultdict[str, set[str]](set)
    for path in results.glob("*/trials/*/trial.json"):
        if status_of(path.parent)["status"] == "FINISHED":
            experiment = json.loads(path.read_text(encoding="utf-8"))["experiment"]
            names = [name for entry in experiment["algorithm"] for name in entry]
            for name in filter(None, (*names, ESTIMATED.get(experiment["local"]["prior"]))):
                found[name].add(experiment["data"]["name"])
    return {name: sorted(data) for name, data in found.items()}


def text() -> str:
    """Return the catalogue for a terminal."""
    lines, kept = [], run_on(RESULTS)
    for name, kind in entries():
        card = kind.card
        facts: dict[str, str | None] = {
            "uploads": card.uploads,
            "server sees": seen(card),
            "keeps": card.keeps,
            "needs": card.needs,
        }
        facts |= {"runs after": kind.after, "no segmentation:": kind.per_image}
        if kept:
            facts["run here on" if name in kept else "tested on"] = ", ".join(kept.get(name, [TESTED]))
        told = "; ".join([card.kind, *(f"{what} {fact}" for what, fact in facts.items() if fact)])
        lines += [name, f"  {about(kind)}", f"  {told}", *_shown(kind), ""]
    for name, loss in LOSSES.items():
        prior = " (with a prior)" if loss.uses_prior else ""
        lines += [f"loss {name}{prior}", f"  {inspect.getdoc(loss)}", *_shown(loss), ""]
    for name, rule in AGGREGATIONS.items():
        lines += [f"aggregation {name}", f"  {inspect.getdoc(rule)}", *_shown(rule), ""]
    lines += [f"prior {name}\n  {inspect.getdoc(prior)}\n" for name, prior in PRIORS.items()]
    ran = {data for found in kept.values() for data in found}
    for name, source in SOURCES.items():
        status = "run here" if name in ran else "tested on a small copy in its published layout, needs your data"
        told = f"  {source.classes} classes of {'pixels' if source.names else 'images'}" + f"; {status}" * bool(kept)
        lines += [f"data {name}", told, f"  where from: {source.advice}", ""]
    return "\n".join(lines)


def _shown(kind: type[Any]) -> list[str]:
    return [f"    {k.name}: {k.default}  ({k.range})  {k.meaning}" for k in knobs(kind)]


def markdown() -> str:
    """Return the catalogue as the README's table."""
    kept = run_on(RESULTS)
    heads = ["name", "method", "kind", "uploads", "server sees", "keeps", "needs besides", "segmentation"]
    heads += ["kept results", "hyperparameters"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, kind in entries():
        card, values = kind.card, ", ".join(f"`{k.name}` {k.default}" for k in knobs(kind))
        pixels = f"no: {kind.per_image}" if kind.per_image else "yes"
        runs = ", ".join(f"`{data}`" for data in kept.get(name, ())) or f"none; tested on `{TESTED}`"
        facts = card.kind, card.uploads, seen(card), card.keeps, card.needs, pixels, runs
        cells = f"`{name}`", about(kind), *facts, values
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    losses = ", ".join(f"`{name}`" + " (prior)" * loss.uses_prior for name, loss in LOSSES.items())
    rules = f"Aggregations: {', '.join(f'`{name}`' for name in AGGREGATIONS)}."
    return "\n".join([*rows, "", f"Losses: {losses}. Priors: {', '.join(f'`{name}`' for name in PRIORS)}. {rules}"])


def inserted(document: str) -> str:
    """Return a document with the table of today between the two comments that mark its place."""
    head, _, rest = document.partition("<!-- catalogue")
    mark, _, rest = rest.partition("-->")
    _, end, tail = rest.partition("<!-- end of catalogue -->")
    return f"{head}<!-- catalogue{mark}-->\n{markdown()}\n{end}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(inserted(path.read_text(encoding="utf-8")), encoding="utf-8")
