"""What a run with differential privacy has given away so far: epsilon, by Google's accountant (dp-accounting)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.aggregations import Aggregation


@cache
def accountant() -> Any:
    """Return the library; an ImportError tells how to get it."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise ImportError("aggregation 'dp' needs the package dp-accounting: pip install 'fedtail[privacy]'") from None
    return dp_accounting


def epsilon(aggregation: Aggregation, releases: Mapping[str, int]) -> float:
    """Return epsilon of a number of noisy sums, each over clients drawn from all without replacement.

    Two populations are neighbours if one client is replaced by another: the number drawn is fixed, so that none can be
    left out. Replacing one moves a sum of clipped terms by up to twice the bound, hence half the noise multiplier.
    """
    dp, noise, delta = accountant(), aggregation.noise, aggregation.delta  # type: ignore[attr-defined]
    ledger = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for release, times in releases.items():
        drawn, population = map(int, release.split("/"))
        event = dp.GaussianDpEvent(noise / 2)
        if drawn < population:
            event = dp.SampledWithoutReplacementDpEvent(population, drawn, event)
        ledger.compose(event, times)
    return float(ledger.get_epsilon(delta))
