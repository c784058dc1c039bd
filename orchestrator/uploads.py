"""What clients send to be added up, and the order in which it is: a tree, of which anybody may add any branch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from algorithms.base import Sum
from orchestrator.gate import Form


@dataclass
class Part:
    """Uploads of one form that were added up, or are to be; or a single one."""

    key: Hashable
    form: Form
    ids: list[int]
    total: Sum
    first: int = 0  #: place of the first of the 2**height jobs that this branch of the tree is about
    height: int = 0
    ours: bool = False  #: whether the total was made in this process, and may be added to in its place

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (self.key, self.form, self.ids, self.total, self.first, self.height)

    def fits(self, other: Part) -> bool:
        """Tell whether the two may be added."""
        return self.key == other.key and self.form == other.form

    def add(self, other: Part) -> None:
        """Add another part."""
        if self.ours:
            self.total += other.total
        else:
            self.total, self.ours = self.total + other.total, True
        self.ids = self.ids + other.ids


def fold(parts: Iterable[Part], height: int) -> list[Part]:
    """Add up parts to branches of a height, neighbours first: the same bits, whoever has added up some before."""
    parts = sorted(parts, key=lambda part: part.first)
    for level in range(1, height + 1):
        kept: list[Part] = []
        beside: list[Part] = []  # those that have reached this level at the place at hand
        for part in parts:
            if part.height < level:
                part.height, part.first = level, part.first >> level << level
                beside = [other for other in beside if other.first == part.first]
                if left := next((other for other in beside if other.fits(part)), None):
                    left.add(part)
                    continue
            if part.height == level:
                beside.append(part)
            kept.append(part)
        parts = kept
    return parts
