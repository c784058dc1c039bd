"""Comparisons, computed by hand."""

import math
from pathlib import Path

import pytest

from orchestrator.comparison import Paired, holm, leaderboards, ranking, rounds_to, signed_rank, t_test, targets
from orchestrator.runs import Run
from orchestrator.summary import Configuration

ACC, OWNED = "personal/acc_dist", "personal/acc_owned"


def run(name, seed=0, split="s", clients=(), status="FINISHED", rounds=10, **last):
    """Return a run that was never run; `last` are series of metrics, with _ for /."""
    series = {k.replace("_", "/", 1): v if isinstance(v, list) else [v] for k, v in last.items()}
    lines = [
        {"round": i + 1, "phase": "p", "metrics": {k: v[i] for k, v in series.items() if i < len(v)}}
        for i in range(max(map(len, series.values()), default=0))
    ]
    return Run(
        Path(name),
        {"id": f"{name}{seed}", "name": name, "params": {}},
        {"status": status},
        {"seed": seed, "rounds": rounds, "clients_per_round": 5, "data": {"name": "digits"}},
        {"digest": "d", "split": f"{split}{seed}"},
        lines,
        per_client=[{"client": i, "acc_dist": value} for i, value in enumerate(clients)],
    )


def configuration(*runs):
    return Configuration(runs[0].name, tuple(r.record() for r in runs))


def over_seeds(name, *values, **more):
    return configuration(*(run(name, seed, personal_acc_dist=v, **more) for seed, v in enumerate(values)))


def test_the_t_test_is_paired_by_seed():
    """Differences 1, 2, 3 give t = 2 sqrt(3), and with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)."""
    t = 2 * math.sqrt(3)
    found = t_test(over_seeds("a", 6.0, 5.0, 9.0), over_seeds("b", 5.0, 3.0, 6.0), ACC)
    assert found.pairs == 3
    assert found.p == pytest.approx(1 - t / math.sqrt(t**2 + 2))


def test_the_t_test_needs_three_common_seeds_on_the_same_splits():
    a = over_seeds("a", 0.1, 0.2, 0.4)
    assert t_test(a, over_seeds("b", 0.1, 0.1), ACC) == Paired(2, None)
    assert t_test(a, over_seeds("b", 0.1, 0.1, 0.1, split="other"), ACC) == Paired(0, None)
    assert t_test(a, over_seeds("b", 0.1, 0.2, 0.4), ACC) == Paired(3, 1.0)


def test_the_signed_rank_test_is_paired_by_seed_and_client():
    """Six clients that all gain: of 64 equally likely patterns of signs two are as extreme."""
    a = over_seeds("a", 0.5, 0.5, clients=(0.2, 0.4, 0.7))
    b = configuration(run("b", 0, clients=(0.1, 0.2, 0.4)), run("b", 1, clients=(0.16, 0.25, 0.3)))
    assert signed_rank(a, b, ACC) == Paired(6, pytest.approx(2 / 64))
    assert signed_rank(a, a, ACC) == Paired(6, 1.0)
    assert signed_rank(a, over_seeds("b", 0.5, clients=(0.1, None, 0.4)), ACC) == Paired(2, None)
    assert signed_rank(a, b, "generic/acc") == Paired(0, None), "the generic model has no clients"


def test_holm():
    """0.01 * 3, max(that, 0.03 * 2), max(that, 0.04 * 1); what was not tested does not count."""
    found = holm([Paired(5, 0.04), Paired(5, 0.01), Paired(1, None), Paired(5, 0.03)])
    assert [t.p for t in found] == pytest.approx([0.06, 0.03, None, 0.06])
    assert holm([Paired(5, 0.8), Paired(5, 0.7)])[1].p == 1.0


def test_ranks_under_all_metrics():
    """Ties share ranks; a metric that somebody lacks does not count in the mean."""
    a = configuration(run("a", personal_acc_dist=0.9, personal_acc_owned=0.3, generic_acc=0.5))
    b = configuration(run("b", personal_acc_dist=0.8, personal_acc_owned=0.4))
    c = configuration(run("c", personal_acc_dist=0.8, personal_acc_owned=0.2, generic_acc=0.6))
    (board,) = leaderboards([c, b, a])
    assert [p.configuration.name for p in board.places] == ["a", "b", "c"]
    assert [dict(p.ranks) for p in board.places] == [
        {ACC: 1, OWNED: 2, "generic/acc": 2},
        {ACC: 2.5, OWNED: 1},
        {ACC: 2.5, OWNED: 3, "generic/acc": 1},
    ]
    assert [p.mean_rank for p in board.places] == [1.5, 1.75, 2.75]
    assert board.counted == [ACC, OWNED]
    assert board.conditions == "digits, 10 rounds, 5 clients a round; seed 0; split s0"


@pytest.mark.parametrize("other", [{"split": "t"}, {"rounds": 11}, {"seed": 1}])
def test_what_was_not_run_alike_is_not_ranked_together(other):
    a, b, c = (configuration(run(n, personal_acc_dist=0.5, **o)) for n, o in (("a", {}), ("b", {}), ("c", other)))
    together, alone = leaderboards([a, c, b])
    assert [p.configuration.name for p in together.places] == ["a", "b"]
    assert [p.configuration.name for p in alone.places] == ["c"]


def test_only_finished_runs_are_on_a_leaderboard():
    assert leaderboards([over_seeds("a", 0.5, status="STOPPED")]) == []


def test_the_ranking_puts_those_without_a_value_last():
    a, b, c = over_seeds("a", 0.1, 0.3), over_seeds("b", 0.25), over_seeds("c", 0.9, status="FAILED")
    assert [x.name for x in ranking([c, a, b], ACC)] == ["b", "a", "c"]
    assert [x.name for x in ranking([c, a, b], ACC, "min")] == ["a", "b", "c"]


def test_rounds_to_a_target():
    both = configuration(
        run("a", 0, personal_acc_dist=[0.1, 0.5, 0.4, 0.6]), run("a", 1, personal_acc_dist=[0.1, 0.2, 0.3, 0.5])
    )
    assert rounds_to(both, ACC, 0.5) == (3.0, 2), "rounds 2 and 4"
    assert rounds_to(both, ACC, 0.6) == (None, 1), "one seed never gets there"
    assert rounds_to(both, ACC, 0.9) == (None, 0)
    assert targets(both, ACC) == pytest.approx([0.9 * 0.55, 0.95 * 0.55, 0.55])
    falling = configuration(run("a", train_loss=[3.0, 2.0, 1.0]))
    assert rounds_to(falling, "train/loss", 2.0) == (2.0, 1)
