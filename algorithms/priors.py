"""Where a class prior comes from; any loss may be combined with any of these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: A count of zero becomes this, so that the logarithm of a prior is finite.
ABSENT = 0.1


def none(local: Tensor, everywhere: Tensor, proxy: Tensor | None) -> Tensor:
    """Every class alike."""
    return torch.full_like(local, 1 / len(local))


def local(local: Tensor, everywhere: Tensor, proxy: Tensor | None) -> Tensor:
    """The client's own label distribution."""
    return _share(local)


def everybody(local: Tensor, everywhere: Tensor, proxy: Tensor | None) -> Tensor:
    """The label distribution over all clients, which a real federation does not know."""
    return _share(everywhere)


def gpi(local: Tensor, everywhere: Tensor, proxy: Tensor | None) -> Tensor:
    """The global proxy information of LDAE, which a round before the first has estimated."""
    return none(local, everywhere, None) if proxy is None else proxy  # while it is being estimated


def pseudo_counts(prior: str, share: Tensor, local: Tensor, everywhere: Tensor) -> Tensor:
    """Return how many samples the shares of a prior stand for: of the client's own, or of everybody's."""
    return share * _present(local if prior == "local" else everywhere).sum()


def _share(counts: Tensor) -> Tensor:
    counts = _present(counts)
    return counts / counts.sum()


def _present(counts: Tensor) -> Tensor:
    return torch.where(counts > 0, counts, ABSENT)


#: A prior that has to be estimated -> the algorithm that must run before.
ESTIMATED = {"gpi": "gpi"}

#: name in an experiment -> function of (the client's counts, everybody's counts, the server's estimate)
PRIORS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "none": none,
    "local": local,
    "global": everybody,
    "gpi": gpi,
}
