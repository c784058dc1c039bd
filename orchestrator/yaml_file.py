"""Strict YAML: plain data and where each node stands; no aliases, no key twice, no tags but those of open leaves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import Reader

from algorithms import nearest

Keys = tuple[str | int, ...]  # of a node: keys and list indices from the root

LARGEST = 1_000_000  #: bytes in a file
MOST = 5_000  #: values in a file
DEEPEST = 30  #: lists and mappings inside one another
LONGEST = 200  #: characters of a key
SHOWN = 5  #: lines of an error at most
WIDEST = 2_000  #: characters of a line of it

#: kind of an open leaf -> what it takes
KINDS = {
    "choice": "[a, b, ...]",
    "grid": "[a, b, ...]",
    "uniform": "[lowest, highest]",
    "loguniform": "[lowest, highest]",
    "quniform": "[lowest, highest, step]",
    "randint": "[lowest, one above the highest]",
    "sample": 'an expression such as "local.lr / 10"',
}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS = {"": None, "~": None} | {
    spelt: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelt in (word, word.title(), word.upper())
}


class InputError(ValueError):
    """A user's mistakes, one message each, saying where, what is wrong and what would be right."""

    def __init__(self, messages: Sequence[str]) -> None:
        texts = [printable(message) for message in messages]
        self.messages = [text if len(text) <= WIDEST else text[: WIDEST - 1] + "…" for text in texts]
        rest = len(self.messages) - SHOWN + 1
        lines = self.messages if rest < 2 else [*self.messages[: SHOWN - 1], f"... and {rest} more"]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return InputError, (self.messages,)


@dataclass(frozen=True)
class Open:
    """A leaf left open: its kind, the candidates or the bounds, and where it stands."""

    kind: str
    values: tuple[Any, ...]
    mark: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown tag '!{self.kind}'; {nearest('!' + self.kind, ['!' + k for k in KINDS])}")
        wanted = f"!{self.kind} takes {KINDS[self.kind]}"
        if any(isinstance(inner, Open) for inner in walk(self.values)):
            raise ValueError("an open leaf inside another is not possible; list the combinations, or open two leaves")
        if self.kind == "sample":
            if len(self.values) != 1 or not isinstance(self.values[0], str):
                raise ValueError(wanted)
            return
        if self.kind in ("choice", "grid"):
            if not self.values:
                raise ValueError(f"{wanted}: at least one value")
            return
        if len(self.values) != (3 if self.kind == "quniform" else 2):
            raise ValueError(f"{wanted}, not {len(self.values)} values")
        whole = self.kind == "randint"
        for value in self.values:
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{wanted}: {'whole ' if whole else ''}numbers, not {short(value)}")
            if not math.isfinite(value):
                raise ValueError(f"{wanted}: finite numbers, not {short(value)}")
        low, high = self.values[:2]
        if whole and not -(2**63) <= low <= high <= 2**63:
            raise ValueError(f"{wanted}: between -2 ** 63 and 2 ** 63")
        if low >= high:
            raise ValueError(f"{wanted}: {short(low)} must be less than {short(high)}")
        if self.kind == "loguniform" and low <= 0:
            raise ValueError(f"{wanted}: the lowest must be > 0, not {short(low)}")
        if self.kind == "quniform":
            step = self.values[2]
            if step > 0 and max(abs(low), abs(high)) / step > 2**53:
                raise ValueError(f"{wanted}: {short(step)} is too small a step between {short(low)} and {short(high)}")
            if step <= 0 or any(not math.isclose(v / step, round(v / step), abs_tol=1e-9) for v in (low, high)):
                raise ValueError(f"{wanted}: both ends must be multiples of a step > 0, not of {short(step)}")

    def __str__(self) -> str:
        return f"!{self.kind} {short(list(self.values))}"


@dataclass
class Document:
    """Plain data and, for every path in it, the places of its key and of its value."""

    value: Any
    places: dict[Keys, tuple[str, str]]

    def place(self, path: Keys, key: bool = False) -> str:
        """Return where a path stands, or the nearest thing around it that does stand somewhere."""
        known = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in self.places), None)
        return "" if known is None else self.places[known][0 if key and known == path else 1]

    def within(self, path: Keys) -> Document:
        """Return the same data, but where the part at a path says something, it stands there."""
        inner = {at[len(path) :]: where for at, where in self.places.items() if at[: len(path)] == path}
        return Document(self.value, self.places | inner)

    def put(self, keys: Sequence[str], new: Document, short_forms: Mapping[Keys, Callable[[str], Any]]) -> None:
        """Set the value at a path, making mappings on the way; an entry of a list goes by its index or its only key."""
        here, path, queue, place = self.value, Keys(), list(keys), new.place(())
        if len(queue) > DEEPEST:
            raise InputError([f"{place}: a path of more than {DEEPEST} keys"])
        while queue:
            key: str | int = queue.pop(0)
            if isinstance(here, list):
                if not str(key).isdecimal():
                    queue.insert(0, str(key))
                key = _index(here, str(key), path, place)
            elif not isinstance(here, dict):
                raise InputError([f"{place}: {dotted(path)} is {short(here)}, which has no part '{key}'"])
            path = (*path, key)
            if queue:
                if isinstance(here, dict) and here.get(str(key)) is None:
                    here[str(key)] = {}
                    self.places[path] = (place, place)
                elif path in short_forms and isinstance(here[key], str):
                    here[key] = short_forms[path](here[key])
                here = here[key]
            else:
                here[key] = new.value
        inside = {at: where for at, where in self.places.items() if at[: len(path)] != path}
        self.places = inside | {(*path, *at): where for at, where in new.places.items()}


def _index(entries: list[Any], key: str, path: Keys, place: str) -> int:
    if key.isdecimal() and len(key) < 10 and int(key) < len(entries):
        return int(key)
    found = [i for i, entry in enumerate(entries) if isinstance(entry, dict) and list(entry) == [key]]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{i}: {'/'.join(e) if isinstance(e, dict) else e}" for i, e in enumerate(entries))
    raise InputError([f"{place}: {dotted(path)} has {'several' if found else 'no'} '{key}'; it holds {names}"])


def walk(node: Any) -> Iterator[Any]:
    """Yield a node and everything inside it, but not what is inside an open leaf."""
    yield node
    if isinstance(node, Mapping | list | tuple):
        for inner in node.values() if isinstance(node, Mapping) else node:
            yield from walk(inner)


def dotted(path: Keys) -> str:
    """Write a path as `local.lr`."""
    return ".".join(map(str, path))


def told(place: str, path: str, text: str) -> str:
    """Put a message together: where it is, what it is about, what is wrong."""
    return ": ".join(part for part in (place, path, text) if part)


def printable(text: str) -> str:
    """Escape what would not print on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short(value: Any, width: int = 60) -> str:
    """Show a value in an error message."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = str(value) if isinstance(value, Open) else text
    return text if len(text) <= width else text[: width - 1] + "…"


def load(path: Any) -> str:
    """Read a file's text, refusing what is no text or too large to be a configuration."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError([f"{path}: {error.strerror or error}"]) from None
    if len(content) > LARGEST:
        raise InputError([f"{path}: larger than {LARGEST:,} bytes, which no experiment needs"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise InputError([f"{path}:{line}:{column}: not UTF-8; save the file in that encoding"]) from None


def parse(text: str, where: Callable[[int, int], str]) -> Document:
    """Parse strict YAML; `where` names a place by its line and column."""
    if len(text) > LARGEST:
        raise InputError([f"{where(1, 1)}: larger than {LARGEST:,} characters, which no experiment needs"])
    if bad := Reader.NON_PRINTABLE.search(text):
        line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - text.rfind("\n", 0, bad.start())
        raise InputError([f"{where(line, column)}: the character {bad.group()!r} is not allowed"])
    try:
        return _Parser(text, where).document()
    except yaml.MarkedYAMLError as error:
        at, rows = error.problem_mark or error.context_mark, text.splitlines() or [""]
        line, column = (at.line + 1, at.column + 1) if at else (1, 1)
        if line > len(rows):  # the end is in the last line, not after it
            line, column = len(rows), len(rows[-1]) + 1
        tab = "\t" in rows[line - 1][: column + 1]
        hint = "; indent with spaces, not with a tab" if tab else ""
        parts = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError([f"{where(line, column)}: no valid YAML: {parts}{hint}"]) from None


class _Parser:
    def __init__(self, text: str, where: Callable[[int, int], str]) -> None:
        self.events = yaml.parse(text, Loader=_LOADER)
        self.where, self.nodes = where, 0
        self.places: dict[Keys, tuple[str, str]] = {}

    def document(self) -> Document:
        value, found = None, False
        self.places[()] = (self.where(1, 1),) * 2
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if found:
                    raise self.error(event, (), "a second document; a file holds one")
                value, found = self.node(next(self.events), (), None), True
        return Document(value, self.places)

    def error(self, event: Any, path: Keys, text: str) -> InputError:
        return InputError([told(self.at(event), dotted(path), text)])

    def at(self, event: Any) -> str:
        return self.where(event.start_mark.line + 1, event.start_mark.column + 1)

    def node(self, event: Any, path: Keys, key: str | None) -> Any:
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise self.error(event, path, "anchors (&) and aliases (*) are not allowed; write the value out")
        self.nodes += 1
        if self.nodes > MOST:
            raise self.error(event, path[:3], f"more than {MOST:,} values, which no experiment needs")
        if len(path) > DEEPEST:
            raise self.error(event, path[:3], f"nested more than {DEEPEST} deep")
        place = self.at(event)
        self.places[path] = (key or place, place)
        tag = event.tag if event.tag not in (None, "!") else None
        if tag is None:
            return self.plain(event, path)
        kind = tag.removeprefix("!")
        if kind not in KINDS:
            raise self.error(event, path, f"unknown tag '{tag}'; {nearest(tag, ['!' + k for k in KINDS])}")
        if not isinstance(event, yaml.ScalarEvent if kind == "sample" else yaml.SequenceStartEvent):
            raise self.error(event, path, f"{tag} takes {KINDS[kind]}{', a list' * (kind != 'sample')}")
        outside, self.places = self.places, {}  # an error in a candidate is shown at the leaf
        values = [event.value] if isinstance(event, yaml.ScalarEvent) else self.plain(event, path)
        self.places = outside
        try:
            return Open(kind, tuple(values), place)
        except ValueError as error:
            raise self.error(event, path, str(error)) from None

    def plain(self, event: Any, path: Keys) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return scalar(event.value) if event.implicit[0] and not event.style else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            entries: list[Any] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                entries.append(self.node(inner, (*path, len(entries)), None))
            return entries
        mapping: dict[str, Any] = {}
        while not isinstance(key := next(self.events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent) or key.anchor or key.tag:
                raise self.error(key, path, "a key must be a plain word")
            if len(key.value) > LONGEST:
                raise self.error(key, path, f"a key of more than {LONGEST} characters")
            if key.value in mapping:
                raise self.error(key, (*path, key.value), "this key is already given; remove one of the two")
            mapping[key.value] = self.node(next(self.events), (*path, key.value), self.at(key))
        return mapping


def scalar(text: str) -> Any:
    """Read an unquoted word: null, a truth value, a number (1e-3 too, unlike in YAML 1.1) or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 100 else text
    return float(text.lower().replace(".i", "i").replace(".n", "n")) if _FLOAT.fullmatch(text) else text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
_Dumper.add_representer(
    Open,
    lambda dumper, leaf: (
        dumper.represent_scalar("!sample", leaf.values[0])
        if leaf.kind == "sample"
        else dumper.represent_sequence(f"!{leaf.kind}", leaf.values, flow_style=True)
    ),
)
# Text that `scalar` would read as a number must be quoted.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"^(?:{_INT.pattern})$"), list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def emit(value: Any) -> str:
    """Write plain data with open leaves as YAML that `parse` reads back to the same."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "default_flow_style": None, "width": 110}
    return str(yaml.dump(value, Dumper=_Dumper, **options))


def laid_over(tree: Any, case: Any) -> Any:
    """Return a tree in which everything that a case says is as the case says it."""
    if not isinstance(tree, dict) or not isinstance(case, dict):
        return case
    return {**tree, **{key: laid_over(tree.get(key), value) for key, value in case.items()}}
