"""Work that runs have in common is done once, and nobody can tell from the result."""

import subprocess
import sys
import typing

import pytest
from conftest import digits, driver, finish, tiny
from test_every_algorithm import QUICK

import algorithms
from orchestrator.checkpoint import RunDirectory, fingerprint
from orchestrator.driver import Driver
from orchestrator.prefixes import ENGINE, Cache, prefixes


def keys(experiment):
    return [p.key for p in prefixes(experiment, digits().digest)]


def train(experiment, folder, cache, name):
    """Run an experiment as a trial does: take over what is there, leave what others may need."""
    path = folder / name
    wanted = prefixes(experiment, digits().digest)
    reused = cache.adopt(path, wanted)
    run = driver(experiment, path)
    trained = 0
    while not run.done:
        run.advance()
        trained += 1
        for prefix in wanted:
            if prefix.turn == run.round:
                cache.publish(run.directory, prefix, name, run.asked_progress)
    return run, trained, reused


def chain(**changes):
    ecl = {"epochs": 1} | changes.pop("ecl", {})
    return tiny(algorithm=["fedavg", {"ecl": ecl}], failures={"checkpoint_s": 0}, **changes)


def test_a_reused_prefix_gives_the_fingerprint_of_training_it(tmp_path):
    cache = Cache(tmp_path / "cache")
    train(chain(), tmp_path, cache, "first")
    for name, changes, trained in [
        ("lambda", {"expert_logit_weight": 0.9, "scaling": "none"}, 0),
        ("experts", {"num_experts": 3}, 1),
    ]:
        run, rounds, reused = train(chain(ecl=changes), tmp_path, cache, name)
        alone = finish(driver(chain(ecl=changes)))
        assert run.fingerprint() == alone.fingerprint()
        assert rounds == trained
        assert reused
        assert [line["round"] for line in run.directory.lines()] == [1, 2, 3]
        assert [line.get("reused") for line in run.directory.lines()] == ["first"] * (3 - trained) + [None] * trained
        # What is there now can be resumed like any other run.
        assert driver(chain(ecl=changes), tmp_path / name).fingerprint() == alone.fingerprint()


def test_scores_that_do_not_depend_on_the_difference_are_not_computed_again(tmp_path):
    cache = Cache(tmp_path / "cache")
    train(chain(), tmp_path, cache, "first")
    _, rounds, _ = train(chain(), tmp_path, cache, "same")
    assert rounds == 0
    times = [[line["time"] for line in RunDirectory(tmp_path / name).lines()] for name in ("first", "same")]
    assert times[0] == times[1]


def test_settings_that_only_predict_otherwise_are_scored_in_one_go(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    settings = [chain(ecl={"expert_logit_weight": w, "mask_unowned": m}) for w, m in ((0.5, True), (0.9, False))]
    here, there = (prefixes(e, digits().digest)[-1] for e in settings)
    assert here.key == there.key
    also = {there.scored_by: settings[1].chain().parts[-1]}
    run = finish(driver(settings[0], tmp_path / "first", also=also))
    assert run.fingerprint() == finish(driver(settings[0])).fingerprint(), "its own scores are what they were"
    cache.publish(run.directory, here, "first", run.asked_progress, run.scored_too)

    alone = finish(driver(settings[1], tmp_path / "alone"))
    assert cache.adopt(tmp_path / "second", [there])
    monkeypatch.setattr(Driver, "evaluate", None)  # nothing is left to score
    second = driver(settings[1], tmp_path / "second")
    assert second.done
    assert second.fingerprint() == alone.fingerprint()
    for name in ("per_class", "per_client"):
        table = f"artifacts/2-ecl.specialise/{name}.csv"
        assert (tmp_path / "second" / table).read_text() == (tmp_path / "alone" / table).read_text()
        assert (tmp_path / "second" / table).read_text() != (tmp_path / "first" / table).read_text()


def test_more_rounds_go_on_from_fewer(tmp_path):
    cache = Cache(tmp_path / "cache")
    short, long = (chain(rounds=n, evaluate={"every": 2}) for n in (3, 5))
    train(short, tmp_path, cache, "short")
    run, rounds, _ = train(long, tmp_path, cache, "long")
    assert rounds == 3  # two of FedAvg, one of ECL
    assert run.fingerprint() == finish(driver(long)).fingerprint()
    fewer, rounds, _ = train(chain(rounds=2), tmp_path, cache, "fewer")
    assert rounds == 3, "a longer run is no beginning of a shorter one"
    assert fewer.fingerprint() == finish(driver(chain(rounds=2))).fingerprint()


def test_what_goes_by_the_share_of_rounds_is_not_extended(tmp_path):
    cache = Cache(tmp_path / "cache")
    ldae = {"algorithm": {"ldae": {"num_experts": 2, "specialise_from": 0.5}}, "failures": {"checkpoint_s": 0}}
    prior = {"local": {"lr": 0.05, "batch": 16, "loss": "balanced_softmax", "prior": "gpi"}}
    _, rounds, _ = train(tiny(rounds=2, **ldae, **prior), tmp_path, cache, "short")
    assert rounds == 3
    run, rounds, reused = train(tiny(rounds=4, **ldae, **prior), tmp_path, cache, "long")
    assert rounds == 4, "only the proxy round is shared"
    assert reused
    assert run.fingerprint() == finish(driver(tiny(rounds=4, **ldae, **prior))).fingerprint()


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"ecl": {"norm_power": 1}}, 2),
        ({"ecl": {"epochs": 2}}, 1),
        ({"seed": 1}, 0),
        ({"local": {"lr": 0.06, "batch": 16}}, 0),
        ({"data": {"name": "digits", "clients": 6, "alpha": 0.4, "imbalance": 10}}, 0),
        ({"clients_per_round": 4}, 0),
        ({"evaluate": {"every": 1}}, 0),
        ({"cluster": {"threads": 2}}, 0),
        ({"cluster": {"actors": 2}}, 2),
    ],
)
def test_keys_tell_apart_what_differs(changes, shared):
    one, other = keys(chain()), keys(chain(**changes))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * shared + [False] * (2 - shared)


def test_a_method_alone_shares_with_chains_that_begin_with_it():
    alone = keys(tiny(algorithm="fedavg"))
    assert keys(tiny(algorithm=["fedavg", "finetune"]))[0] == alone[0]
    assert keys(tiny(algorithm=["fedavg", "finetune", "tau_norm"]))[0] == alone[0]
    assert keys(tiny(algorithm=["fedavg", "ldae"]))[0] != alone[0], "its network has three experts"


def test_keys_know_data_versions_and_code(monkeypatch):
    one = prefixes(chain(), "a")[0].key
    assert prefixes(chain(), "b")[0].key != one
    assert prefixes(chain(), "a", device="cuda")[0].key != one
    monkeypatch.setattr("orchestrator.prefixes.code", lambda kinds: "other")
    assert prefixes(chain(), "a")[0].key != one


#: Modules that read, write and arrange: what they hand over is in the key already.
ARRANGING = {"checkpoint", "expressions", "fields", "schedulers", "space", "table_file", "yaml_file"}


def test_every_module_that_computes_is_in_the_key():
    ask = "import sys, orchestrator.driver; print(*(m for m in sys.modules if m.startswith('orchestrator.')))"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    modules = {name.split(".")[1] for name in found}
    assert modules - ARRANGING - {"models", "data"} == set(ENGINE)  # of these two packages every file is in it


def test_a_damaged_prefix_is_not_used(tmp_path):
    cache = Cache(tmp_path / "cache")
    train(chain(), tmp_path, cache, "first")
    for file in (tmp_path / "cache").glob("*/*/checkpoint/run-*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink()
        file.write_bytes(content)
    run, rounds, reused = train(chain(), tmp_path, cache, "second")
    assert not reused
    assert rounds == 3
    assert run.fingerprint() == finish(driver(chain())).fingerprint()


def test_a_lease_is_had_by_one(tmp_path):
    cache = Cache(tmp_path)
    (first, *_) = prefixes(chain(), "a")
    lease = cache.lease(first)
    assert lease is not None
    assert Cache(tmp_path).lease(first) is None
    lease.release()
    assert Cache(tmp_path).lease(first) is not None


def test_the_cache_stays_small(tmp_path):
    cache = Cache(tmp_path / "cache")
    for seed in range(3):
        train(tiny(seed=seed), tmp_path, cache, str(seed))
    sizes = [f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    cache.prune(most=sum(sizes) // 2)
    held = [cache.holds(prefixes(tiny(seed=seed), digits().digest)[0]) for seed in range(3)]
    assert held == [False, False, True]


NAMES = [name for name in algorithms.names() if algorithms.find(name).later]
#: values to change to where the rule of `another` gives none
OTHER = {"finetune_lr": 0.5, "smoothing": "all"}


def another(kind, name):
    """Return a value of a hyperparameter that is not its default."""
    default, hint = kind.__dataclass_fields__[name].default, typing.get_type_hints(kind)[name]
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != default)
    return type(default)(default / 2) if default else 1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_declared_to_matter_late_does_not_matter_before(name):
    kind, quick = algorithms.find(name), QUICK.get(name, {})
    plain = driver(tiny(algorithm={name: quick}))
    begins = {turn.phase.step.__name__: i for i, turn in reversed([*enumerate(plain.plan)])}
    for phase, fields in kind.later.items():
        for field in fields.split():
            runs = [driver(tiny(algorithm={name: quick | changed})) for changed in ({}, {field: another(kind, field)})]
            for run in runs:
                for _ in range(len(run.plan) if phase == "predict" else begins[phase]):
                    run.advance()
            states = [fingerprint(run.server.fields(), run.memory) for run in runs]
            assert states[0] == states[1], field
            if phase != "predict":
                assert runs[0].fingerprint() == runs[1].fingerprint(), field
