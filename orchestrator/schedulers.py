"""How a sweep stops trials early: each scheduler as a name with a few numbers, turned into Ray Tune's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from algorithms.base import knob


@dataclass(frozen=True)
class Fifo:
    """Every trial runs to its end."""

    def make(self, rounds: Sequence[int], **_: Any) -> Any:
        """Return Tune's scheduler for trials whose first phases have these numbers of rounds."""
        from ray.tune.schedulers import FIFOScheduler

        return FIFOScheduler()


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving (Li et al., MLSys 2020): at each rung only the best go on."""

    grace: int | None = knob(None, ge=1)  #: rounds that nobody is stopped before; None: an eighth of the longest run
    reduction: float = knob(4.0, gt=1)  #: one of so many goes on

    def make(self, rounds: Sequence[int], **_: Any) -> Any:
        """Return Tune's scheduler for trials whose first phases have these numbers of rounds."""
        from ray.tune.schedulers import ASHAScheduler

        grace = self.grace or max(1, max(rounds) // 8)
        return ASHAScheduler(
            time_attr="round", max_t=max(*rounds, grace) + 1, grace_period=grace, reduction_factor=self.reduction
        )


@dataclass(frozen=True)
class Median:
    """Stop a trial whose best score is below the median of the others' means so far (Golovin et al., KDD 2017)."""

    grace: int | None = knob(None, ge=1)  #: rounds that nobody is stopped before; None: an eighth of the longest run
    fewest: int = knob(3, ge=1)  #: trials that must have come as far

    def make(self, rounds: Sequence[int], **_: Any) -> Any:
        """Return Tune's scheduler for trials whose first phases have these numbers of rounds."""
        from ray.tune.schedulers import MedianStoppingRule

        grace = self.grace or max(1, max(rounds) // 8)
        return MedianStoppingRule(time_attr="round", grace_period=grace, min_samples_required=self.fewest)


@dataclass(frozen=True)
class HyperBand:
    """HyperBand (Li et al., JMLR 2018): brackets of successive halving, in step; trials wait for one another."""

    reduction: int = knob(3, ge=2)  #: one of so many goes on

    def make(self, rounds: Sequence[int], **_: Any) -> Any:
        """Return Tune's scheduler for trials whose first phases have these numbers of rounds."""
        from ray.tune.schedulers import HyperBandScheduler

        # Its clock are reports, of which a trial with nothing left to stop in makes one more.
        return HyperBandScheduler(time_attr="round", max_t=max(rounds) + 1, reduction_factor=self.reduction)


@dataclass(frozen=True)
class Pbt:
    """Population based training (Jaderberg et al., 2017): the worst take over the weights of the best and vary them."""

    interval: int | None = knob(None, ge=1)  #: rounds between two exchanges; None: a fifth of the longest run
    quantile: float = knob(0.25, gt=0, le=0.5)  #: share of the population that is replaced
    resample: float = knob(0.25, ge=0, le=1)  #: how often a value is drawn anew instead of varied

    def make(self, rounds: Sequence[int], mutations: Mapping[str, Any], explore: Callable[..., Any]) -> Any:
        """Return Tune's scheduler for trials whose first phases have these numbers of rounds."""
        from ray.tune.schedulers import PopulationBasedTraining

        class Population(PopulationBasedTraining):  # type: ignore[misc]
            """A trial that takes over another's weights and values stays the trial that it is."""

            def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
                config, operations = super()._get_new_config(trial, trial_to_clone)
                return {"job": trial.config["job"] | {"values": config["job"]["values"]}}, operations

        return Population(
            time_attr="round",
            perturbation_interval=self.interval or max(1, max(rounds) // 5),
            hyperparam_mutations=dict(mutations),
            quantile_fraction=self.quantile,
            resample_probability=self.resample,
            custom_explore_fn=explore,
            require_attrs=False,
        )


SCHEDULERS: dict[str, type[Any]] = {"fifo": Fifo, "asha": Asha, "median": Median, "hyperband": HyperBand, "pbt": Pbt}
