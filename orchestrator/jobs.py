"""What a worker is asked to do, and what it gives back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from algorithms.base import Algorithm
from orchestrator.uploads import Part


@dataclass(frozen=True)
class Job:
    """A client method to run on some clients: all that a worker needs to know besides the shared values."""

    #: "run" a client method, "predict" with the generic model, "count" hits, take "moments"; of pixels "compare" the
    #: generic model's with the truth, "confuse" those of the clients' own, or "segment" some images
    task: str
    part: int  #: which algorithm of the chain
    method: str
    ids: tuple[int, ...]
    round: int = 0
    call: int = 0  #: how many calls this round has made before
    lr: float = 0.0
    progress: float = 0.0  #: share of the phase's rounds that are over, for losses that change
    memory: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  #: a client not in it starts afresh
    keys: Mapping[int, Hashable] | None = None  #: add up by these; without keys each client's value is returned
    each: Mapping[int, Any] | None = None  #: one more argument for each client
    proxy: Tensor | None = None  #: the class prior that an earlier algorithm has estimated
    skip_bad: bool = False  #: leave out an update that is of no use instead of failing
    also: tuple[Algorithm, ...] = ()  #: count hits with these settings of the algorithm too
    place: int = 0  #: among the jobs of its call


@dataclass
class Result:
    """What a job gives back."""

    parts: list[Part] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    memory: dict[int, dict[str, Any]] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)  #: why an upload is of no use
    late: dict[int, str] = field(default_factory=dict)  #: how long a client was waited for in vain
    losses: list[float] = field(default_factory=list)  #: of each client, summed over its steps
    steps: int = 0
    seconds: float = 0.0  #: that the work took
    bytes_up: int = 0
    bytes_extra: int = 0  #: of these beyond a model for each client

    def take(self, other: Result) -> None:
        """Take over what another job of the same call gave."""
        self.parts += other.parts
        self.values |= other.values
        self.memory |= other.memory
        self.rejected |= other.rejected
        self.late |= other.late
        self.losses += other.losses
        self.steps, self.seconds = self.steps + other.steps, self.seconds + other.seconds
        self.bytes_up, self.bytes_extra = self.bytes_up + other.bytes_up, self.bytes_extra + other.bytes_extra
