"""Open leaves: reading, checking, drawing, expanding."""

import math
import re

import pytest

from orchestrator.experiment import Experiment
from orchestrator.space import MOST, Trial, check, leaves, trials, tune_domain
from orchestrator.sweep_file import Sweep, dump_sweep, read
from orchestrator.yaml_file import InputError, Open

SWEEP = """\
search: {samples: 3}
experiment:
  data: {clients: 8, alpha: !uniform [0.1, 0.9]}
  algorithm:
    - fedprox: {mu: !loguniform [1e-3, 1.0]}
    - finetune: {epochs: !choice [2, 3, 4]}
  local: {lr: 0.1, loss: !grid [ce, focal]}
  rounds: !quniform [10, 40, 10]
  clients_per_round: !randint [2, 5]
  seed: !grid [0, 1]
"""


def wrong(text: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        trials(read(None, text, overrides))
    return [message.removeprefix("<text>:") for message in caught.value.messages]


def expand(text: str, *overrides: str, seed: int = 0) -> list[Trial]:
    return trials(read(None, text, overrides), seed)


# Leaves --------------------------------------------------------------------------------------------------------------


def test_leaves_in_the_order_of_the_file():
    found = leaves(read(None, SWEEP))
    assert {path: str(leaf) for path, leaf in found.items()} == {
        "data.alpha": "!uniform [0.1, 0.9]",
        "algorithm.0.fedprox.mu": "!loguniform [0.001, 1.0]",
        "algorithm.1.finetune.epochs": "!choice [2, 3, 4]",
        "local.loss": '!grid ["ce", "focal"]',
        "rounds": "!quniform [10, 40, 10]",
        "clients_per_round": "!randint [2, 5]",
        "seed": "!grid [0, 1]",
    }
    assert list(found)[-1] == "seed"
    assert found["data.alpha"].mark == "<text>:3:29"
    assert leaves(read(None, "")) == {}


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("!grid []", "!grid takes [a, b, ...]: at least one value"),
        ("!choice []", "!choice takes [a, b, ...]: at least one value"),
        ("!grid 3", "!grid takes [a, b, ...], a list"),
        ("!grid {a: 1}", "!grid takes [a, b, ...], a list"),
        ("!uniform [1]", "!uniform takes [lowest, highest], not 1 values"),
        ("!uniform [1, 2, 3]", "!uniform takes [lowest, highest], not 3 values"),
        ("!uniform [2, 1]", "!uniform takes [lowest, highest]: 2 must be less than 1"),
        ("!uniform [1, 1]", "!uniform takes [lowest, highest]: 1 must be less than 1"),
        ("!uniform [a, 1]", "!uniform takes [lowest, highest]: numbers, not 'a'"),
        ("!uniform [true, 2]", "!uniform takes [lowest, highest]: numbers, not true"),
        ("!uniform [0, .inf]", "!uniform takes [lowest, highest]: finite numbers, not Infinity"),
        ("!uniform [.nan, 1]", "!uniform takes [lowest, highest]: finite numbers, not NaN"),
        ("!loguniform [0, 1]", "!loguniform takes [lowest, highest]: the lowest must be > 0, not 0"),
        ("!loguniform [-1, 1]", "!loguniform takes [lowest, highest]: the lowest must be > 0, not -1"),
        ("!quniform [1, 2]", "!quniform takes [lowest, highest, step], not 2 values"),
        ("!quniform [0, 1, 0.3]", "!quniform takes [lowest, highest, step]: both ends must be multiples of a step > 0"),
        ("!quniform [0, 1, 0]", "!quniform takes [lowest, highest, step]: both ends must be multiples of a step > 0"),
        ("!randint [1, 2.5]", "!randint takes [lowest, one above the highest]: whole numbers, not 2.5"),
        ("!randint [3, 3]", "!randint takes [lowest, one above the highest]: 3 must be less than 3"),
        ("!gird [1]", "unknown tag '!gird'; did you mean '!grid'?"),
        ("!sample [1]", '!sample takes an expression such as "local.lr / 10"'),
        ("!grid [1, !uniform [0, 1]]", "an open leaf inside another is not possible"),
        ("!grid [{a: [!uniform [0, 1]]}]", "an open leaf inside another is not possible"),
    ],
)
def test_malformed_leaves_are_told_at_their_place(leaf, message):
    (found,) = wrong(f"rounds: 3\nlocal: {{lr: {leaf}}}")
    assert found.startswith(f"2:13: local.lr: {message}")


# Checking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("seed: !grid [0, -1]", ["1:7: seed: must be >= 0, not -1 (with seed = -1)"]),
        ("seed: !choice [0, x]", ["1:7: seed: must be a whole number, not 'x' (with seed = 'x')"]),
        (
            "seed: !grid [x, y]",
            [
                "1:7: seed: must be a whole number, not 'x' (with seed = 'x')",
                "1:7: seed: must be a whole number, not 'y' (with seed = 'y')",
            ],
        ),
        ("data:\n  alpha: !uniform [0, 1]", ["2:10: data.alpha: must be > 0, not 0 (with data.alpha = 0)"]),
        ("local: {momentum: !uniform [0, 1]}", ["1:19: local.momentum: must be < 1, not 1 (with local.momentum = 1)"]),
        ("rounds: !quniform [0, 10, 5]", ["1:9: rounds: must be >= 1, not 0 (with rounds = 0)"]),
        ("rounds: !randint [0, 5]", ["1:9: rounds: must be >= 1, not 0 (with rounds = 0)"]),
        ("model: !grid [resnet8, resnt8]", ["1:8: model.name: there is no model 'resnt8'; did you mean 'resnet"]),
        (
            "algorithm: !grid [fedavg, {fedprox: {mu: -1}}]",
            ['1:12: algorithm.fedprox.mu: must be >= 0, not -1 (with algorithm = {"fedprox": {"mu": -1}})'],
        ),
        (
            "algorithm: [{fedprox: {mu: !choice [1, -1]}}]",
            ["1:28: algorithm.fedprox.mu: must be >= 0, not -1 (with algorithm.fedprox.mu = -1)"],
        ),
        ("local: !grid [{lr: 1}, {rl: 1}]", ["1:8: local.rl: unknown key 'rl'; "]),
        ("locl: !grid [1, 2]", ["1:7: locl: unknown key 'locl'; did you mean 'local'? (with locl = 1)"]),
        # What is wrong in any case is told once and at its own place.
        ("rounds: 0\nseed: !grid [0, 1, 2]", ["1:9: rounds: must be >= 1, not 0"]),
        # A value that does not fit to another is told at the leaf that was varied.
        (
            "data: {clients: !grid [20, 5]}\nclients_per_round: 10",
            ["1:17: clients_per_round: must be <= data.clients, which is 5, not 10 (with data.clients = 5)"],
        ),
        (
            "local:\n  loss: !grid [ce, balanced_softmax]\n  prior: none",
            ["2:9: local.prior: loss 'balanced_softmax' needs a class prior; choose one of global, "],
        ),
    ],
)
def test_every_candidate_is_checked(text, messages):
    with pytest.raises(InputError) as caught:
        read(None, text)
    found = [message.removeprefix("<text>:") for message in caught.value.messages]
    assert len(found) == len(messages)
    assert all(told.startswith(message) for told, message in zip(found, messages, strict=True))


def test_a_range_of_fractions_is_no_range_of_whole_numbers():
    (found,) = wrong("rounds: !uniform [1, 5]")
    assert found.startswith("1:9: rounds: must be a whole number, not 3.47")


def test_what_only_two_leaves_together_break_is_found_on_expanding():
    text = "data: {clients: !grid [20, 10]}\nclients_per_round: !grid [5, 10, 20]"
    assert wrong(text)[0].startswith(
        "2:20: clients_per_round: must be <= data.clients, which is 10, not 20 "
        "(with data.clients = 10, clients_per_round = 20)"
    )


def test_a_sweep_made_by_hand_is_checked_too():
    with pytest.raises(InputError, match=r"^rounds: must be >= 1, not 0"):
        check(Sweep(read(None, "").search, {"rounds": 0}))
    check(Sweep(read(None, "").search, {"rounds": Open("grid", (1, 2))}))


# Expanding -----------------------------------------------------------------------------------------------------------


def test_a_product_in_the_order_of_the_file_with_the_last_leaf_fastest():
    found = expand("local: {lr: !grid [1, 2]}\nrounds: !grid [3, 4]\nseed: !grid [5, 6]")
    assert [tuple(t.params.values()) for t in found] == [(a, b, c) for a in (1, 2) for b in (3, 4) for c in (5, 6)]
    assert [t.id for t in found] == [f"{i:04d}" for i in range(8)]
    assert [(t.experiment.local.lr, t.experiment.rounds, t.experiment.seed) for t in found] == [
        tuple(t.params.values()) for t in found
    ]
    assert list(found[0].params) == ["local.lr", "rounds", "seed"]


def test_nothing_open_is_one_trial():
    (trial,) = expand("search: {samples: 5}\nexperiment: {rounds: 3}")
    assert (trial.id, trial.params, trial.name, trial.experiment) == ("0000", {}, "fedavg", Experiment(rounds=3))


def test_draws_times_grid():
    found = expand(SWEEP)
    assert len(found) == 3 * 2 * 2
    for i in range(3):
        # A draw is the same at every point of the grid, so that its points can be compared.
        drawn = [
            {k: v for k, v in t.params.items() if k not in ("local.loss", "seed")} for t in found[4 * i : 4 * i + 4]
        ]
        assert drawn.count(drawn[0]) == 4
    assert len({t.params["data.alpha"] for t in found}) == 3


def test_draws_stay_in_their_bounds_and_reach_all_of_them():
    found = expand(SWEEP, "search.samples=200", "seed=0", "local.loss=ce")
    assert len(found) == 200
    values = {path: [t.params[path] for t in found] for path in found[0].params}
    assert all(0.1 <= v <= 0.9 for v in values["data.alpha"])
    assert all(1e-3 <= v <= 1 for v in values["algorithm.0.fedprox.mu"])
    decades = [math.floor(math.log10(v)) for v in values["algorithm.0.fedprox.mu"]]
    assert all(40 < decades.count(d) < 95 for d in (-3, -2, -1))
    assert set(values["algorithm.1.finetune.epochs"]) == {2, 3, 4}
    assert set(values["rounds"]) == {10, 20, 30, 40}
    assert set(values["clients_per_round"]) == {2, 3, 4}
    assert {type(v) for v in values["rounds"]} == {int}


def test_fractional_steps_are_round_numbers():
    found = expand("search: {samples: 60}\nexperiment: {local: {lr: !quniform [0.1, 0.7, 0.1]}}")
    assert sorted(t.params["local.lr"] for t in found) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_the_same_sweep_expands_to_the_same_trials():
    assert expand(SWEEP) == expand(SWEEP)
    assert expand(SWEEP) != expand(SWEEP, seed=1)
    # More samples only append; another open leaf leaves the draws of the others alone.
    assert expand(SWEEP, "search.samples=5")[:12] == expand(SWEEP)
    other = expand(SWEEP, "local.lr=!uniform [0.1, 0.2]")
    assert [t.params["data.alpha"] for t in other] == [t.params["data.alpha"] for t in expand(SWEEP)]


def test_draws_do_not_change_between_versions():
    (trial,) = expand("data: {alpha: !uniform [0.1, 0.9]}\nrounds: !randint [1, 1000]\nseed: !choice [1, 2, 3]")
    assert trial.params == {"data.alpha": 0.5301900210767123, "rounds": 95, "seed": 3}


def test_equal_experiments_run_once():
    assert len(expand("seed: !grid [1, 1, 2, 1.0, '2']")) == 2
    assert len(expand("search: {samples: 50}\nexperiment: {seed: !choice [1, 2]}")) == 2
    found = expand("algorithm: !grid [fedavg, [fedavg, finetune], finetune, {fedprox: {mu: 0.01}}, fedprox]")
    assert [t.name for t in found] == ["fedavg", "fedavg+finetune", "fedprox"]
    assert [t.id for t in found] == ["0000", "0001", "0002"]


def test_whole_parts_may_be_open():
    losses = "!grid [{loss: ce}, {loss: balanced_softmax, prior: local}]"
    found = expand(f"local: {losses}\nmodel: !grid [resnet8, {{name: resnet8, width: 4}}]")
    assert [(t.experiment.local.loss[0], t.experiment.model.width) for t in found] == [
        ("ce", None), ("ce", 4), ("balanced_softmax", None), ("balanced_softmax", 4)
    ]  # fmt: skip
    found = expand("algorithm: [!grid [fedavg, fedprox, {fedprox: {mu: 1}}], finetune]")
    assert [t.name for t in found] == ["fedavg+finetune", "fedprox+finetune mu=0.01", "fedprox+finetune mu=1"]
    assert found[2].params == {"algorithm.0": {"fedprox": {"mu": 1}}}
    found = expand("algorithm: [{fedprox: !choice [{mu: 1}]}]")
    assert found[0].experiment.algorithm == (("fedprox", {"mu": 1.0}),)


def test_overrides_open_leaves_and_close_them():
    assert len(expand("", "seed=!grid [0, 1]", "rounds=!grid [1, 2, 3]")) == 6
    assert len(expand(SWEEP, "seed=3", "local.loss=ce")) == 3
    assert len(expand("algorithm: fedprox", "algorithm.fedprox.mu=!grid [0, 1]")) == 2


def test_too_many_trials_are_refused_before_they_are_made():
    numbers = ", ".join(map(str, range(1, 101)))
    text = f"seed: !grid [{numbers}]\nrounds: !grid [{numbers}]\nlocal: {{batch: !grid [{numbers}]}}"
    assert wrong(text) == [
        f"1:1: a sweep of 1,000,000 trials; at most {MOST:,} are possible: open fewer leaves, or lower search.samples"
    ]
    for sweep in (
        "search: {samples: 1000000000}\nexperiment: {seed: !randint [0, 9]}",
        "search: {searcher: grid}\nexperiment: {rounds: !randint [1, 1000000000001]}",
        "search: {searcher: grid}\nexperiment: {local: {lr: !quniform [1, 2, 1.0e-12]}}",
        f"search: {{}}\nexperiment: {{seed: !grid [{numbers}]}}\ncases: [{', '.join(['{rounds: 2}'] * 101)}]",
    ):
        assert re.match(r"\d+:\d+: a sweep of [0-9,]{6,} trials; at most 10,000", wrong(sweep)[0])


def test_a_prior_may_be_open_beside_a_loss_that_is_none():
    for loss in ("null", "3", "[[1]]"):
        assert "local.loss: must be one loss" in wrong(f"local: {{loss: {loss}, prior: !grid [none, local]}}")[0]


def test_the_chain_of_a_case_may_be_open():
    found = expand("search: {}\ncases: [{algorithm: !grid [fedavg, local]}, {algorithm: [!grid [fedper]], rounds: 3}]")
    assert [t.name for t in found] == ["fedavg", "local", "fedper"]


def test_many_mistakes_and_many_candidates_are_told_soon():
    keys = "\n".join(f"k{i}: 1" for i in range(2000))
    assert len(wrong(f"seed: !grid [{', '.join(map(str, range(2000)))}]\n{keys}")) == 2000


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("!quniform [0, 1, 1.0e-320]", "is too small a step between 0 and 1"),
        ("!randint [0, 9223372036854775809]", "between -2 ** 63 and 2 ** 63"),
        ("!sample 'round(5, 0 - 10 ** 12)'", "rounded to more than 100 digits"),
    ],
)
def test_numbers_beyond_all_measure(leaf, text):
    assert text in wrong(f"local: {{lr: {leaf}}}")[0]


# Names ---------------------------------------------------------------------------------------------------------------


def test_names():
    found = expand("algorithm: [{fedprox: {mu: !grid [0.01]}}]\nseed: !grid [1]")
    assert found[0].name == "fedprox mu=0.01 seed=1"
    found = expand("local: {lr: !grid [0.123456789]}\nmodel: !grid [resnet8]")
    assert found[0].name == "fedavg lr=0.1235 model=resnet8"
    found = expand("local: {epochs: !grid [1]}\nalgorithm: [{finetune: {epochs: !grid [2]}}]")
    assert found[0].name == "fedavg+finetune local.epochs=1 finetune.epochs=2"
    found = expand('data: {name: !grid ["a\\n\\x1bü", ' + "x" * 100 + "]}")
    assert found[0].name == "fedavg name=a??ü"
    assert len(found[1].name) == 80
    assert all(t.name.isprintable() for t in found)


# Ray Tune ------------------------------------------------------------------------------------------------------------


def test_domains_of_ray_tune():
    from ray.tune.search.sample import Categorical, Float, Integer

    assert tune_domain(Open("grid", (1, 2))) == {"grid_search": [1, 2]}
    choice = tune_domain(Open("choice", ("a", {"b": 1})))
    assert isinstance(choice, Categorical)
    assert choice.categories == ["a", {"b": 1}]
    for kind, values, domain in (
        ("uniform", (0.1, 0.5), Float),
        ("loguniform", (0.1, 0.5), Float),
        ("quniform", (0.1, 0.5, 0.1), Float),
        ("randint", (1, 5), Integer),
    ):
        made = tune_domain(Open(kind, values))
        assert isinstance(made, domain)
        assert (made.lower, made.upper) == values[:2]
        assert values[0] <= made.sample() <= values[1]
    assert tune_domain(Open("quniform", (0.1, 0.5, 0.1))).sampler.q == 0.1
    assert type(tune_domain(Open("loguniform", (0.1, 0.5))).sampler).__name__ == "_LogUniform"


def test_a_grid_of_losses_and_priors_has_one_trial_for_a_loss_without_prior():
    sweep = read(text="local: {loss: !grid [ce, balanced_softmax], prior: !grid [local, gpi]}")
    found = [(t.params["local.loss"], t.params["local.prior"], t.experiment.local.prior) for t in trials(sweep)]
    assert found == [
        ("ce", "none", "none"),
        ("balanced_softmax", "local", "local"),
        ("balanced_softmax", "gpi", "gpi"),
    ]


def test_cases_are_laid_over_the_experiment():
    text = (
        "search: {metric: generic/acc}\n"
        "experiment: {local: {lr: 0.1, batch: 8}, rounds: 3, seed: !grid [0, 1]}\n"
        "cases:\n"
        "  - algorithm: fedavg\n"
        "  - {algorithm: {fedprox: {mu: !grid [0.1, 1.0]}}, local: {lr: 0.01}}\n"
        "  - {algorithm: fedavg, seed: 1}\n"
    )
    sweep = read(text=text)
    found = [(t.id, t.name, t.experiment.local.lr, t.experiment.local.batch, t.experiment.seed) for t in trials(sweep)]
    assert found == [
        ("0000", "fedavg seed=0", 0.1, 8, 0),
        ("0001", "fedavg seed=1", 0.1, 8, 1),
        ("0002", "fedprox seed=0 mu=0.1", 0.01, 8, 0),
        ("0003", "fedprox seed=0 mu=1", 0.01, 8, 0),
        ("0004", "fedprox seed=1 mu=0.1", 0.01, 8, 1),
        ("0005", "fedprox seed=1 mu=1", 0.01, 8, 1),
    ], "the third case is a trial of the first"
    assert [t.params["case"] for t in trials(sweep)] == [0, 0, 1, 1, 1, 1]
    again = read(text=dump_sweep(sweep))
    assert again == sweep
    assert dump_sweep(again) == dump_sweep(sweep)


def test_what_is_set_for_all_holds_in_every_case():
    text = "experiment: {rounds: 3}\ncases: [{algorithm: fedavg, local: {lr: 0.1, batch: 8}}, {algorithm: fedprox}]\n"
    found = trials(read(text=text, overrides=["local.lr=0.5"]))
    assert [(t.name, t.experiment.local.lr, t.experiment.local.batch) for t in found] == [
        ("fedavg", 0.5, 8),
        ("fedprox", 0.5, 32),
    ]
    deep = trials(read(text=text, overrides=["algorithm.fedprox.mu=0.7"]))
    assert [t.experiment.algorithm for t in deep] == [(("fedavg", {}),), (("fedprox", {"mu": 0.7}),)]
    with pytest.raises(InputError, match=r"--set algorithm\.nothing\.mu=1"):
        read(text=text, overrides=["algorithm.nothing.mu=1"])
    assert [t.name for t in trials(read(text=text, overrides=["cases=null", "algorithm=local"]))] == ["local"]


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ("cases: 3", "<text>:2:8: cases: must be a list of parts of an experiment"),
        ("cases: [{local: {lr: abc}}]", "<text>:2:22: local.lr: must be a number, not 'abc'"),
        ("cases: [{rouds: 3}]", "<text>:2:10: rouds: unknown key 'rouds'; did you mean 'rounds'?"),
    ],
)
def test_mistakes_in_cases_are_told_at_their_place(cases, message):
    with pytest.raises(InputError) as caught:
        read(text=f"experiment: {{rounds: 3}}\n{cases}\n")
    assert str(caught.value) == message


def test_no_two_trials_go_by_one_name():
    """Where the leaves that are open do not tell trials apart, what differs in their experiments does."""
    chains = "[[gpi, ldae: {num_experts: 2}], [gpi: {floor: 100}, ldae: {num_experts: 2}]]"
    text = "experiment: {seed: !grid [0, 1], local: {loss: balanced_softmax, prior: gpi}}\ncases:\n"
    found = trials(read(text=f"{text}- algorithm: [ldae: {{num_experts: 2}}]\n- algorithm: !grid {chains}\n"))
    assert [t.name for t in found] == [f"gpi+ldae seed={seed} floor={f}" for f in (5, 100) for seed in (0, 1)]
