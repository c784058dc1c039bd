"""The clients of a round as the server's half of an algorithm sees them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from algorithms.base import Sum
from orchestrator.plan import Turn
from orchestrator.uploads import Part
from orchestrator.values import place

if TYPE_CHECKING:
    from orchestrator.driver import Driver


JOBS = 1024  #: a call is cut into at most this many jobs, whoever runs them: more than there are actors
TALLEST = (JOBS - 1).bit_length()  #: height of the tree in which their uploads are added


def cut(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut the sampled clients into jobs by a rule that looks at nothing else, so that sums always fold alike."""
    jobs = max(1, min(JOBS, len(ids)))
    return [tuple(part.tolist()) for part in np.array_split(np.array(ids, dtype=int), jobs) if len(part)]


class NothingUsable(RuntimeError):
    """A round has no update to go on with."""


class Cohort:
    """The clients of one round, seen from the server; `algorithms.base.Cohort` tells what each member is for."""

    def __init__(
        self, driver: Driver, ids: Sequence[int], turn: Turn, rng: np.random.Generator, drawn: int | None = None
    ) -> None:
        self.ids, self.everyone = list(ids), list(driver.selectable)
        self.rng = rng
        self._driver, self._turn = driver, turn
        self._drawn = drawn  # how many were drawn uniformly, of whom these are those who answer; None: otherwise chosen

    @property
    def progress(self) -> float:
        """Share of the phase's rounds that are behind; whoever asks depends on how many rounds there are."""
        self._driver.asked_progress = True
        return self._turn.progress

    def sum(self, local: Callable[..., Sum], *shared: Any) -> Sum:
        """Run a client method on every client and add up what they return."""
        return self.sum_by(dict.fromkeys(self.ids), local, *shared)[None]

    def sum_by(self, key: Mapping[int, Hashable], local: Callable[..., Sum], *shared: Any) -> dict[Hashable, Sum]:
        """Run a client method on the clients that have a key, and add up by key."""
        results = self._driver.call(sorted(key), local.__name__, shared, keys=key)
        parts: dict[Hashable, list[Part]] = {}
        for part in (part for result in results for part in result.parts):
            parts.setdefault(part.key, []).append(part)
        if unheard := {k for k in key.values() if k not in parts}:
            raise NothingUsable(f"no usable update from any client of {unheard}")
        totals = self._driver.combine(parts, self._drawn)
        return {k: total.to(self._driver.device) for k, total in totals.items()}

    def map(self, local: Callable[..., Any], *shared: Any, each: Mapping[int, Any] | None = None) -> dict[int, Any]:
        """Run a client method on every client and return each one's value; `each` adds an argument per client."""
        results = self._driver.call(self.ids, local.__name__, shared, each=each)
        values = {id: value for result in results for id, value in result.values.items()}
        if self._driver.aggregation.private and any(value is not None for value in values.values()):
            raise TypeError(
                f"{local.__name__} tells the server something of each client, which noise on sums cannot hide"
            )
        return place(values, self._driver.device)  # type: ignore[no-any-return]

    def server(self, local: Callable[..., Any], *shared: Any) -> Any:
        """Run a client method once on the server, with the data that the server owns, and return its value."""
        here = self._driver.split.server_id
        (result,) = self._driver.call([here], local.__name__, shared)
        return place(result.values[here], self._driver.device)

    def only(self, ids: Sequence[int]) -> Cohort:
        """Return the cohort of just these clients of the population."""
        return Cohort(self._driver, self._driver.present(sorted(ids)), self._turn, self.rng)
