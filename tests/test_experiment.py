"""Reading experiments: every rule, and the exact place at which breaking it is reported."""

import itertools
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import pytest
from pydantic import ValidationError

import algorithms
from algorithms.base import Algorithm, Chain, knob
from orchestrator.experiment import Cluster, Experiment, Local, Schedule, dump, read_back
from orchestrator.sweep_file import Search, dump_sweep, read
from orchestrator.yaml_file import LARGEST, WIDEST, InputError, emit, parse, scalar


def made(text: str = "", *overrides: str) -> Experiment:
    return Experiment.model_validate(read(None, text, overrides).experiment)


def wrong(text: str = "", *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(None, text, overrides)
    return [message.removeprefix("<text>:") for message in caught.value.messages]


# Defaults and short forms --------------------------------------------------------------------------------------------


def test_nothing_is_an_experiment():
    e = made()
    assert e == Experiment()
    assert (e.data.name, e.model.name, e.rounds, e.clients_per_round) == ("digits", "cnn_small", 20, 10)
    assert e.algorithm == ((algorithms.DEFAULT, {}),)
    assert made("data:\nlocal: null\nevaluate:\n") == e


def test_defaults_follow_the_data():
    assert made("data: {clients: 4}").clients_per_round == 4
    assert made("data: {name: cifar10}").model.name == "resnet8"
    assert made("data: {name: cifar10}\nmodel: {width: 8}").model.name == "resnet8"
    assert made("model: resnet8").model == made("model: {name: resnet8}").model


@pytest.mark.parametrize(
    "text", ["fedavg", "[fedavg]", "{fedavg: }", "{fedavg: {}}", "[{fedavg: }]", "\n- fedavg: {}", "\n  fedavg:"]
)
def test_short_forms_of_a_chain(text):
    assert made(f"algorithm: {text}").algorithm == (("fedavg", {}),)


def test_a_chain_holds_all_hyperparameters_and_what_runs_first():
    e = made("algorithm: [fedprox, {finetune: {epochs: 3}}]")
    assert e.algorithm == (("fedprox", {"mu": 0.01}), ("finetune", {"epochs": 3, "lr": 0.01}))
    assert isinstance(e.chain(), Chain)
    assert [type(part).__name__ for part in e.chain().parts] == ["FedProx", "FineTune"]
    alone = made("algorithm: finetune")
    assert [name for name, _ in alone.algorithm] == ["fedavg", "finetune"]
    assert alone == made("algorithm: [fedavg, finetune]")


def test_every_algorithm_can_be_named():
    for name in algorithms.names():
        assert made(f"algorithm: {name}").chain().parts


def test_frozen():
    with pytest.raises(ValidationError):
        Experiment().rounds = 3


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-3", "'1e-3'", "0.001", "1.0e-3", "+1E-3", ".001"])
def test_numbers_as_people_write_them(text):
    assert made(f"local: {{lr: {text}}}").local.lr == 0.001
    assert made(f"algorithm: {{fedprox: {{mu: {text}}}}}").algorithm[0][1]["mu"] == 0.001


@pytest.mark.parametrize("text", ["3", "3.0", "'3'", "3e0"])
def test_whole_numbers(text):
    assert made(f"rounds: {text}").rounds == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds: true", "1:9: rounds: must be a number, not true"),
        ("rounds: 0", "1:9: rounds: must be >= 1, not 0"),
        ("rounds: 2.5", "1:9: rounds: must be a whole number, not 2.5"),
        ("rounds: abc", "1:9: rounds: must be a whole number, not 'abc'"),
        ("rounds: [1]", "1:9: rounds: must be a whole number, not [1]"),
        ("rounds: null", "1:9: rounds: must be a whole number, not null"),
        ("rounds:", "1:8: rounds: must be a whole number, not null"),
        (f"rounds: {'9' * 5000}", "1:9: rounds: must be a whole number, not '9999"),
        ("local: {lr: abc}", "1:13: local.lr: must be a number, not 'abc'"),
        ("local: {lr: true}", "1:13: local.lr: must be a number, not true"),
        ("local: {lr: .nan}", "1:13: local.lr: must be a finite number, not NaN"),
        ("local: {lr: .inf}", "1:13: local.lr: must be a finite number, not Infinity"),
        ("local: {lr: 'nan'}", "1:13: local.lr: must be a finite number, not 'nan'"),
        ("local: {lr: 0}", "1:13: local.lr: must be > 0, not 0"),
        ("local: {momentum: 1}", "1:19: local.momentum: must be < 1, not 1"),
        ("local: 3", "1:8: local: must be a mapping of keys to values, not 3"),
        ("local: [1]", "1:8: local: must be a mapping of keys to values, not [1]"),
        ("data: {name: 3}", "1:14: data.name: must be text, not 3"),
        ("data: {alpha: -0.5}", "1:15: data.alpha: must be > 0, not -0.5"),
        ("data: {imbalance: 0.5}", "1:19: data.imbalance: must be >= 1, not 0.5"),
        ("data: {validation: 0.9}", "1:20: data.validation: must be < 0.9, not 0.9"),
        ("data: {clients: 0}", "1:17: data.clients: must be >= 1, not 0"),
        ("seed: -1", "1:7: seed: must be >= 0, not -1"),
        ("evaluate: {every: 0}", "1:19: evaluate.every: must be >= 1, not 0"),
        ("evaluate: {what: []}", "1:18: evaluate.what: must be a list of at least one, not []"),
        ("evaluate: {what: all}", "1:18: evaluate.what: must be a list, not 'all'"),
        ("evaluate: {what: [all]}", "1:19: evaluate.what.0: must be 'generic' or 'personal', not 'all'"),
        ("failures: {retries: -1}", "1:21: failures.retries: must be >= 0, not -1"),
        ("failures: {client_timeout_s: 0}", "1:30: failures.client_timeout_s: must be > 0, not 0"),
        ("failures: {bad_update: retry}", "1:24: failures.bad_update: must be 'fail' or 'skip', not 'retry'"),
        ("model: {name: resnet8, width: 0}", "1:31: model.width: must be >= 1, not 0"),
        ("clients_per_round: 21", "1:20: clients_per_round: must be <= data.clients, which is 20, not 21"),
        ("algorithm: {fedprox: {mu: -1}}", "1:27: algorithm.fedprox.mu: must be >= 0, not -1"),
        ("algorithm: {fedprox: {mu: x}}", "1:27: algorithm.fedprox.mu: must be a number, not 'x'"),
        ("algorithm: {fedprox: {mu: true}}", "1:27: algorithm.fedprox.mu: must be a number, not true"),
        ("algorithm: {fedprox: {mu: .nan}}", "1:27: algorithm.fedprox.mu: must be a finite number, not NaN"),
        ("algorithm: {fedprox: 3}", "1:22: algorithm.fedprox: must be a mapping of hyperparameters, not 3"),
        ("algorithm:\n- finetune: {epochs: 1.5}", "2:22: algorithm.finetune.epochs: must be a whole number, not 1.5"),
        ("local: {loss: {focal: {gamma: -1}}}", "1:31: local.loss.focal.gamma: must be >= 0, not -1"),
    ],
)
def test_wrong_values(text, message):
    (found,) = wrong(text)
    assert found.startswith(message)
    assert len(found) < 150


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nruonds: 3", "2:1: ruonds: unknown key 'ruonds'; did you mean 'rounds'?"),
        ("data:\n  alhpa: 3", "2:3: data.alhpa: unknown key 'alhpa'; did you mean 'alpha'?"),
        ("local: {schedule: {factr: 2}}", "1:20: local.schedule.factr: unknown key 'factr'; did you mean 'factor'?"),
        (
            "data: {zzzzz: 3}",
            "1:8: data.zzzzz: unknown key 'zzzzz'; known: alpha, classes_per_client, clients, imbalance, name",
        ),
        ("model: resnt8", "1:8: model.name: there is no model 'resnt8'; did you mean 'resnet"),
        ("model: {name: resnt8}", "1:15: model.name: there is no model 'resnt8'; did you mean 'resnet"),
        ("model: {name: cnn_small, width: 3}", "1:33: model.width: model 'cnn_small' takes none; those that do: cnn"),
        ("algorithm: fedprx", "1:12: algorithm.fedprx: there is no algorithm 'fedprx'; did you mean 'fedprox'?"),
        ("algorithm: ../losses", "1:12: algorithm.../losses: there is no algorithm '../losses'"),
        ("algorithm: [{fedprx: }]", "1:14: algorithm.fedprx: there is no algorithm 'fedprx'; did you mean 'fedprox'?"),
        ("algorithm: [{fedprox: {mo: 1}}]", "1:24: algorithm.fedprox.mo: unknown key 'mo'; known: mu"),
        ("algorithm: [{fedavg: {mu: 1}}]", "1:23: algorithm.fedavg.mu: unknown key 'mu'; there are none to set here"),
        ("algorithm: [fedprox, {fedprox: {m: 1}}]", "1:33: algorithm.1.fedprox.m: unknown key 'm'"),
        (
            "algorithm: [fedavg, {fedprox: , finetune: }]",
            "1:21: algorithm.1: must be one {name: {hyperparameter: value",
        ),
        ("algorithm: []", "1:12: algorithm: must be an algorithm's name or a list of {name: {hyperparameter: value}}"),
        ("algorithm: 3", "1:12: algorithm: must be an algorithm's name or a list"),
        (f"algorithm: {['fedavgg'] * 999}", "1:12: algorithm: 999 algorithms in a chain; at most 50 are possible"),
        ("algorithm: [3]", "1:13: algorithm.0: must be one {name: {hyperparameter: value}}, not 3"),
        ("local: {loss: cee}", "1:15: local.loss: there is no loss 'cee'; did you mean 'ce'?"),
        ("local: {loss: [ce]}", "1:15: local.loss: must be one loss: a name, or {name: {hyperparameter: value}}, not"),
        ("local: {loss: {focal: {gama: 1}}}", "1:24: local.loss.focal.gama: unknown key 'gama'; did you mean 'gamma'"),
        ("local: {prior: lokal}", "1:16: local.prior: there is no prior 'lokal'; did you mean 'local'?"),
        (
            "data: {partition: per_clas}",
            "1:19: data.partition: must be 'per_class', 'per_class_capped', 'grouped_equal'",
        ),
        ("search: {metric: personal/acc_dst}", "1:18: search.metric: there is no metric 'personal/acc_dst'; did you"),
        ("search: {mtric: x}", "1:10: search.mtric: unknown key 'mtric'; did you mean 'metric'?"),
        ("search: {mode: best}", "1:16: search.mode: must be 'max' or 'min', not 'best'"),
        ("search: {concurrent: 0}", "1:22: search.concurrent: must be >= 1, not 0"),
        ("search: {samples: !grid [1, 2]}", "1:19: search.samples: must be a whole number, not !grid [1, 2]"),
    ],
)
def test_unknown_names_suggest_the_nearest(text, message):
    (found,) = wrong(text)
    assert found.startswith(message)


def test_combinations_that_make_no_sense():
    (found,) = wrong("local:\n  loss: balanced_softmax")
    assert found.startswith("2:3: local.prior: loss 'balanced_softmax' needs a class prior; choose one of global, ")
    assert wrong("local: {prior: local}") == [
        "1:16: local.prior: loss 'ce' uses no prior; choose none, or one that does: balanced_softmax, ldam, lade"
    ]
    assert made("local: {loss: balanced_softmax, prior: global}").local.prior == "global"


def test_only_sets_that_name_users_are_divided_by_them():
    data = made("data: {name: inaturalist_user_160k, partition: by_user}").data
    assert (data.partition, data.imbalance, data.alpha) == ("by_user", 1, 0.5)
    for name in ("digits", "imagenet_lt", "cityscapes", "own.npz"):
        assert wrong(f"data: {{name: {name}, partition: by_user}}") == [
            f"1:{27 + len(name)}: data.partition: 'by_user' keeps each user's images together, but '{name}' names no "
            "users; it can: inaturalist_user_160k"
        ]
    assert wrong("data: {name: inaturalist_user_160k, partition: by_user, alpha: 0.1}") == [
        "1:64: data.alpha: is of partitions by class; by_user goes by users alone: leave alpha out"
    ]
    assert wrong("data: {name: cityscapes, alpha: 0.1}") == [
        "1:33: data.alpha: is of partitions by class; foreground goes by the classes of pixels alone: leave alpha out"
    ]


@dataclass(frozen=True)
class Probe(Algorithm):
    """Hyperparameters of every kind that there may be."""

    often: int | None = knob(None, ge=1)
    share: float | Literal["auto"] = knob("auto", gt=0, le=1)
    sizes: tuple[int, ...] = knob((1, 2), ge=1)
    how: Literal["mean", "median"] = "mean"
    deep: bool = False
    tag: str = "x"
    low: int = 0
    high: int = 1

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low must be less than high, not {self.low} and {self.high}")


@pytest.fixture
def probe(monkeypatch):
    find = algorithms.find
    monkeypatch.setattr(algorithms, "find", lambda name: Probe if name == "probe" else find(name))


def test_hyperparameters_of_every_kind(probe):
    text = "algorithm:\n  probe: {often: 3, share: 1e-1, sizes: [4, 5], how: median, deep: yes, tag: ü, low: -1}"
    ((_, knobs),) = made(text).algorithm
    assert knobs == {
        "often": 3, "share": 0.1, "sizes": (4, 5), "how": "median", "deep": True, "tag": "ü", "low": -1, "high": 1
    }  # fmt: skip
    assert made(dump(made(text))) == made(text)
    assert made("algorithm: {probe: {often: null, share: auto}}") == made("algorithm: probe")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ("{often: 0}", "1:28: algorithm.probe.often: must be >= 1, not 0"),
        ("{share: 2}", "1:28: algorithm.probe.share: must be <= 1 or 'auto', not 2"),
        ("{share: x}", "1:28: algorithm.probe.share: must be a number or 'auto', not 'x'"),
        ("{sizes: [3, 0]}", "1:32: algorithm.probe.sizes.1: must be >= 1, not 0"),
        ("{sizes: 3}", "1:28: algorithm.probe.sizes: must be a list, not 3"),
        ("{how: mode}", "1:26: algorithm.probe.how: must be 'mean' or 'median', not 'mode'"),
        ("{deep: maybe}", "1:27: algorithm.probe.deep: must be true or false, not 'maybe'"),
        ("{tag: 3}", "1:26: algorithm.probe.tag: must be text, not 3"),
        ("{low: 5}", "1:20: algorithm.probe: low must be less than high, not 5 and 1"),
    ],
)
def test_wrong_hyperparameters_of_every_kind(probe, knobs, message):
    assert wrong(f"algorithm: {{probe: {knobs}}}") == [message]


# Schedules and clusters ----------------------------------------------------------------------------------------------


def test_schedules():
    steps = Schedule(at=(200, 300))
    assert [steps.rate(1.0, r) for r in (0, 199, 200, 299)] == [1.0, 1.0, 0.1, 0.1]
    assert steps.rate(1.0, 300) == pytest.approx(0.01)
    decay = Schedule(every=3, factor=0.5)
    assert [decay.rate(8.0, r) for r in (0, 2, 3, 6, 9)] == [8.0, 8.0, 4.0, 2.0, 1.0]
    assert Schedule().rate(1.0, 1000) == 1.0
    assert made("local: {schedule: {at: [3, 5]}}").local.schedule == Schedule(at=(3, 5))
    assert wrong("local: {schedule: {at: [3], every: 2}}") == [
        "1:19: local.schedule: give either 'at' or 'every', not both"
    ]
    (found,) = wrong("local: {schedule: {factor: 0.5}}")
    assert found.startswith("1:19: local.schedule: 'factor' alone changes nothing")


@pytest.mark.parametrize("share", [0, 0.1, 0.125, 0.2, 0.25, 0.33, 0.333, 0.3333, 0.5, 1 / 3, 1 / 7, 1, 2, "auto"])
def test_shares_of_a_gpu_that_fill_it(share):
    assert Cluster(gpu_per_actor=share).gpu_per_actor == share


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ("0.3", "must be a share 1/k of a GPU, not 0.3, which leaves 10% of each GPU unused; choose 0.25 or 0.3333"),
        ("0.6", "must be a share 1/k of a GPU, not 0.6, which leaves 40% of each GPU unused; choose 0.5 or 1"),
        ("0.34", "must be a share 1/k of a GPU, not 0.34, which leaves 32% of each GPU unused; choose 0.3333 or 0.5"),
        ("1.5", "must be a whole number above 1, not 1.5; choose 1 or 2"),
        ("-1", "must be >= 0 or 'auto', not -1"),
        ("x", "must be a number or 'auto', not 'x'"),
    ],
)
def test_shares_of_a_gpu_that_waste_it(share, message):
    assert wrong(f"cluster: {{gpu_per_actor: {share}}}") == [f"1:26: cluster.gpu_per_actor: {message}"]


def test_actors():
    assert [made(f"cluster: {{actors: {n}}}").cluster.actors for n in ("3", "auto", "per_client")] == [
        3, "auto", "per_client"
    ]  # fmt: skip
    assert wrong("cluster: {actors: 0}") == ["1:19: cluster.actors: must be >= 1 or 'auto' or 'per_client', not 0"]


# Files ---------------------------------------------------------------------------------------------------------------


def test_two_forms_of_a_file():
    assert read(None, "rounds: 3").experiment == read(None, "experiment: {rounds: 3}").experiment
    sweep = read(None, "search: {samples: 4, mode: min, metric: train/loss, scheduler: asha}")
    assert sweep.search == Search(samples=4, mode="min", metric="train/loss", scheduler="asha")
    assert sweep.experiment == {}
    assert wrong("search: {}\nrounds: 3") == [
        "2:1: rounds: unknown key 'rounds' beside 'search' and 'experiment'; move it under 'experiment'"
    ]
    assert wrong("search: {}\nexperimnt: {}") == [
        "2:1: experimnt: unknown key 'experimnt' beside 'search' and 'experiment'; did you mean 'experiment'?"
    ]
    assert wrong("experiment: {search: {}}")[0].startswith("1:14: experiment.search: unknown key")
    assert wrong("experiment: 3") == ["1:13: experiment: must be a mapping of keys to values, not 3"]
    assert wrong("experiment:\n  local: {lr: x}") == ["2:15: local.lr: must be a number, not 'x'"]
    assert wrong("- 1") == ["1:1: must be a mapping of keys to values, not [1]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "1:9: no valid YAML"),
        ("seed: 1\n\trounds: 2", "2:1: no valid YAML"),
        ("a: b: c", "1:5: no valid YAML: mapping values are not allowed in this context"),
        ("rounds: 1\nlocal:\n  lr: 1\n  lr: 2", "4:3: local.lr: this key is already given; remove one of the two"),
        ("a: &x 1", "1:4: a: anchors (&) and aliases (*) are not allowed; write the value out"),
        ("a: *x", "1:4: a: anchors (&) and aliases (*) are not allowed; write the value out"),
        ("rounds: 1\n---\nrounds: 2", "2:1: a second document; a file holds one"),
        ("a: !!python/object/apply:os.system [x]", "1:4: a: unknown tag 'tag:yaml.org,2002:python/object/apply:os.sy"),
        ("a: !!binary aGk=", "1:4: a: unknown tag"),
        ("a: \x07", "1:4: the character '\\x07' is not allowed"),
        ("? [a]\n: 1", "1:3: a key must be a plain word"),
        ("<<: {rounds: 1}", "1:1: <<: unknown key '<<'"),
        ("a: " + "[" * 100_000, "1:34: a.0.0: nested more than 30 deep"),
        ('"a\\x1b[31m": 1', "1:1: a\\x1b[31m: unknown key 'a\\x1b[31m'"),
    ],
)
def test_broken_files(text, message):
    (found,) = wrong(text)
    assert found.startswith(message)
    assert found.isprintable()


def test_an_unclosed_list_in_a_file_of_tabs():
    assert "indent with spaces, not with a tab" in wrong("local:\n\tlr: 1")[0]


def test_places_name_the_file(tmp_path):
    path = tmp_path / "ümläut.yaml"
    path.write_bytes("data:\n  name: 'Ä'\n  alpha: ü\n".encode())
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == f"{path}:3:10: data.alpha: must be a number, not 'ü'"
    path.write_bytes(b"\xef\xbb\xbf" + "data: {name: 日本, root: /d/ß}".encode())
    assert read(path).experiment == {"data": {"name": "日本", "root": "/d/ß"}}


def test_files_that_cannot_be_read(tmp_path):
    def message(path):
        with pytest.raises(InputError) as caught:
            read(path)
        return str(caught.value)

    assert message(tmp_path / "x.yaml") == f"{tmp_path / 'x.yaml'}: No such file or directory"
    assert message(tmp_path) == f"{tmp_path}: Is a directory"
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\ndata: {name: \xe9}")
    assert message(tmp_path / "latin.yaml").startswith(f"{tmp_path / 'latin.yaml'}:2:14: not UTF-8")
    (tmp_path / "wide.yaml").write_text("seed: 1", encoding="utf-16")
    assert "not UTF-8" in message(tmp_path / "wide.yaml")


def test_hostile_files_are_refused_at_once(tmp_path):
    big, bomb = tmp_path / "big.yaml", tmp_path / "bomb.yaml"
    big.write_text("a: b\n" * 2_000_000)
    bomb.write_text("a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghi")))
    start = time.monotonic()
    with pytest.raises(InputError, match=f"big.yaml: larger than {LARGEST:,} bytes"):
        read(big)
    with pytest.raises(InputError, match=r"bomb.yaml:1:4: a: anchors .* are not allowed"):
        read(bomb)
    with pytest.raises(InputError, match="larger than"):
        read(None, "a" * (LARGEST + 1))
    with pytest.raises(InputError, match=r"<text>:1:28892: seed.4998: more than 5,000 values"):
        read(None, f"seed: !grid [{', '.join(map(str, range(100_000)))}]")
    assert time.monotonic() - start < 5  # well under one on an idle machine


def test_five_lines_at_most():
    names = [f"key{i}" for i in range(9)]
    with pytest.raises(InputError) as caught:
        read(None, "\n".join(f"{name}: 1" for name in names))
    assert len(caught.value.messages) == 9
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[-1] == "... and 5 more"
    with pytest.raises(InputError) as caught:
        read(None, "\n".join(f"{name}: 1" for name in names[:5]))
    assert len(str(caught.value).splitlines()) == 5
    assert "more" not in str(caught.value)


def test_words():
    words = {"": None, "~": None, "null": None, "True": True, "no": "no", "010": 10, "1_0": "1_0", "1e3": 1000.0}
    assert {text: scalar(text) for text in words} == words
    assert scalar("2020-01-01") == "2020-01-01"
    assert scalar("-.INF") == float("-inf")


# Overrides -----------------------------------------------------------------------------------------------------------


def test_overrides():
    e = made("local: {lr: 1}", "local.lr=1e-3", "data.name=ü", "evaluate.what=[personal]", "local.schedule.every=3")
    assert (e.local.lr, e.data.name, e.evaluate.what, e.local.schedule.every) == (0.001, "ü", ("personal",), 3)
    assert read(None, "", ["search.samples=3"]).search.samples == 3
    assert read(None, "search: {samples: 2}", ["search.samples=3"]).search.samples == 3
    assert made("rounds: 3", "rounds=4", "rounds=5").rounds == 5
    assert made("data: {root: x}", "data.root=").data.root is None
    assert made("data: {root: x}", "data.root=a=b").data.root == "a=b"


@pytest.mark.parametrize(
    ("text", "override", "chain"),
    [
        ("[fedprox, finetune]", "algorithm.fedprox.mu=0.5", "[{fedprox: {mu: 0.5}}, finetune]"),
        ("[fedprox, finetune]", "algorithm.0.fedprox.mu=0.5", "[{fedprox: {mu: 0.5}}, finetune]"),
        ("fedprox", "algorithm.fedprox.mu=0.5", "[{fedprox: {mu: 0.5}}]"),
        ("{fedprox: {mu: 1}}", "algorithm.fedprox.mu=0.5", "[{fedprox: {mu: 0.5}}]"),
        ("{fedprox: {mu: 1}}", "algorithm.fedprox={mu: 0.5}", "[{fedprox: {mu: 0.5}}]"),
        ("{fedprox: {mu: 1}}", "algorithm.0=fedavg", "[fedavg]"),
        ("[fedprox, finetune]", "algorithm=fedavg", "fedavg"),
        ("[fedprox, finetune]", "algorithm=[fedavg, fedprox]", "[fedavg, fedprox]"),
    ],
)
def test_overrides_in_a_chain(text, override, chain):
    assert made(f"algorithm: {text}", override) == made(f"algorithm: {chain}")


def test_overrides_open_short_forms():
    assert made("model: resnet8", "model.width=8").model == made("model: {name: resnet8, width: 8}").model
    assert made("local: {loss: focal}", "local.loss.focal.gamma=1").local.loss == ("focal", {"gamma": 1.0})
    assert made("", "algorithm.fedprox.mu=0.5").algorithm == (("fedprox", {"mu": 0.5}),)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.lr=abc", "local.lr: must be a number, not 'abc'"),
        ("locl.lr=1", "locl: unknown key 'locl'; did you mean 'local'?"),
        ("local.bach=1", "local.bach: unknown key 'bach'; did you mean 'batch'?"),
        ("local.lr.x=1", "local.lr is 0.5, which has no part 'x'"),
        ("seed.x=1", "seed is !grid [0, 1], which has no part 'x'"),
        ("algorithm.finetune.epochs=1", "algorithm has no 'finetune'; it holds 0: fedprox"),
        ("algorithm.3.x=1", "algorithm has no '3'; it holds 0: fedprox"),
        ("algorithm.fedprox.mo=1", "algorithm.fedprox.mo: unknown key 'mo'; known: mu"),
        ("algorithm=[fedprox, {fedprox: {mo: 1}}]", "algorithm.1.fedprox.mo: unknown key 'mo'; known: mu"),
        ("local={lr: x}", "local.lr: must be a number, not 'x'"),
        ("rounds", "must be dotted.path=value"),
        ("local.=1", "must be dotted.path=value"),
        ("local.lr=[", "no valid YAML"),
        ("seed=!grid []", "!grid takes [a, b, ...]: at least one value"),
        ("seed=!grid [0, x]", "seed: must be a whole number, not 'x' (with seed = 'x')"),
        ("search.metric=acc", "search.metric: there is no metric 'acc'"),
    ],
)
def test_wrong_overrides(override, message):
    (found,) = wrong("algorithm: fedprox\nlocal: {lr: 0.5}\nseed: !grid [0, 1]", override)
    assert found.startswith(f"--set {override}: {message}")


def test_an_override_heals_what_the_file_has_wrong():
    assert made("rounds: x", "rounds=3").rounds == 3
    assert wrong("algorithm: [fedprox, fedprox]", "algorithm.fedprox.mu=1") == [
        "--set algorithm.fedprox.mu=1: algorithm has several 'fedprox'; it holds 0: fedprox, 1: fedprox"
    ]


# Round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data: {name: '1e3', root: 'yes', alpha: 1e-7}\nmodel: {name: resnet8, width: 3}",
        "data: {name: \"a\\n\\u263a\\t'#: \\\\ \\x1b\", root: ' ~'}",
        "data: {name: '08', root: '2020-01-01'}",
        "algorithm: [fedprox, finetune]\nlocal: {loss: focal, schedule: {at: [1, 2]}, weight_decay: 5.0e-4}",
        "local: {loss: balanced_softmax, prior: local, schedule: {every: 2}}\ncluster: {actors: 3, gpu_per_actor: 0.5}",
        f"seed: {2**63 - 1}\nfailures: {{client_timeout_s: 1e300}}",
    ],
)
def test_an_experiment_reads_back(text, tmp_path):
    e = made(text)
    assert made(dump(e)) == e
    assert dump(made(dump(e))) == dump(e)
    (tmp_path / "experiment.yaml").write_text(dump(e), encoding="utf-8")
    assert read_back(tmp_path) == e
    assert Experiment.model_validate(e.model_dump(mode="json")) == e
    assert list(parse(dump(e), lambda line, column: "").value) == list(Experiment.model_fields)


def test_a_sweep_reads_back():
    text = (
        "search: {samples: 3}\nexperiment:\n  algorithm: [{fedprox: {mu: !loguniform [1e-5, 1]}}]\n"
        "  data: {name: !choice ['1e3', no, 'null', ü]}\n  local: !grid [{loss: ce}, {loss: focal}]\n"
        "  rounds: !quniform [10, 30, 10]\n  seed: !randint [0, 5]\n"
    )
    sweep = read(None, text)
    again = read(None, dump_sweep(sweep))
    assert again == sweep
    assert dump_sweep(again) == dump_sweep(sweep)
    assert again.experiment["data"]["name"].values == ("1e3", "no", "null", "ü")


def test_no_aliases_are_written():
    same = [1, 2]
    assert "&" not in emit({"a": same, "b": same})


def test_the_loss_is_built():
    assert type(Local(loss={"focal": {"gamma": 1}}).make_loss()).__name__ == "Focal"


def test_reading_starts_nothing_heavy(tmp_path):
    (tmp_path / "bad.yaml").write_text("rounds: 0\nmodel: x\nsearch: {}\n")
    code = (
        "import sys; from pathlib import Path; from orchestrator.space import trials\n"
        "from orchestrator.sweep_file import read; from orchestrator.yaml_file import InputError\n"
        "trials(read(None, 'search: {samples: 2}\\nexperiment: {seed: !randint [0, 9]}'))\n"
        "try: read(Path(sys.argv[1]))\n"
        "except InputError: pass\n"
        "assert not {'ray', 'mlflow', 'torchvision'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "bad.yaml")], check=True, timeout=60)


def test_python_users_see_the_path_too():
    with pytest.raises(ValidationError, match=r"mu: must be >= 0"):
        Experiment(algorithm={"fedprox": {"mu": -1}})


# Numbers and texts beyond all measure --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds: 9223372036854775808", "1:9: rounds: must be < 9.22337e+18, not 9223372036854775808"),
        ("cluster: {actors: 1000000000000}", "must be <= 10000 or 'auto' or 'per_client', not 1000000000000"),
        ("cluster: {cpu_per_actor: 1.0e-320}", "cluster.cpu_per_actor: must be >= 0.0001, not 1e-320"),
        ("cluster: {gpu_per_actor: 1.0e-320}", "cluster.gpu_per_actor: must be 0 or at least 0.0001, not"),
        ("search: {budget: 1.2.3s}", "search.budget: must be a time such as 90s, 20m, 2h or 1d, not '1.2.3s'"),
    ],
)
def test_what_no_machine_could_count(text, said):
    assert said in wrong(text)[0]


def test_an_error_stays_readable_whatever_it_quotes():
    assert wrong(f"'{'k' * 900}': 1") == ["1:1: a key of more than 200 characters"]
    assert len(wrong(f"model: {'k' * 500_000}")[0]) <= WIDEST
    assert "more than 30 keys" in wrong("", ".".join("a" * 5000) + "=1")[0]
    assert f"has no '{'9' * 100}" in wrong("algorithm: fedavg", f"algorithm.{'9' * 5000}=1")[0]
