"""FedETF: training, the folded classifier and the clients' adaptation against plain PyTorch, in all variants."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import arrived, driver, finish, tiny
from torch import nn

from algorithms.fedetf import FedETF
from algorithms.params import Params
from orchestrator.client import CALL, stream

W, B, BETA, MEAN, VAR = "head.weight", "head.bias", "temperature", "norm.mean", "norm.var"
NETS = {"cnn": "cnn_small", "resnet": {"name": "resnet8", "width": 4}}
VARIANTS = [
    {},
    {"temperature": 2.5},
    {"projection": False},
    {"dot_regression": True},
    {"projection": False, "dot_regression": True},
]
LOCAL = {"lr": 0.05, "batch": 32, "momentum": 0.9, "epochs": 2, "weight_decay": 1e-3}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Leave the user's stored heads alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def begin(knobs=None, net="cnn", **changes):
    return driver(tiny(**{"model": NETS[net], "local": LOCAL, "algorithm": {"fedetf": knobs or {}}} | changes))


def client_of(run, id, seed=0, lr=0.05):
    return run.engine.worker.client(id, 0, run.memory, run.origin, seed, lr=lr)


class Written(nn.Module):
    """The paper's network: body, projection, batch norm where there is one, unit length, ETF, temperature."""

    def __init__(self, run):
        super().__init__()
        knobs = run.parts[0]
        network = copy.deepcopy(run.engine.worker.network)
        self.body = network.body
        self.projection = network.head if knobs.projection else nn.Identity()
        self.norm = nn.BatchNorm1d(run.server.V.shape[1], affine=False) if knobs.dot_regression else nn.Identity()
        beta = torch.tensor(knobs.temperature)
        self.beta = beta if knobs.dot_regression else nn.Parameter(beta)
        self.V = nn.Parameter(run.server.V.clone(), requires_grad=False)
        self.dot_regression = knobs.dot_regression
        self.eval()

    def unit(self, h):
        z = self.norm(self.projection(h))
        return z / z.norm(dim=1, keepdim=True)

    def forward(self, x):
        return self.beta * self.unit(self.body(x)) @ self.V.T

    def learn(self, client, batches, lr, momentum, weight_decay):
        """Train everything but V."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.train()
        for x, y in batches:
            if self.dot_regression:
                self.norm.train(len(y) > 1)
                loss = (((self.V[y] * self.unit(self.body(x))).sum(1) - self.V[y].norm(dim=1)) ** 2).mean() / 2
            else:
                z = self(x) + client.counts.clamp_min(1).log()
                loss = F.cross_entropy(z.masked_fill(client.counts == 0, -torch.inf), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        self.eval()


def trained_alike(w, written, run):
    """Compare all that is uploaded with the module's."""
    expected = {f"body.{n}": t for n, t in (*written.body.named_parameters(), *written.body.named_buffers())}
    if not isinstance(written.projection, nn.Identity):
        expected |= {W: written.projection.weight, B: written.projection.bias}
    if written.dot_regression:
        expected |= {MEAN: written.norm.running_mean, VAR: written.norm.running_var}
    else:
        expected[BETA] = written.beta
    assert set(w) == set(expected)
    start = run.server.model.body | run.server.p
    within = 0.01 if run.engine.worker.norms else 1e-4
    arrived(*([tensors[name] for name in expected] for tensors in (w, expected, start)), within=within)


def test_the_frame_is_a_simplex_of_the_size_of_the_projection():
    for projection, dim in ((True, 10), (False, 64)):
        run = begin({"projection": projection, "etf_seed": 3})
        V = run.server.V
        assert V.shape == (10, dim)
        expected = torch.full((10, 10), -1 / 9).fill_diagonal_(1.0)
        torch.testing.assert_close(V @ V.T, expected, atol=1e-5, rtol=0)
        assert not torch.equal(V, begin({"projection": projection}).server.V)
        before = V.clone()
        run.advance()
        assert torch.equal(run.server.V, before)


@pytest.mark.parametrize("knobs", VARIANTS, ids=lambda k: "+".join(k) or "paper")
@pytest.mark.parametrize("net", NETS)
def test_a_clients_epochs_against_modules_and_an_optimizer(net, knobs):
    run = begin(knobs, net)
    client, twin = (client_of(run, 1, seed=7) for _ in range(2))
    assert (client.counts == 0).any()
    sent = run.parts[0].local(client, run.server.model.body, run.server.p, run.server.V)
    written = Written(run)
    written.learn(twin, twin.batches(2), 0.05, 0.9, 1e-3)
    trained_alike(sent.w / sent.n, written, run)
    assert sent.n == client.n
    if not run.parts[0].dot_regression:
        assert abs(float(written.beta.detach()) - run.parts[0].temperature) > 1e-3


def test_the_server_averages_by_sample_counts():
    run = begin(net="resnet", rounds=1)
    uploads = []
    for k in run._draw(run.plan[0]):
        client = client_of(run, k, stream(run.experiment.seed, CALL, 0, 0, k))
        uploads.append(run.parts[0].local(client, run.server.model.body, run.server.p, run.server.V))
    run.advance()
    total = uploads[0] + uploads[1] + uploads[2]
    mean = total.w / total.n
    torch.testing.assert_close(run.server.model.body.flat, mean.body.flat.float())
    torch.testing.assert_close(run.server.model.body.buffers, mean.body.buffers.float())
    assert set(run.server.p) == {W, B, BETA}
    for name, value in run.server.p.items():
        torch.testing.assert_close(value, mean[name].float())


@pytest.mark.parametrize("knobs", VARIANTS, ids=lambda k: "+".join(k) or "paper")
def test_the_folded_classifier_ranks_as_the_frame_does(knobs):
    """Its logits are those of beta V h/|h| times the length of h, before training and after."""
    run = begin(knobs, rounds=1)
    for _ in range(2):
        client, p, V = client_of(run, 0), run.server.p, run.server.V
        with torch.no_grad():
            h = client.features(run.server.model, client.x)
            h = h @ p[W].T + p[B] if run.parts[0].projection else h
            if run.parts[0].dot_regression:
                h = (h - p[MEAN]) / (p[VAR] + 1e-5).sqrt()
            beta = p[BETA] if BETA in p else run.parts[0].temperature
            z = beta * (h / h.norm(dim=1, keepdim=True)) @ V.T
            folded = run.parts[0].generic(client, *run.parts[0].view(run.server))(client.x)
        torch.testing.assert_close(folded, z * h.norm(dim=1, keepdim=True), rtol=1e-3, atol=1e-4)
        if not run.round:
            run.advance()


@pytest.mark.parametrize("knobs", VARIANTS, ids=lambda k: "+".join(k) or "paper")
def test_adapting_against_modules_and_optimizers(knobs):
    """The whole model for some epochs, then turns: V without momentum, the projection with, both on fixed features."""
    knobs = knobs | {"alternations": 2, "etf_epochs": 2, "projection_epochs": 1, "etf_lr": 0.3, "projection_lr": 0.2}
    run = begin(knobs | {"personal_epochs": 1}, "resnet")
    client, twin = (client_of(run, 1, seed=7) for _ in range(2))
    run.parts[0].adapt(client, run.server.model.body, run.server.p, run.server.V)

    written = Written(run)
    written.learn(twin, twin.batches(1), 0.05, 0.9, 1e-3)
    with torch.no_grad():
        features = written.body(twin.x)
    written.requires_grad_(False)
    turns = [([written.V], 2, {"lr": 0.3})]
    if knobs.get("projection", True):
        parameters = list(written.projection.parameters())
        turns.append((parameters, 1, {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}))
    for parameters, epochs, rates in 2 * turns:
        for p in parameters:
            p.requires_grad_()
        sgd = torch.optim.SGD(parameters, **rates)
        for h, y in twin.batches(epochs, data=(features, twin.y)):
            sgd.zero_grad()
            F.cross_entropy(written.beta * written.unit(h) @ written.V.T, y).backward()
            sgd.step()
        for p in parameters:
            p.requires_grad_(False)
    with torch.no_grad():
        expected, got = written(client.x), client.logits(client.state.w, client.x)
    scale = (got * expected).sum(1, keepdim=True) / (expected * expected).sum(1, keepdim=True)
    assert (scale > 0).all()
    torch.testing.assert_close(got, scale * expected, rtol=1e-2, atol=1e-3)
    assert not torch.allclose(written.V, run.server.V, atol=1e-2)


def test_without_turns_and_epochs_a_client_predicts_as_everybody():
    run = finish(begin({"alternations": 0, "personal_epochs": 0}))
    assert [line["phase"] for line in run.history] == ["fedetf.train"] * 2 + ["fedetf.personalize"]
    assert sorted(run.memory) == run.selectable
    for k in run.selectable:
        torch.testing.assert_close(run.memory[k]["w"].flat, run.server.model.flat, rtol=1e-4, atol=1e-5)
    before, after = (line["metrics"] for line in run.history[-2:])
    assert all(before[m] == after[m] for m in before if "/acc" in m)


def test_who_predicts_with_what():
    run = begin({"alternations": 1}, rounds=1)
    run.advance()
    client = client_of(run, 0)
    assert torch.equal(
        run.parts[0].personal(client, run.server.model)(client.x), client.logits(run.server.model, client.x)
    )
    model = run.server.model
    run.advance()
    assert run.server.model == model
    client = client_of(run, 0)
    own = run.parts[0].personal(client, run.server.model)(client.x)
    assert torch.equal(own, client.logits(run.memory[0]["w"], client.x))
    assert not torch.allclose(own, client.logits(model, client.x), atol=1e-3)


def test_adapting_helps_the_clients():
    local = {"lr": 0.05, "batch": 16, "momentum": 0.9, "epochs": 2}
    run = finish(begin({"alternations": 3}, local=local, rounds=6, clients_per_round=6, evaluate={"every": 6}))
    trained, adapted = (line["metrics"] for line in run.history[-2:])
    assert trained["generic/acc"] == adapted["generic/acc"] > 0.7
    assert adapted["personal/acc_dist"] > trained["personal/acc_dist"]


def test_folding_by_hand():
    V, P, b = torch.tensor([[1.0, 0.0], [-1.0, 2.0]]), torch.tensor([[1.0, 4.0], [0.0, 2.0]]), torch.tensor([5.0, 7.0])
    p = Params.pack({W: P, B: b, BETA: torch.tensor(3.0)})
    folded = FedETF().folded(p, V)  # 3 V P and 3 V b
    assert folded[W].tolist() == [[3.0, 12.0], [-3.0, 0.0]]
    assert folded[B].tolist() == [15.0, 27.0]
    folded = FedETF(projection=False, temperature=0.5).folded(Params.pack({}), V)
    assert folded[W].tolist() == [[0.5, 0.0], [-0.5, 1.0]]
    assert folded[B].tolist() == [0.0, 0.0]
    norm = {MEAN: torch.tensor([1.0, 2.0]), VAR: torch.tensor([4.0, 0.25]) - 1e-5}
    folded = FedETF(projection=False, dot_regression=True).folded(Params.pack({}, norm), V)
    torch.testing.assert_close(folded[W], torch.tensor([[0.5, 0.0], [-0.5, 4.0]]))
    torch.testing.assert_close(folded[B], torch.tensor([-0.5, 0.5 - 8.0]))


def test_a_network_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"FedETF projects by one linear layer, but this network has head\.experts\.0"):
        begin(model={"name": "cnn_small", "experts": 2})
