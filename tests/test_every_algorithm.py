"""What holds for every file in algorithms/, those of today and those of tomorrow."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from conftest import digits, driver, finish, tiny

import algorithms
from algorithms.params import Params
from orchestrator.actors import Pool
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.worker import Worker

ROOT = Path(algorithms.__file__).parent
NAMES = [name for name in algorithms.names() if name != "gpi"]  # a prior, tested with the losses that use it
EXPERTS = [name for name in NAMES if algorithms.find(name)().experts]  # for which only some networks will do
NETWORKS = ["cnn_small", {"name": "resnet8", "width": 4}]

#: What makes a method's run short; everything else is at its default.
QUICK = {
    "climb": {"primal_rounds": 1},
    "creff": {"head_epochs": 2, "match_steps": 3, "features_per_class": 5, "grad_repeats": 1},
    "crt": {"rounds": 2},
    "ecl": {"epochs": 2},
    "fedafa": {"epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "fedetf": {"alternations": 2},
    "fedloge": {"ssec_steps": 50, "finetune_epochs": 1},
    "fedrep": {"head_epochs": 2, "final_epochs": 1},
    "finetune": {"epochs": 1},
    "mislas": {"epochs": 1},
    "mupfl": {"classifier_epochs": 2, "match_steps": 3, "features_per_class": 5, "grad_repeats": 1},
}


#: The one network of the two with which a method can do.
ONLY = {"fedalign": NETWORKS[1]}


def experiment(name, **changes):
    changes["model"] = ONLY.get(name) or changes.get("model", "cnn_small")
    return tiny(algorithm={name: QUICK.get(name, {})}, **changes)


def values(run):
    """Yield every number that the run has computed."""
    yield from (v for line in run.history for v in line["metrics"].values())

    def walk(value):
        if isinstance(value, Params):
            yield from (value.flat, value.buffers)
        elif isinstance(value, dict):
            for v in value.values():
                yield from walk(v)
        elif isinstance(value, list | tuple):
            for v in value:
                yield from walk(v)
        elif isinstance(value, torch.Tensor):
            yield value

    yield from walk(run.server.fields())
    yield from walk(run.memory)


def assert_finite(run):
    for value in values(run):
        tensor = torch.as_tensor(value, dtype=torch.float64)
        assert not torch.isnan(tensor).any()


@pytest.mark.parametrize("name", NAMES)
def test_runs_to_the_end_and_scores(name):
    run = finish(driver(experiment(name)))
    assert_finite(run)
    last = run.history[-1]["metrics"]
    assert {"personal/acc_dist", "personal/acc_owned", "personal/acc_owned_masked", "personal/acc_worst10"} <= set(last)
    assert all(0 <= v <= 1 for k, v in last.items() if "/acc" in k)
    assert len({k for line in run.history for k in line["metrics"]}) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    changes = {"failures": {"checkpoint_s": 0}}
    whole = finish(driver(experiment(name, **changes), tmp_path / "whole"))
    for stop in range(1, len(whole.plan)):
        broken = driver(experiment(name, **changes), tmp_path / str(stop))
        for _ in range(stop):
            broken.advance()
        # Nothing of the first process is used by the second but its directory.
        again = finish(driver(experiment(name, **changes), tmp_path / str(stop)))
        assert again.fingerprint() == whole.fingerprint()
        assert [line["round"] for line in again.directory.lines()] == list(range(1, len(whole.plan) + 1))


def test_what_clients_remember_ends_with_their_algorithm(tmp_path):
    """Two algorithms that remember, one after another: a resumed run has nothing left of the first one's memory."""
    chain = {"algorithm": [{"mupfl": QUICK["mupfl"]}, "local"], "failures": {"checkpoint_s": 0}}
    whole = finish(driver(tiny(**chain), tmp_path / "whole"))
    for stop in range(1, len(whole.plan)):
        broken = driver(tiny(**chain), tmp_path / str(stop))
        for _ in range(stop):
            broken.advance()
        assert finish(driver(tiny(**chain), tmp_path / str(stop))).fingerprint() == whole.fingerprint()
    again = driver(tiny(**chain), tmp_path / "whole")
    assert {frozenset(memory) for memory in again.memory.values()} == {frozenset({"w"})}


@pytest.fixture(scope="module")
def pools(ray_cluster):
    """Pools of one, two and three actors, which serve one algorithm after another."""
    made = [Pool(actors, cpu=0.5, gpu=0.0) for actors in (1, 2, 3)]
    yield made, ray.put(digits())
    for pool in made:
        pool.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_one_two_three_actors_and_without_ray(name, pools):
    chosen = experiment(name)
    expected = finish(driver(chosen)).fingerprint()
    parts = split_for(chosen, digits())
    made, dataset = pools
    for pool in made:
        pool.load(chosen, dataset, parts)
        assert finish(Driver(chosen, digits(), parts, pool)).fingerprint() == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("network", NETWORKS, ids=["no batch norm", "batch norm"])
def test_degenerate_clients_neither_fail_nor_spoil(name, network):
    """One client has one sample, one has one class, one has a single sample of each class, one is never drawn."""
    if name in EXPERTS and network != "cnn_small":
        network = {"name": "resnet32", "width": 4}
    dataset = digits()
    rows = [np.flatnonzero(dataset.y_train == c) for c in range(10)]
    train = (rows[3][:1], rows[5][:20], np.array([r[1] for r in rows]), np.concatenate([r[30:40] for r in rows]))
    counts = np.stack([np.bincount(dataset.y_train[t], minlength=10) for t in train])
    tests = tuple(np.flatnonzero(dataset.y_test == c)[:5] for c in (3, 5, 0, 1))
    parts = Split(train=train, validation=tuple(t[:0] for t in train), test=tests, counts=counts)
    data = {"name": "digits", "clients": 4}
    chosen = experiment(name, data=data, clients_per_round=3, rounds=2, model=network)
    run = finish(Driver(chosen, dataset, parts, InProcess(Worker(chosen, dataset, parts))))
    assert_finite(run)
    assert not math.isnan(run.history[-1]["metrics"]["personal/acc_owned"])


@pytest.mark.parametrize("name", NAMES)
def test_remembers_nothing_outside_its_states(name):
    """The same algorithm object serves two runs and gives the same result in both."""
    chosen = experiment(name)
    dataset, parts = digits(), split_for(chosen, digits())
    worker = Worker(chosen, dataset, parts)
    runs = [Driver(chosen, dataset, parts, InProcess(worker)) for _ in range(2)]
    for run in runs:
        run.parts = worker.parts
        finish(run)
    assert runs[0].fingerprint() == runs[1].fingerprint()


@pytest.mark.parametrize("name", algorithms.names())
def test_fits_the_house(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    kind = algorithms.find(name)
    assert kind.__dataclass_params__.frozen
    assert ast.get_docstring(ast.parse(source)), "the docstring names method, authors and venue"
    (own,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    for field in own.body:
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            text = "\n".join(source.splitlines()[field.lineno - 2 : field.end_lineno])
            assert "#:" in text, f"{name}.{ast.unparse(field.target)} has no #: comment"
