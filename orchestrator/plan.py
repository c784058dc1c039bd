"""The plan of a run: every round of every phase, in order."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.base import Phase
from orchestrator.experiment import Experiment


@dataclass(frozen=True)
class Turn:
    """One round of the plan: which phase of which algorithm, and where in it."""

    part: int
    phase: Phase
    name: str  #: for people and logs, algorithm and step, e.g. "NAME.train"
    number: int  #: of the phase, from 0
    round: int  #: within the phase, from 0
    rounds: int  #: of the phase
    index: int  #: of all rounds but those of phases that prepare: what draws and learning rates go by

    @property
    def progress(self) -> float:
        """Share of the phase's rounds that are over."""
        return self.round / self.rounds

    @property
    def title(self) -> str:
        """Name of what is written at the end of the phase."""
        return f"{self.number + 1}-{self.name}"

    @property
    def last(self) -> bool:
        """Whether the phase ends with this round."""
        return self.round + 1 == self.rounds

    def scores(self, every: int) -> bool:
        """Whether the models are tested after it: at the end of a phase and every so many rounds."""
        return self.phase.scored and (self.last or (self.round + 1) % every == 0)


def plan(experiment: Experiment) -> list[Turn]:
    """Lay out all rounds of all phases."""
    chain, turns, counted = experiment.chain(), list[Turn](), 0
    for number, (part, phase) in enumerate(chain.phases()):
        rounds = experiment.rounds if phase.rounds is None else phase.rounds
        name = f"{chain.parts[part].name}.{phase.step.__name__}"
        for round in range(rounds):
            turns.append(Turn(part, phase, name, number, round, rounds, counted))
            counted += phase.scored
    return turns
