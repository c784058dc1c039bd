"""The body in two halves: all before its last stage, and that stage alone."""

import numpy as np
import pytest
import torch
from conftest import driver, finish, tiny
from test_models import CASES, every

from algorithms.params import Params
from orchestrator.client import Client
from orchestrator.data import Dataset, Split
from orchestrator.memo import Memo
from orchestrator.models import MODELS, build, torchvision
from orchestrator.worker import Worker


def client_with(name: str, **model: int) -> tuple[Client, Params]:
    """Return a client of a federation of noise with this network, a model, or one with so many experts."""
    torch.set_num_threads(1)
    plain, _, experts = name.partition(" x")
    channels = CASES[name][0][0]
    side = max(8, MODELS[plain].smallest)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (3, channels, side, side), dtype=np.uint8)
    y = np.arange(3)
    data = Dataset("noise", x, y, x, y, 3, (0.5,) * channels, (0.3,) * channels)
    rows = np.arange(3)
    parts = Split((rows,), (rows[:0],), (rows,), np.bincount(y)[None])
    options = {"name": plain, **model, **({"experts": int(experts)} if experts else {})}
    experiment = tiny(model=options, data={"name": "digits", "clients": 1}, clients_per_round=1)
    worker = Worker(experiment, data, parts)
    w = Params.of(worker.network)
    # Batch norm as after some training, not as at birth.
    w.buffers.copy_(torch.rand(w.buffers.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    return Client(worker, 0, 3), w


def trained(w: Params) -> Params:
    """Return a copy as `fit` has it while it trains."""
    w = w.clone()
    w.flat.requires_grad_()
    return w


@every
def test_the_halves_make_the_whole_bit_for_bit(name):
    client, w = client_with(name)
    f = client.stem(w, client.x)
    whole = client.features(w, client.x)
    assert torch.equal(client.stage(w, f), whole)
    assert not torch.equal(f, client.x)
    assert f.shape[1:] != whole.shape[1:] or not torch.equal(f, whole)
    # Each half is given its own weights only.
    before, after = (w.where(lambda n, own=own: n.startswith(client.last_stage) == own) for own in (False, True))
    assert torch.equal(client.stage(after, client.stem(before, client.x)), whole)
    with pytest.raises(KeyError):
        client.stem(after, client.x)
    with pytest.raises(KeyError):
        client.stage(before, f)


@pytest.mark.parametrize("part", ["everything", "last stage"])
@pytest.mark.parametrize(
    "name", ["cnn_mupfl", "resnet8", "resnet20", "mobilenet_v3_small", "cnn_small x3", "resnet32 x3"]
)
def test_what_is_trained_trains_alike_in_halves(name, part):
    """Features, gradients and what batch norm remembers."""
    client, w = client_with(name)
    prefix = "" if part == "everything" else client.last_stage
    results = []
    for halves in (False, True):
        frozen, v = w.clone(), trained(w.under(prefix))
        model = frozen | v
        h = client.stage(model, client.stem(model, client.x)) if halves else client.features(model, client.x)
        (h * torch.linspace(-1, 1, h.numel()).view(h.shape)).sum().backward()
        assert frozen == w  # what is not trained does not learn
        results.append((h.detach(), v.flat.grad, v.buffers))
    for whole, in_halves in zip(*results, strict=True):
        assert torch.equal(whole, in_halves)
    norms = any(n.startswith(prefix) for _, n in client.worker.norms)
    assert norms == (not torch.equal(results[0][2], w.under(prefix).buffers))


def test_a_stage_trains_on_a_frozen_stem_and_the_other_way_around():
    """A half's batch norm follows that half's weights, whatever the other one did before."""
    client, w = client_with("resnet8", width=4)
    for _ in range(2):
        hot = trained(w)
        f = client.stem(hot, client.x)
        client.stage(w, f)
        moved = {n for n, _ in w.layout.buffers if not torch.equal(hot[n], w[n])}
        assert moved == {n for n, _ in w.layout.buffers if not n.startswith(client.last_stage)}
        hot = trained(w)
        assert torch.equal(client.stem(w, client.x), client.stem(w, client.x))
        client.stage(hot, f.detach())
        moved = {n for n, _ in w.layout.buffers if not torch.equal(hot[n], w[n])}
        assert moved == {n for n, _ in w.layout.buffers if n.startswith(client.last_stage)}


@pytest.mark.parametrize("name", ["resnet8", "cnn_mupfl", "cnn_small"])
def test_a_tap_sees_the_maps_of_the_stage_alone(name):
    client, w = client_with(name)
    seen: dict[str, torch.Tensor] = {}

    def tap(layer: str, a: torch.Tensor) -> torch.Tensor:
        seen[layer] = a
        return a * 2

    f = client.stem(w, client.x)
    h = client.stage(w, f, tap)
    last = {"resnet8": ["body.stage3"], "cnn_mupfl": ["body.relu2"], "cnn_small": []}[name]
    assert list(seen) == last
    assert torch.equal(h, client.stage(w, f) * (2 if last else 1))


def test_while_predicting_clients_share_the_stem():
    run = driver(tiny(model={"name": "resnet8", "width": 4}))
    worker, w = run.engine.worker, run.server.model
    clients, x = [Client(worker, id, 0) for id in (0, 1)], torch.rand(5, 1, 8, 8)
    own = [w.under(clients[0].last_stage) * (1 + id) for id in (0, 1)]
    with worker.predicting():
        stems = [client.stem(w | v, x) for client, v in zip(clients, own, strict=True)]
        assert stems[0] is stems[1]
        h = [client.stage(w | v, f) for client, v, f in zip(clients, own, stems, strict=True)]
    assert not torch.equal(*h)
    for client, v, predicted in zip(clients, own, h, strict=True):
        torch.testing.assert_close(predicted, client.features(w | v, x))


def test_what_is_shared_while_predicting_stays_within_its_bounds(monkeypatch):
    monkeypatch.setattr("orchestrator.memo.MOST", 2 * 40)
    memo, made = Memo(), []

    def ask(key):
        return memo.get(key, (), lambda: made.append(key) or torch.zeros(10))

    for key in "ab", "cd", "ab", "ef", "ab", "cd":
        kept = ask(key)
        assert ask(key) is kept
        assert sum(t.nbytes for _, t in memo._kept.values()) == memo._bytes <= 80
    assert made == ["ab", "cd", "ef", "cd"], "what was not asked for longest went first"
    assert memo.get("large", (), lambda: torch.zeros(1000)).numel() == 1000
    assert list(memo._kept) == ["large"], "the newest stays, however large"


@pytest.mark.parametrize("method", ["ditto", "fedper"])
def test_scores_do_not_depend_on_what_is_shared(monkeypatch, method):
    e = tiny(algorithm=method, model={"name": "resnet8", "width": 4})
    whole = finish(driver(e)).history
    monkeypatch.setattr("orchestrator.memo.MOST", 0)
    for line, again in zip(whole, finish(driver(e)).history, strict=True):
        timeless = [{k: v for k, v in x["metrics"].items() if not k.startswith("time/")} for x in (line, again)]
        assert timeless[0] == timeless[1]


@pytest.mark.parametrize("name", ["resnet50", "resnext50"])
def test_torchvisions_networks_are_as_torchvision_runs_them(name):
    network = build(name, (3, 32, 32), 7).eval()
    theirs = getattr(torchvision().models, {"resnext50": "resnext50_32x4d"}.get(name, name))(num_classes=7).eval()
    own = {key.partition(".")[2]: value for key, value in network.state_dict().items() if key.startswith("body.")}
    own |= {f"fc.{key}": value for key, value in network.head.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(own, strict=False)
    assert not unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network(x), theirs(x))
