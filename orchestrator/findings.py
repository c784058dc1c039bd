"""What a report says: which runs, ranked by what, with which tests, and what is missing; tables as rows of text."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from orchestrator.comparison import (
    Leaderboard,
    Paired,
    by_seed,
    holm,
    leaderboards,
    ranking,
    sign,
    signed_rank,
    t_test,
    targets,
)
from orchestrator.runs import NothingHere, Run, Source, compared, read_source
from orchestrator.summary import HEADLINE, Configuration, lower_is_better
from orchestrator.summary import headline as usual_metrics


@dataclass(frozen=True)
class Report:
    """What is compared, by which metric, against which reference."""

    sources: Sequence[Source]
    configurations: Sequence[Configuration]  #: the best first
    metric: str
    mode: str
    reference: Configuration | None
    targets: Sequence[float]
    given: bool  #: whether the targets were asked for

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for source in self.sources for run in source.runs]

    @property
    def able(self) -> list[Configuration]:
        """The configurations that have a value to rank by."""
        return [c for c in self.configurations if c.values(self.metric)]


def collect(
    directories: Sequence[Path],
    metric: str | None = None,
    reference: str | None = None,
    goals: Sequence[float] = (),
) -> Report:
    """Read directories, and decide what is ranked by what."""
    sources: list[Source] = []
    for path in directories:
        known_runs = {run.path for source in sources for run in source.runs}
        source = read_source(path)
        sources.append(replace(source, runs=[run for run in source.runs if run.path not in known_runs]))
    found = compared(sources)
    known = list(dict.fromkeys(m for c in found for t in c.trials for m in t["last"]))
    if metric is not None and metric not in known:
        raise NothingHere(f"--metric {metric}: no trial has reported it; {_nearest(metric, known)}")
    usual = (m for m in ("personal/acc_dist", "personal/miou", *HEADLINE, *known) if m in known)
    wanted = metric or next((s.metric for s in sources if s.metric), None) or next(usual, "personal/acc_dist")
    mode = next((s.mode for s in sources if s.metric == wanted), "min" if lower_is_better(wanted) else "max")
    ranked = ranking(found, wanted, mode)
    against = _reference(found, wanted, reference)
    own = targets(against, wanted, mode) if against else []
    return Report(sources, ranked, wanted, mode, against, goals or own, bool(goals))


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}"


def _reference(found: Sequence[Configuration], metric: str, name: str | None) -> Configuration | None:
    """Return what others are measured against: the one asked for, else the plain method, else the first."""
    if name is not None:
        for configuration in found:
            if name == configuration.name or name in [t["id"] for t in configuration.trials]:
                return configuration
        raise NothingHere(f"--reference {name}: there is none of that name; {_nearest(name, [c.name for c in found])}")
    able = [c for c in found if c.values(metric)]
    if len(able) < 2:
        return able[0] if able else None
    from algorithms import DEFAULT

    plain = (c for c in able if c.trials[0]["run"].method == DEFAULT)
    return next(plain, able[0])


# What the tables say -------------------------------------------------------------------------------------------------


def significance(report: Report) -> dict[str, tuple[Paired, Paired]]:
    """Return for each configuration but the best its two paired tests against the best, corrected after Holm."""
    best, others = report.able[:1], report.able[1:]
    families = [holm([test(best[0], c, report.metric) for c in others]) for test in (t_test, signed_rank)]
    return {c.name: (by_seed, by_client) for c, by_seed, by_client in zip(others, *families, strict=True)}


def p_value(test: Paired | None) -> str:
    """Return a p-value and over how many pairs it was found."""
    if test is None:
        return ""
    value = "-" if test.p is None else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return f"{value} (n = {test.pairs})"


def ranking_rows(report: Report) -> list[dict[str, Any]]:
    """Return the lines of the ranking."""
    if not report.configurations:
        return []
    tests = significance(report)
    shown = headline(report)
    best = {m: ranking(report.configurations, m, "min" if lower_is_better(m) else "max")[0].show(m) for m in shown}
    rows = []
    for number, c in enumerate(report.configurations, 1):
        states = Counter(t["status"] for t in c.trials)
        by_seed, by_client = tests.get(c.name, (None, None))
        rows.append(
            {
                "rank": number if c.values(report.metric) else "",
                "name": c.name,
                "status": ", ".join(f"{n} {status}" for status, n in states.items()),
                "values": [(c.show(m), c.show(m) == best[m] != "-") for m in shown],
                "by_seed": p_value(by_seed),
                "by_client": p_value(by_client),
                "seconds": f"{sum(t['seconds'] for t in c.trials):.1f}",
            }
        )
    return rows


def claim_rows(report: Report) -> list[tuple[str, ...]]:
    """Return by how much the reference is better than each that shares splits with it, in how many, and two tests."""
    reference, metric = report.reference, report.metric
    rows: list[tuple[str, ...]] = []
    for other in report.able:
        if reference is None or other is reference:
            continue
        if better := [sign(metric, report.mode) * d for d in by_seed(reference, other, metric)]:
            ahead = f"{sum(d > 0 for d in better)} of {len(better)}"
            tests = (p_value(test(reference, other, metric)) for test in (t_test, signed_rank))
            rows.append((other.name, other.show(metric), f"{mean(better):+.4f}", ahead, *tests))
    return rows


def headline(report: Report) -> list[str]:
    """Return the metrics of the ranking: that of the sweep first."""
    trials = (trial for c in report.configurations for trial in c.trials)
    return list(dict.fromkeys([report.metric, *usual_metrics(trials, report.metric)]))


def board_rows(board: Leaderboard) -> list[dict[str, Any]]:
    """Return the lines of a leaderboard: in each cell the mean and spread over seeds, and the rank."""
    top = {m: min(place.ranks[m] for place in board.places if m in place.ranks) for m in board.metrics}
    return [
        {
            "name": place.configuration.name,
            "mean_rank": "-" if place.mean_rank is None else f"{place.mean_rank:.2f}",
            "cells": [
                (place.configuration.show(m), f"{place.ranks[m]:g}", place.ranks[m] == top[m])
                if m in place.ranks
                else ("-", "", False)
                for m in board.metrics
            ],
        }
        for place in board.places
    ]


def unranked(report: Report) -> list[str]:
    """Name the configurations that no leaderboard has, and say why."""
    return [
        f"{c.name}: {', '.join(sorted({t['status'] for t in c.trials}))}, and only finished trials are comparable"
        for c in report.configurations
        if not any(t["status"] == "FINISHED" for t in c.trials)
    ]


def trial_rows(report: Report) -> list[dict[str, Any]]:
    """Return the lines of the table of all trials."""
    rows = []
    for source in report.sources:
        for run in source.runs:
            record = run.record()
            best = record["best_at"].get(report.metric)
            rows.append(
                {
                    "id": f"{source.path.name}/{run.id}" if len(report.sources) > 1 else run.id,
                    "name": run.name,
                    "status": run.status,
                    "values": [_number(record["last"].get(m)) for m in headline(report)],
                    "best": _number(record["best"].get(report.metric)) + (f" in round {best['round']}" if best else ""),
                    "seconds": f"{record['seconds']:.1f}",
                    "fingerprint": str(record["fingerprint"] or "")[:12],
                    "error": (run.error or "").strip().split("\n")[0],
                }
            )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def missing(report: Report) -> list[str]:
    """Say what could not be read or is not there."""
    found = [f"{source.path.name}: {note}" for source in report.sources for note in source.notes]
    return found + [
        f"{run.path.parent.name}/{run.path.name}: {'; '.join(run.notes)}" for run in report.runs if run.notes
    ]


def conclusion(report: Report) -> list[str]:
    """Return the summary, a sentence each."""
    runs, able = report.runs, report.able
    states = ", ".join(f"{n} {status}" for status, n in Counter(run.status for run in runs).items()) or "none"
    kinds = len(report.configurations)
    said = [f"{_many(len(runs), 'trial')} of {_many(kinds, 'configuration')}: {states}."]
    if able:
        seeds = len(able[0].values(report.metric))
        spread = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed"
        goal = "Lowest" if report.mode == "min" else "Highest"
        said.append(
            f"{goal} {report.metric} in the last round: {able[0].name} with {able[0].show(report.metric)}{spread}."
        )
    elif runs:
        said.append(f"Nothing is ranked: no trial that has ended reports {report.metric}.")
    splits, owners = {run.split for run in runs if run.lines}, {run.seed for run in runs if run.lines}
    if len(runs) > 1 and None not in splits:
        own = "; each seed has its own" if len(splits) == len(owners) else ""
        same = "the same split of the data" if len(splits) == 1 else f"{len(splits)} different splits of the data{own}"
        said.append(f"The runs are on {same}.")
    if len(leaderboards(report.configurations)) > 1:
        said.append(
            "Not all configurations had the same splits, rounds, clients a round and seeds: "
            "only those within one table of the leaderboard are comparable."
        )
    return said


def _many(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
