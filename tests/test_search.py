"""Which trial runs next, what is proposed, and what a search cannot do."""

import pytest

from orchestrator import space
from orchestrator.expressions import evaluate
from orchestrator.prefixes import Cache, prefixes
from orchestrator.search import Feeder, Proposer
from orchestrator.sweep_file import read
from orchestrator.yaml_file import InputError

FINISHED = Feeder.FINISHED


def sweep(text, **options):
    return read(None, text, **options)


def messages(text, **options):
    with pytest.raises(InputError) as caught:
        sweep(text, **options)
    return caught.value.messages


# Feeding -------------------------------------------------------------------------------------------------------------

SHARED = """
search: {searcher: grid}
experiment:
  algorithm: [fedavg, {ecl: {num_experts: !grid [2, 3], expert_logit_weight: !grid [0.1, 0.5]}}]
"""


def feeder(tmp_path, text, at_a_time, share=True):
    trials, ended = space.trials(sweep(text)), set()
    made = Feeder(
        trials,
        at_a_time,
        assign=lambda t, n: {"job": {"trial": t.id, "of": n}},
        cache=Cache(tmp_path) if share else None,
        prefixes=lambda t: prefixes(t.experiment, "d"),
        ended=lambda t: t.id in ended,
    )
    return made, {t.id: t for t in trials}, ended


def leave(tmp_path, trial, phases):
    """Pretend that a trial has come to the end of its first phases."""
    for prefix in prefixes(trial.experiment, "d")[:phases]:
        folder = tmp_path / prefix.key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "entry.json").write_text("{}")


def job(trial, of, *alike):
    return {"job": {"trial": trial, "of": of, "alike": list(alike)}}


def test_trials_wait_for_the_one_that_does_their_common_work(tmp_path):
    feed, trials, ended = feeder(tmp_path, SHARED, at_a_time=3)
    assert feed.suggest("a") == job("0000", 1, "0001"), "alone, it gets the whole cluster"
    assert feed.suggest("b") is None
    leave(tmp_path, trials["0000"], 1)  # phase I is there: other numbers of experts may begin
    assert feed.suggest("b") == job("0002", 3, "0003"), "what only predicts otherwise goes with it"
    assert feed.suggest("c") is None
    leave(tmp_path, trials["0000"], 2)
    ended |= {"0000", "0001"}
    feed.on_trial_complete("a")
    assert feed.suggest("c") is None, "0001 has been finished with it"
    leave(tmp_path, trials["0002"], 2)
    ended |= {"0002"}
    feed.on_trial_complete("b")
    assert feed.suggest("c") == job("0003", 1), "what was not finished with it is fed on its own"
    feed.on_trial_complete("c")
    assert feed.suggest("d") == FINISHED


def test_after_a_failure_another_one_does_the_common_work(tmp_path):
    feed, _, _ = feeder(tmp_path, SHARED, at_a_time=2)
    feed.suggest("a")
    feed.on_trial_complete("a", error=True)
    assert feed.suggest("b") == job("0001", 1)
    assert feed.suggest("c") is None


def test_without_sharing_nobody_waits(tmp_path):
    feed, _, _ = feeder(tmp_path, SHARED, at_a_time=3, share=False)
    assert [feed.suggest(x)["job"]["trial"] for x in "abc"] == ["0000", "0001", "0002"]
    assert feed.suggest("d") is None, "three at a time"


# Proposing -----------------------------------------------------------------------------------------------------------

PROPOSED = """
search: {searcher: optuna, samples: 8, metric: personal/acc_dist}
experiment:
  algorithm: {fedprox: {mu: !loguniform [0.001, 1.0]}}
  local:
    {lr: !uniform [0.01, 0.1], batch: !randint [8, 32], momentum: !quniform [0.0, 0.8, 0.2], loss: !choice [ce, focal]}
  seed: !grid [0, 1]
"""


class Search:
    """A search whose trials end at once with a score that is a function of their values."""

    def __init__(self, text=PROPOSED, known=(), done=()):
        self.done, self.made = dict(done), {t.id: t for t in known}
        self.proposer = Proposer(
            sweep(text),
            list(known),
            create=lambda t: self.made.__setitem__(t.id, t),
            score=lambda t: (t.id in self.done, self.done.get(t.id)),
            at_a_time=1,
            assign=lambda t, n: {"job": {"trial": t.id}},
            cache=None,
            prefixes=lambda t: [],
            ended=lambda t: t.id in self.done,
        )

    def worth(self, trial):
        values = trial.params
        if values["local.loss"] == "focal" and values["seed"] == 0:
            return None  # one that failed
        return -((values["local.lr"] - 0.05) ** 2) - 0.01 * values["seed"]

    def run(self, most=10**6):
        while most and (config := self.proposer.suggest(f"t{len(self.done)}")) != FINISHED and config is not None:
            id, most = config["job"]["trial"], most - 1
            self.done[id] = self.worth(self.made[id])
            self.proposer.on_trial_complete(f"t{len(self.done) - 1}")
        return [(t.id, t.params) for t in self.made.values()]


def test_proposals_are_within_range_and_run_with_every_seed():
    found = Search().run()
    assert len(found) == 16
    for (_, one), (_, other) in zip(found[::2], found[1::2], strict=True):
        assert (one["seed"], other["seed"]) == (0, 1)
        assert {k: v for k, v in one.items() if k != "seed"} == {k: v for k, v in other.items() if k != "seed"}
        assert 0.001 <= one["algorithm.0.fedprox.mu"] <= 1
        assert 8 <= one["local.batch"] <= 31
        assert one["local.momentum"] in (0.0, 0.2, 0.4, 0.6, 0.8)
        assert one["local.loss"] in ("ce", "focal")
    assert len({str(p) for _, p in found}) > 8


def test_proposals_learn_from_what_was_found():
    text = (
        PROPOSED.replace("samples: 8", "samples: 40")
        .replace(", loss: !choice [ce, focal]", ", loss: ce")
        .replace("seed: !grid [0, 1]", "seed: 0")
    )

    class One(Search):
        def worth(self, trial):
            return -((trial.params["local.lr"] - 0.05) ** 2)

    errors = [abs(p["local.lr"] - 0.05) for _, p in One(text).run()]
    assert sum(errors[-10:]) < 0.5 * sum(errors[:10])


@pytest.mark.parametrize("ended", range(1, 16, 3))
def test_a_resumed_search_proposes_what_the_uninterrupted_one_does(ended):
    whole = Search().run()
    broken = Search()
    broken.run(most=ended)
    resumed = Search(known=broken.made.values(), done=broken.done)
    assert resumed.run() == whole


# What cannot be searched ---------------------------------------------------------------------------------------------

OPEN = "experiment: {local: {lr: !uniform [0.01, 0.1]}}"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (f"search: {{scheduler: ahsa}}\n{OPEN}", "1:21", "there is no scheduler 'ahsa'; did you mean 'asha'?"),
        (f"search: {{scheduler: {{asha: {{grace: 0}}}}}}\n{OPEN}", "1:36", "must be >= 1"),
        (f"search: {{searcher: optun}}\n{OPEN}", "1:20", "'random', 'grid' or 'optuna'"),
        (f"search: {{metric: personal/accuracy}}\n{OPEN}", "1:18", "there is no metric 'personal/accuracy'"),
        (f"search: {{budget: soon}}\n{OPEN}", "1:18", "must be a time such as 90s, 20m, 2h or 1d"),
        (f"search: {{searcher: grid}}\n{OPEN}", "2:26", "grid cannot try every value of local.lr"),
        (
            f"search: {{searcher: grid, samples: 3}}\n{OPEN}".replace("uniform [0.01, 0.1]", "grid [0.1]"),
            "1:35",
            "once",
        ),
        (
            "search: {searcher: optuna}\nexperiment: {local: {lr: !grid [0.1]}}",
            "2:26",
            "write !choice instead of !grid",
        ),
        ("search: {searcher: optuna}\nexperiment: {seed: !grid [0, 1]}", "1:20", "nothing to propose"),
        (f"search: {{searcher: optuna}}\n{OPEN}\ncases: [{{rounds: 3}}]", "1:20", "not cases"),
        (f"search: {{searcher: optuna, scheduler: pbt}}\n{OPEN}", "1:39", "proposes them one by one; use asha"),
        (f"search: {{scheduler: hyperband, concurrent: 2}}\n{OPEN}", "1:44", "cluster.actors instead"),
        (
            "search: {scheduler: pbt}\nexperiment: {data: {alpha: !uniform [0.1, 1]}}",
            "2:28",
            "must not differ in data.alpha",
        ),
        ("search: {scheduler: pbt}\nexperiment: {seed: !grid [0, 1]}", "1:21", "nothing to vary"),
        ("experiment: {local: {lr: !sample rounds / clients}}", "1:26", "there is no 'rounds' in this file"),
        ("experiment: {local: {lr: !sample __import__('os')}}", "1:26", "is not possible"),
        ("experiment: {rounds: 4, local: {lr: !sample rounds ** 999}}", "1:37", "an exponent above 100"),
        ("experiment: {rounds: 4, local: {lr: !sample rounds / 0}}", "1:37", "cannot be computed"),
        (
            "experiment: {local: {lr: !sample local.momentum, momentum: !sample local.lr}}",
            "1:26",
            "is a !sample itself",
        ),
    ],
)
def test_what_cannot_be_searched_is_told_at_its_place(text, place, message):
    found = messages(text)
    assert any(f"{place}:" in each and message in each for each in found), found


def test_expressions():
    tree = {"local": {"lr": 0.1}, "rounds": 7, "algorithm": [{"fedavg": {}}, {"ecl": {"num_experts": 3}}]}
    for text, value in [
        ("local.lr / 10", 0.01),
        ("rounds // 2 + 1", 4),
        ("max(2, algorithm.ecl.num_experts - 2) ** 2", 4),
        ("-(1 - rounds)", 6),
        ("round(rounds * 0.3)", 2),
        ("min(rounds, 3)", 3),
    ]:
        assert evaluate(text, tree) == pytest.approx(value)
    for text in ("local", "True", "'a'", "local.lr if 1 else 2", "rounds.real", "[1]", "1e400", "lambda: 1", "open(1)"):
        with pytest.raises(ValueError, match=r"local.lr / 10|not possible|not a number|there is no"):
            evaluate(text, tree)


def test_derived_leaves_follow_the_others():
    text = "experiment: {rounds: !grid [4, 6], local: {epochs: !sample 12 // rounds}}"
    found = space.trials(sweep(text))
    assert [(t.experiment.rounds, t.experiment.local.epochs) for t in found] == [(4, 3), (6, 2)]
    assert found[0].params == {"rounds": 4, "local.epochs": 3}


def test_the_grid_searcher_tries_everything_once():
    leaves = "{rounds: !randint [1, 3], local: {batch: !quniform [8, 16, 4], lr: !choice [1, 2]}}"
    text = f"search: {{searcher: grid}}\nexperiment: {leaves}"
    assert len({t.experiment.model_dump_json() for t in space.trials(sweep(text))}) == 2 * 3 * 2


# Presets -------------------------------------------------------------------------------------------------------------

PRESETS = """\
search: {samples: 3}
experiment: {rounds: 9, local: {lr: 0.1, batch: 8}}
presets: {quick: {experiment: {rounds: x}}}
"""


def test_a_preset_is_laid_over_the_file():
    text = PRESETS.replace("rounds: x", "local: {lr: 0.2}")
    plain, quick = sweep(text), sweep(text, preset="quick")
    assert plain.experiment["local"] == {"lr": 0.1, "batch": 8}
    assert quick.experiment["local"] == {"lr": 0.2, "batch": 8}
    assert quick.experiment["rounds"] == 9
    assert quick.search.samples == 3


def test_mistakes_in_a_preset_are_told_at_its_place():
    (found,) = messages(PRESETS, preset="quick")
    assert found.startswith("<text>:3:") or found.startswith("3:")
    assert "rounds" in found
    (found,) = messages(PRESETS, preset="slow")
    assert "no such preset; its presets are: quick" in found
