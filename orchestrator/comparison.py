"""Comparing configurations: paired tests, ranks under all metrics, rounds to a target, and who may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean
from typing import Any, NamedTuple

from orchestrator.runs import Run, runs_of
from orchestrator.summary import Configuration, lower_is_better

#: What a leaderboard ranks by: the papers' metrics, and then the same by class size.
METRICS = (
    "generic/acc", "generic/recall_tail",
    "personal/acc_dist", "personal/acc_owned", "personal/acc_owned_masked", "personal/acc_worst10",
    "generic/miou", "generic/macc", "personal/miou", "personal/macc", "personal/acc", "personal/miou_worst10",
)  # fmt: skip
SHOTS = "many", "medium", "few", "head", "middle", "tail"
BY_SIZE = tuple(f"{m}_{s}" for m in ("generic/acc", "personal/acc_dist", "personal/acc_owned") for s in SHOTS)
FEWEST_SEEDS = 3  #: for a t-test
FEWEST_CLIENTS = 6  #: below, not even a unanimous signed-rank test can be significant at 5 %
SHARES = 0.9, 0.95, 1.0  #: of the reference's last value: the targets where none is given


def sign(metric: str, mode: str = "max") -> int:
    """Return 1 where more is better, else -1."""
    return -1 if mode == "min" or lower_is_better(metric) else 1


def ranking(configurations: Sequence[Configuration], metric: str, mode: str = "max") -> list[Configuration]:
    """Return the configurations, the best mean over seeds first, those without a value last."""
    direction = 1 if mode == "min" else -1
    return sorted(
        configurations,
        key=lambda c: (not c.values(metric), direction * mean(c.values(metric)) if c.values(metric) else 0.0),
    )


# Significance --------------------------------------------------------------------------------------------------------


class Paired(NamedTuple):
    """A paired test of two configurations: over how many pairs, and its p-value where it could be made."""

    pairs: int
    p: float | None


def _by_seed(configuration: Configuration, metric: str) -> dict[Any, float]:
    """Return the last value for each seed and split."""
    found = ((run, run.series(metric)[1]) for run in runs_of(configuration))
    return {(run.seed, run.split): values[-1] for run, values in found if values}


def _by_client(configuration: Configuration, metric: str) -> dict[Any, float]:
    """Return the value of each client for each seed and split."""
    column = metric.removeprefix("personal/")
    return {
        (run.seed, run.split, row.get("client")): value
        for run in runs_of(configuration)
        if run.split is not None
        for row in run.per_client
        if (value := row.get(column)) is not None
    }


def t_test(best: Configuration, other: Configuration, metric: str) -> Paired:
    """Compare the means of the seeds that both have, by a paired t-test."""
    return paired_t(by_seed(best, other, metric))


def by_seed(best: Configuration, other: Configuration, metric: str) -> list[float]:
    """Return by how much the last value is higher, for each seed and split that both have."""
    a, b = _by_seed(best, metric), _by_seed(other, metric)
    return [a[key] - b[key] for key in a if key in b]


def paired_t(differences: Sequence[float]) -> Paired:
    """Test whether differences between pairs are of mean zero."""
    if len(differences) < FEWEST_SEEDS:
        return Paired(len(differences), None)
    if len(set(differences)) == 1:  # without spread there is nothing to test by
        return Paired(len(differences), 1.0 if differences[0] == 0 else None)
    from scipy.stats import ttest_1samp

    return Paired(len(differences), float(ttest_1samp(differences, 0.0).pvalue))


def signed_rank(best: Configuration, other: Configuration, metric: str) -> Paired:
    """Compare the clients that both have, seed by seed, by Wilcoxon's signed-rank test."""
    a, b = _by_client(best, metric), _by_client(other, metric)
    differences = [a[key] - b[key] for key in a if key in b]
    if len(differences) < FEWEST_CLIENTS:
        return Paired(len(differences), None)
    if not any(differences):
        return Paired(len(differences), 1.0)
    from scipy.stats import wilcoxon

    return Paired(len(differences), float(wilcoxon(differences).pvalue))


def holm(tests: Sequence[Paired]) -> list[Paired]:
    """Correct the p-values of a family of tests after Holm."""
    order = sorted((t.p, i) for i, t in enumerate(tests) if t.p is not None)
    corrected: dict[int, float] = {}
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return [t._replace(p=corrected.get(i)) for i, t in enumerate(tests)]


# Who may be compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A configuration's line of a leaderboard: its value and rank under each metric, and the mean of its ranks."""

    configuration: Configuration
    ranks: Mapping[str, float]
    mean_rank: float | None


@dataclass(frozen=True)
class Leaderboard:
    """Configurations that saw the same clients for the same rounds under the same seeds, the best mean rank first."""

    conditions: str
    metrics: Sequence[str]
    counted: Sequence[str]  #: the metrics that every configuration has; the mean rank is over these
    places: Sequence[Place]


def conditions(configuration: Configuration) -> tuple[tuple[str, str, str], ...]:
    """Return what must be the same for a fair comparison: of each finished run its seed, its split and its settings."""
    runs = [t["run"] for t in configuration.trials if t["status"] == "FINISHED"]
    return tuple(sorted((str(run.seed), str(run.split), _settings(run)) for run in runs))


def _settings(run: Run) -> str:
    e = run.experiment
    data = e.get("data")
    name = data.get("name") if isinstance(data, dict) else None
    per_round = e.get("clients_per_round") or "all"
    return f"{name or 'unknown data'}, {e.get('rounds', '?')} rounds, {per_round} clients a round"


def in_words(key: Sequence[tuple[str, str, str]]) -> str:
    """Say what the runs of a leaderboard have in common."""
    seeds, splits, settings = zip(*key, strict=True)
    short = ", ".join(dict.fromkeys(split.split(":")[-1][:8] for split in splits))
    return f"{'; '.join(dict.fromkeys(settings))}; seed {', '.join(seeds)}; split {short}"


def leaderboards(configurations: Sequence[Configuration], metrics: Sequence[str] = METRICS) -> list[Leaderboard]:
    """Rank configurations under all metrics, those apart that were not run under the same conditions."""
    able = [c for c in configurations if conditions(c)]
    boards = []
    for key, group in groupby(sorted(able, key=conditions), conditions):
        members = list(group)
        shown = [m for m in metrics if any(_finished(c, m) for c in members)]
        counted = [m for m in shown if all(_finished(c, m) for c in members)]
        ranks: dict[str, dict[str, float]] = {c.name: {} for c in members}
        for metric in shown:
            means = {c.name: sign(metric) * mean(v) for c in members if (v := _finished(c, metric))}
            for name, value in means.items():
                better = sum(other > value for other in means.values())
                equal = sum(other == value for other in means.values())
                ranks[name][metric] = better + (equal + 1) / 2  # those that are equal share their ranks
        places = [Place(c, r := ranks[c.name], mean(r[m] for m in counted) if counted else None) for c in members]
        places.sort(key=lambda p: p.mean_rank or 0.0)
        boards.append(Leaderboard(in_words(key), shown, counted, places))
    return sorted(boards, key=lambda b: -len(b.places))


def _finished(configuration: Configuration, metric: str) -> list[float]:
    """Return the last values of the trials that ran to their end."""
    return [t["last"][metric] for t in configuration.trials if t["status"] == "FINISHED" and metric in t["last"]]


# Rounds to a target --------------------------------------------------------------------------------------------------


def targets(reference: Configuration, metric: str, mode: str = "max") -> list[float]:
    """Return shares of what the reference reaches in its last round."""
    values = reference.values(metric)
    if not values:
        return []
    return [mean(values) * share if sign(metric, mode) > 0 else mean(values) / share for share in SHARES]


def rounds_to(configuration: Configuration, metric: str, target: float, mode: str = "max") -> tuple[float | None, int]:
    """Return the mean first round in which a target is reached, or None if a seed never does, and how many do."""
    direction = sign(metric, mode)
    runs = runs_of(configuration)
    firsts = [
        next((r for r, v in zip(*run.series(metric), strict=True) if direction * v >= direction * target), None)
        for run in runs
    ]
    reached = [first for first in firsts if first is not None]
    return (mean(reached) if reached and len(reached) == len(runs) else None), len(reached)
