"""Whatever is fed to the reader ends in a sweep or in words: random bytes, random trees, spoilt files, overrides."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import algorithms
import search_spaces
from algorithms.losses import LOSSES
from algorithms.priors import PRIORS
from orchestrator import tune
from orchestrator.data import DataError
from orchestrator.data.sources import SOURCES
from orchestrator.experiment import Experiment
from orchestrator.models import MODELS
from orchestrator.schedulers import SCHEDULERS
from orchestrator.space import trials
from orchestrator.sweep_file import Search, read
from orchestrator.yaml_file import KINDS, InputError, Open, emit, parse

SECONDS = 20  #: for one case, on a machine that does other things too
MEMORY = 4 << 30  #: bytes that all cases together may add
FILES = Path(search_spaces.__file__).parent
# Data that is not here would be fetched, and large networks take seconds to build: the files are read as if they were
# about digits and a small one.
SMALL = {"|".join(sorted(SOURCES, reverse=True)): "digits", r"\b(?:resne|mobilene|cnn_)\w+": "cnn_small"}


def _made_small(text):
    for large, small in SMALL.items():
        text = re.sub(large, small, text)
    return text


VALID = {
    path: _made_small(path.read_text(encoding="utf-8"))
    for path in sorted(FILES.rglob("*.yaml"))
    if path.name != "published.yaml"
}

#: every key there is, with a value that fits
FULL = """\
search: {metric: personal/acc_dist, mode: max, samples: 2, searcher: random, scheduler: {asha: {grace: 2}}, budget: 2h}
experiment:
  data: {name: digits, root: ., clients: 6, partition: per_class, alpha: 0.5, imbalance: 5, validation: 0.1}
  model: {name: resnet8, width: 4}
  algorithm: [{fedprox: {mu: !choice [0.1, 1.0]}}, {finetune: {epochs: 2, lr: 0.1}}]
  local: {lr: !uniform [0.1, 0.2], momentum: 0.5, batch: 8, epochs: 1, loss: {focal: {gamma: 1}}, prior: none}
  rounds: 4
  clients_per_round: 3
  seed: !grid [0, 1]
  evaluate: {every: 2, what: [generic, personal]}
  failures: {retries: 1, client_timeout_s: 5, bad_update: skip, checkpoint_s: 1}
  cluster: {actors: 2, gpu_per_actor: 0, cpu_per_actor: 1, threads: 1, driver_gpu: 0}
cases:
  - {}
  - {algorithm: [fedavg, ecl], local: {schedule: {at: [2], factor: 0.5}, loss: balanced_softmax, prior: local}}
  - {algorithm: [{ldae: {num_experts: 2}}], model: cnn_small, local: {schedule: {every: 2}}}
"""

# What is fed ---------------------------------------------------------------------------------------------------------

_PARTS = {name: list(getattr(f.annotation, "model_fields", ())) for name, f in Experiment.model_fields.items()}
_BESIDE = ["search", "experiment", "cases", "presets", "table"]
_KEYS = [
    *_BESIDE,
    *_PARTS,
    *(key for keys in _PARTS.values() for key in keys),
    *Search.model_fields,
    "published",
    "rows",
    "columns",
    "at",
]
_NAMES = [*algorithms.names(), *LOSSES, *PRIORS, *MODELS, *SCHEDULERS, "digits", "optuna", "grid", "per_client", "auto"]
_ODD = [
    "", "~", "null", "true", "No", "0", "-1", "1", "2", "0.5", "-0.0", "1e-3", "1e-320", "1e308", "-1e308", "1e999",
    ".inf", "-.inf", ".nan", "9223372036854775808", "1000000000000", "9" * 99, "9" * 5000, "0x10", "1_000", "12:30",
    "2026-01-02", "<<", "=", "*a", "&a 1", "!!python/object:os.system 1", "!!binary aGk=", "!<tag:x> 1", '"\\0"',
    '"\\uFEFF"', '"\\u2028"', "'~nobody'", "'../..'", "/", "é", "日本", "🙂", '"' + "x" * 300 + '"', "90s", "'1.2.3s'",
    "!sample local.lr", "!sample local.lr * data.clients", "!sample '1 / 0'", "!sample 'round(5, -10 ** 12)'",
    "!sample '9 ** 9 ** 9'", "!sample '('", "!sample [1]", "!grid", "!grid []", "!randint [0, 1000000000]",
    "!randint [0, 9223372036854775809]", "!quniform [0, 1, 1e-320]", "!quniform [0, 1, 1e-9]", "!uniform [1, 2]",
    "!uniform [-1e308, 1e308]", "!loguniform [1e-320, 1e308]", "!grid [" + ", ".join(map(str, range(101))) + "]",
    "!grid [fedavg, [fedavg, ecl], {fedprox: {mu: 0.1}}]", "!choice [ce, balanced_softmax, {focal: {gamma: 1}}]",
]  # fmt: skip
_scalars = st.one_of(
    st.sampled_from(_ODD),
    st.sampled_from(_NAMES),
    st.integers(-(10**20), 10**20).map(str),
    st.integers(0, 20).map(str),
    st.floats().map(str),
    st.text(max_size=8).map(json.dumps),
)


def _mapping(keys, values):
    return st.lists(st.tuples(keys, values), max_size=4).map(
        lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
    )


def _around(inner):
    lists = st.lists(inner, max_size=4).map(lambda entries: "[" + ", ".join(entries) + "]")
    tags = st.sampled_from([f"!{kind} " for kind in KINDS] + ["!grid ", "!choice ", "!gird ", "&a ", "! "])
    return st.one_of(
        lists, _mapping(st.sampled_from([*_KEYS, *_NAMES, *_ODD]), inner), st.tuples(tags, lists).map("".join)
    )


_nodes = st.recursive(_scalars, _around, max_leaves=8)
_chains = st.one_of(
    _nodes,
    st.lists(_mapping(st.sampled_from(algorithms.names()), _nodes), min_size=1, max_size=3).map(
        lambda e: f"[{', '.join(e)}]"
    ),
)


def _known(part):
    fields = Search.model_fields if part == "search" else _PARTS.get(part, ())
    if part == "algorithm":
        return _chains
    return st.one_of(_nodes, _mapping(st.sampled_from(list(fields)), _nodes)) if fields else _nodes


def _parts(names):
    return st.lists(st.sampled_from(names), max_size=5).flatmap(
        lambda chosen: st.tuples(*(_known(name).map(f"{name}: {{}}".format) for name in chosen)).map(
            lambda lines: "{" + ", ".join(lines) + "}"
        )
    )


_experiments = _parts(list(_PARTS))
_sweeps = st.builds(
    "search: {}\nexperiment: {}\ncases: {}\n".format,
    _known("search"),
    _experiments,
    st.one_of(st.just(""), _nodes, st.lists(_experiments, min_size=1, max_size=3).map(lambda e: f"[{', '.join(e)}]")),
)
_deep = st.integers(1, 3000).map(lambda n: "data: " + "[" * n + "{a: " * (n % 50))
_trees = st.one_of(_nodes, _experiments, _sweeps, _parts([*_BESIDE, *_PARTS]), _deep).map(str.encode)


@st.composite
def _spoilt_trees(draw, text):
    """Delete, double, move or replace a value of a valid file."""
    tree, words = parse(text, lambda line, column: "").value, list[str]()
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        here, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["delete", "double", "move", "wrap", *["replace", "word"] * 3]))
        if change == "delete":
            del here[key]
        elif change == "double":
            here[key] = [here[key], here[key]]
        elif change == "word":
            here[key] = f"WORD{len(words)}"
            words.append(draw(_nodes))
        elif change == "wrap":
            here[key] = {draw(st.sampled_from(_KEYS)): here[key]}
        elif change == "move":
            other, at = draw(st.sampled_from(places))
            here[key] = parse(emit(other[at]), lambda line, column: "").value if at in _indices(other) else None
        else:
            here[key] = draw(
                st.one_of(
                    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(_NAMES),
                    st.just([]), st.just({}), st.just(10**12), st.just(10**18), st.just(Open("grid", tuple(range(50)))),
                    st.just(Open("randint", (0, 10**9))), st.just(Open("sample", ("rounds / 2",))),
                )
            )  # fmt: skip
        if not tree:
            break
    text = emit(tree)
    for i, word in enumerate(words):
        text = text.replace(f"WORD{i}", word)
    return text.encode()


def _indices(node):
    return node if isinstance(node, dict) else range(len(node))


def _places(node):
    """Yield every list or mapping together with each of its keys."""
    if isinstance(node, dict | list):
        for key in list(_indices(node)):
            yield node, key
            yield from _places(node[key])


@st.composite
def _spoilt_bytes(draw, text):
    """Truncate a valid file, flip its bytes, or delete, double and swap its lines."""
    content, lines = bytearray(text.encode()), text.splitlines()
    kind = draw(st.sampled_from(["truncate", "flip", "insert", "lines"]))
    at = draw(st.integers(0, len(content) - 1))
    if kind == "truncate":
        return bytes(content[:at])
    if kind == "flip":
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(content)
    if kind == "insert":
        return bytes(content[:at]) + draw(_nodes).encode() + bytes(content[at:])
    first, second = (draw(st.integers(0, len(lines) - 1)) for _ in "ab")
    lines[first : first + draw(st.integers(0, 1))] = [lines[second]] * draw(st.integers(0, 2))
    return "\n".join(lines).encode()


_files = st.sampled_from(list(VALID)).flatmap(
    lambda path: st.tuples(st.just(path), st.one_of(_spoilt_trees(VALID[path]), _spoilt_bytes(VALID[path])))
)
_paths = st.lists(
    st.one_of(
        st.sampled_from([*_KEYS, *algorithms.names(), "mu", "0", "1", "7", "-1", "9" * 5000]), st.text(max_size=3)
    ),
    min_size=1,
    max_size=4,
).map(".".join)
_overrides = st.lists(
    st.one_of(st.builds("{}={}".format, _paths, _nodes), st.text(max_size=12)), min_size=1, max_size=3
)

#: what is fed -> (the valid file it is made of, if any; the content; --set; --preset)
FEEDS = {
    "bytes": st.tuples(st.none(), st.binary(max_size=200), st.just([]), st.none()),
    "trees": st.tuples(st.none(), st.one_of(_trees, _spoilt_trees(FULL)), st.just([]), st.none()),
    "files": st.tuples(_files, st.just([]), st.sampled_from([None, None, "smoke"])).map(lambda f: (*f[0], *f[1:])),
    "overrides": st.tuples(st.sampled_from(list(VALID)), _overrides, st.sampled_from([None, "smoke"])).map(
        lambda f: (f[0], VALID[f[0]].encode(), *f[1:])
    ),
}

# What must come out --------------------------------------------------------------------------------------------------

_PLACE = re.compile(
    r"fuzz\.yaml|published\.yaml|--set |--preset |^(error: )?(search|data|model|cluster|rounds|local)\b", re.M
)


@contextmanager
def bounded():
    """End what takes too long or too much memory, and leave the process as it was."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def late(signum, frame):
        raise TimeoutError(f"not done in {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for each, handler in handlers.items():
            signal.signal(each, handler)


def ray_runs():
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def in_words(text):
    """Check that an error can be read: a few printable lines that say where."""
    lines = text.strip().split("\n")
    assert 0 < len(lines) <= 5, text
    assert all(line.strip() and line.isprintable() and len(line) < 2500 for line in lines), text
    assert _PLACE.search(text), text
    assert "Traceback" not in text


def feed(folder, content, overrides, preset):
    """Read it as the command does, and for what is good enough let the command itself check it."""
    file = folder / "fuzz.yaml"
    file.write_bytes(content)
    signal.alarm(SECONDS)
    try:
        try:
            sweep = read(file, None, overrides, preset)
            found = trials(sweep)
        except (InputError, DataError) as error:
            in_words(str(error))
            return "refused"
        if len(found) > 12 or {trial.experiment.data.name for trial in found} & SOURCES.keys():
            return "read"
        options = [f"--set={each}" for each in overrides] + ([f"--preset={preset}"] if preset else [])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = tune.main([str(file), *options, "--dry-run", "--out", str(folder / "out"), "--num-cpus", "4"])
    finally:
        signal.alarm(0)
    assert code in (0, 2)
    if code == 2:
        in_words(err.getvalue())
        return "impossible"
    assert "nothing was started" in out.getvalue()
    assert not (folder / "out").exists()
    return "possible"


def fuzz(folder, cases, **how):
    """Feed many cases; return how often each outcome was seen."""
    shutil.copy(FILES / "tables" / "published.yaml", folder)
    seen = dict.fromkeys(("refused", "read", "impossible", "possible"), 0)
    before = ray_runs()

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True, **how)
    @given(cases)
    def each(case):
        seen[feed(folder, *case[1:])] += 1

    if "derandomize" not in how:
        number = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
        print(f"to repeat: FUZZ_SEED={number}")
        each = seeded(number)(each)
    start = time.monotonic()
    with bounded():
        each()
    print(f"{sum(seen.values())} cases in {time.monotonic() - start:.0f} s: {seen}")
    assert ray_runs() == before
    return seen


@pytest.mark.parametrize("kind", FEEDS)
def test_any_input_ends_in_a_sweep_or_in_words(kind, tmp_path):
    seen = fuzz(tmp_path, FEEDS[kind], max_examples=80, derandomize=True, phases=[Phase.generate])
    assert seen["refused"] >= 10
    assert kind == "bytes" or sum(seen.values()) > seen["refused"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "cases"), [("bytes", 2000), ("trees", 8000), ("files", 4000), ("overrides", 3000)])
def test_ten_thousand_inputs_end_in_a_sweep_or_in_words(kind, cases, tmp_path):
    seen = fuzz(tmp_path, FEEDS[kind], max_examples=cases)
    assert sum(seen.values()) >= cases
