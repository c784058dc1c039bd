"""What a client actor is said to need: by hand, and for every sweep file without its data."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from rich.console import Console
from torch import nn

import search_spaces
from orchestrator import tune
from orchestrator.data import DATASETS, SOURCES, Absent, load, outline
from orchestrator.memory import (
    COPIES,
    FLOAT,
    LIBRARIES,
    kept_for_backward,
    of_actor,
    passed_forward,
    shared_while_scoring,
)
from orchestrator.models import build
from orchestrator.preflight import GPU_MEMORY, Checked, crowd, shares, warn
from orchestrator.resources import Share
from orchestrator.space import trials
from orchestrator.sweep_file import read
from orchestrator.worker import network

FOLDER = Path(search_spaces.__file__).parent
FILES = sorted({*FOLDER.glob("*.yaml"), *FOLDER.glob("tables/*.yaml")} - {FOLDER / "tables" / "published.yaml"})


def test_what_a_forward_pass_keeps_by_hand():
    images = 2 * 8 * 8
    maps = 2 * 16 * 8 * 8 + 2 * 32 * 8 * 8  # of the two convolutions
    pooled = 2 * 32 * 4 * 4
    floats, places = images + maps + pooled + 2 * 64, pooled  # where the largest of each four was, in 8 bytes
    assert kept_for_backward(build("cnn_small", (1, 8, 8), 10), (1, 8, 8), 2) == 4 * floats + 8 * places


def test_it_grows_with_the_batch_and_leaves_the_network_alone():
    net = build("resnet8", (3, 32, 32), 10, width=4)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    small, large = (kept_for_backward(net, (3, 32, 32), batch) for batch in (8, 16))
    assert small < large <= 2 * small, "all but the statistics of batch norm"
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert not any(p.is_meta for p in net.parameters())


def test_one_storage_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            x = x * x  # keeps x twice; the input itself needs no gradient
            return x.exp().sum()

    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.twice = nn.Parameter(torch.ones(3)), Twice()

        def forward(self, x):
            return self.twice(x * self.w)

    # x, the product (once though squared), and its exponential; not the parameter
    assert kept_for_backward(Learnt(), (3,), 5) == 3 * 5 * 3 * FLOAT


def test_what_a_forward_pass_holds_at_one_time_by_hand():
    net = build("cnn_small", (1, 8, 8), 10)
    largest = 2 * 32 * 8 * 8  # the map of the second convolution, which its ReLU takes and gives
    assert passed_forward(net, (1, 8, 8), 2) == FLOAT * (2 * largest + largest)
    assert passed_forward(net, (1, 8, 8), 4) == 2 * passed_forward(net, (1, 8, 8), 2)
    assert not any(p.is_meta for p in net.parameters())


def test_an_actor_by_hand():
    data = load("digits")
    plain = tiny(local={"momentum": 0.0, "batch": 4})
    net = network(plain, data)
    weights = FLOAT * sum(p.numel() for p in net.parameters())
    scored = passed_forward(net, data.shape, 256) + 6 * 256 * FLOAT * (32 * 4 * 4 + 64 + 10)
    assert shared_while_scoring(net, data.shape, 256, 6) == scored - passed_forward(net, data.shape, 256)
    base = LIBRARIES + max(2 * kept_for_backward(net, data.shape, 4), scored)
    assert of_actor(plain, net, data, gpu=False) == base + COPIES * weights
    assert of_actor(plain, net, data, gpu=True) == base + COPIES * weights + data.x_train.nbytes + data.x_test.nbytes
    own = tiny(algorithm="ditto", local={"momentum": 0.9, "batch": 4})
    assert of_actor(own, net, data, gpu=False) == base + (COPIES + 2) * weights, "velocity, and a model of one's own"


def test_estimates_of_different_methods_are_not_mixed_up():
    both, plain = Checked(), tiny(local={"batch": 4})
    own = tiny(algorithm="ditto", local={"batch": 4})
    for e in (plain, own):
        both.check(SimpleNamespace(id="0000", experiment=e))
        assert both.memory(e, gpu=False) == of_actor(e, network(e, load("digits")), load("digits"), gpu=False)
    assert both.memory(own, gpu=False) > both.memory(plain, gpu=False)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_the_outline_of_a_data_set_is_that_of_its_images(name):
    planned, source = outline(name), SOURCES[name]
    assert planned.shape == source.shape
    if not source.in_files:
        assert (len(planned.x_train), len(planned.x_test)) == source.sizes
    try:
        there = load(name, download=False)
    except Absent:
        return
    assert (there.x_train.nbytes, there.x_test.nbytes) == (planned.x_train.nbytes, planned.x_test.nbytes)  # in memory
    assert (there.shape, there.classes, there.segmented) == (planned.shape, planned.classes, planned.segmented)
    assert (there.mean, there.std, there.augment) == (planned.mean, planned.std, planned.augment)


def nowhere(monkeypatch, folder):
    """Let no data set be found."""
    for variable in ("ORCHESTRATOR_DATA", "TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr("orchestrator.data.sources.DEBIAN", folder)


def test_a_dry_run_tells_what_is_missing_and_a_real_one_refuses(monkeypatch, tmp_path, capsys):
    nowhere(monkeypatch, tmp_path)
    file = tmp_path / "streets.yaml"
    file.write_text(
        "data: {name: cityscapes, clients: 19}\nalgorithm: fedavg\nlocal: {batch: 8}\nclients_per_round: 4\n"
    )
    words = [str(file), "--out", str(tmp_path / "out"), "--num-cpus", "8", "--num-gpus", "2"]
    assert tune.main([*words, "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "# asks for 4 client actor(s) with 1 CPU, 0.5 GPU and about 1.3 GiB of memory each" in out
    assert "not here yet: cityscapes: its files were not found." in out
    assert (
        "1 trial(s), 1 at a time on this machine, with about 2.7 GiB of memory on each GPU (of 16 GiB, as none" in out
    )
    assert "of cityscapes-dataset.com" in out
    assert tune.main(words) == 2
    assert "cityscapes: its files were not found" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("clients: 2976", "2975 images cannot be divided among 2976 clients: use 1 to 2975 clients"),
        ("clients: 4, classes_per_client: 20", "classes_per_client must be 1 to 19, the classes of cityscapes, not 20"),
    ],
)
def test_a_dry_run_refuses_what_no_copy_of_the_data_could_mend(monkeypatch, tmp_path, capsys, part, said):
    nowhere(monkeypatch, tmp_path)
    file = tmp_path / "streets.yaml"
    file.write_text(f"data: {{name: cityscapes, {part}}}\nclients_per_round: 1\n")
    assert tune.main([str(file), "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def planned(*shares):
    """Return trials whose actors need 1, 2, 3, ... GiB each, and what they would get."""
    found = [SimpleNamespace(id=str(i), experiment=i + 1) for i in range(len(shares))]
    sizes = SimpleNamespace(memory=lambda e, gpu: e * 2**30)
    return found, {str(i): Share(actors, 1.0, gpu, 0.0, "here") for i, (actors, gpu) in enumerate(shares)}, sizes


def test_the_memory_of_all_that_run_at_a_time():
    found, got, sizes = planned((4, 0.0), (2, 0.0), (1, 0.0))
    assert crowd(found, got, 2, sizes) == ((4 * 1 + 2 * 2) * 2**30, False)
    found, got, sizes = planned((4, 0.25), (2, 0.5), (1, 2.0))
    assert crowd(found, got, 1, sizes) == (4 * 2**30, True), "4 x 1 and 2 x 2 on one GPU, and 3 on two"
    assert crowd(found, got, 4, sizes) == (4 * 2**30, True), "more find no place on it"


def test_too_little_memory_is_told_before_anything_starts():
    console = Console(record=True, width=300)
    warn(2.0**30, False, console)
    assert console.export_text() == ""
    warn(2.0**50, False, console)
    assert "likely to need 1048576.0 GiB of memory at a time, and this machine has" in console.export_text()


@cache
def checked():
    return Checked(dry=True)


def presets(path):
    """Return the names of a file's presets, and None for what it says without one."""
    import yaml

    text = yaml.compose(path.read_text(encoding="utf-8"))
    return [None, *(k.value for key, value in text.value if key.value == "presets" for k, _ in value.value)]


@pytest.mark.parametrize(
    ("path", "preset"), [(p, preset) for p in FILES for preset in presets(p)], ids=lambda v: getattr(v, "stem", v)
)
def test_every_sweep_can_be_planned_without_its_data(path, preset, monkeypatch, tmp_path):
    """As on a machine that has no images at all; and on eight GPUs of 16 GiB its actors have room."""
    nowhere(monkeypatch, tmp_path)
    sweep = read(path, preset=preset)
    wanted = trials(sweep)
    for trial in wanted:
        checked().check(trial)
        assert LIBRARIES < checked().memory(trial.experiment, gpu=True) < 80 * 2**30, "no GPU has more"
    asked = SimpleNamespace(num_cpus=128.0, num_gpus=8.0)
    at_a_time, got = shares(wanted, sweep.search, asked, checked())
    for trial in wanted:
        own = got[trial.id]
        assert checked().memory(trial.experiment, gpu=True) <= own.gpu * GPU_MEMORY or own.gpu == 1
        assert at_a_time * sum(bundle.get("GPU", 0.0) for bundle in own.bundles()) <= 8 + 1e-9
