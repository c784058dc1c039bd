"""BPFed against plain loops, formulas by hand and numpy; its switches one by one."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny
from pydantic import ValidationError

from algorithms.base import Sum
from algorithms.bpfed import BPFed
from algorithms.params import Params
from orchestrator.client import CALL, MEMORY, SAMPLING, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

QUICK = {"stage2_epochs": 2}
SMALL = [{0: 12, 1: 5, 2: 1}, {3: 9, 4: 2, 0: 3}]
FULL = {"lr": 0.1, "momentum": 0.0, "batch": 4096}


def bpfed(**knobs):
    return {"bpfed": QUICK | knobs}


def toy(clients, knobs=None, **changes):
    """Return a driver whose clients have these numbers of samples of each class, {class: number}."""
    dataset, taken, train = digits(), dict.fromkeys(range(10), 0), []
    for numbers in clients:
        rows = []
        for c, number in numbers.items():
            rows += np.flatnonzero(dataset.y_train == c)[taken[c] : taken[c] + number].tolist()
            taken[c] += number
        train.append(np.sort(np.array(rows)))
    counts = np.stack([np.bincount(dataset.y_train[rows], minlength=10) for rows in train])
    tests = tuple(np.flatnonzero(np.isin(dataset.y_test, list(numbers)))[:5] for numbers in clients)
    parts = Split(train=tuple(train), validation=tuple(t[:0] for t in train), test=tests, counts=counts)
    base = {"data": {"name": "digits", "clients": len(clients)}, "clients_per_round": len(clients), "rounds": 1}
    experiment = tiny(algorithm=bpfed(**(knobs or {})), **(base | changes))
    return Driver(experiment, dataset, parts, InProcess(Worker(experiment, dataset, parts)))


def client_of(run, id=0, memory=None, seed=5, lr=0.1):
    known = run.memory if memory is None else memory
    return run.engine.worker.client(id, 0, known, run.origin, seed, lr=lr)


def heads(run):
    return torch.stack([run.memory[k]["V"].flat for k in sorted(run.memory)])


# Stage 1 ----------------------------------------------------------------------------------------------------------


def plain_fedper(run, experiment):
    """Return the model and the heads that an ordinary PyTorch loop gets from the same samples in the same order."""
    local, data = experiment.local, digits()
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    images, labels = (torch.from_numpy(data.x_train).float() / 255 - mean) / std, torch.from_numpy(data.y_train)
    images = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    server, private = copy.deepcopy(run.engine.worker.network), {}
    for round in range(experiment.rounds):
        rng = np.random.default_rng(stream(experiment.seed, SAMPLING, round))
        total, samples = 0, 0
        for k in sorted(rng.choice(run.selectable, experiment.clients_per_round, replace=False).tolist()):
            model = copy.deepcopy(server).train().to(memory_format=torch.channels_last)
            if k not in private:
                birth = torch.Generator().manual_seed(stream(experiment.seed, MEMORY, 0, k))
                draws = (2 * torch.rand(650, generator=birth) - 1) / 8
                private[k] = {"weight": draws[:640].view(10, 64), "bias": draws[640:]}
            model.head.load_state_dict(private[k])
            optimizer = torch.optim.SGD(model.parameters(), local.lr)
            rows = run.split.train[k]
            order = torch.Generator().manual_seed(stream(experiment.seed, CALL, round, 0, k))
            for part in torch.randperm(len(rows), generator=order).split(local.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(images[rows[part]]), labels[rows[part]]).backward()
                optimizer.step()
            private[k] = {name: t.clone() for name, t in model.head.state_dict().items()}
            flat = torch.cat([p.detach().flatten() for p in model.body.parameters()])
            total, samples = total + (len(rows) * flat).double(), samples + len(rows)
        torch.nn.utils.vector_to_parameters((total / samples).float(), server.body.parameters())
    return Params.of(server), private


def test_without_mixup_and_stage_2_it_is_fedper_bit_for_bit():
    local = {"lr": 0.05, "batch": 16, "momentum": 0.0, "weight_decay": 0.0}
    experiment = tiny(algorithm=bpfed(mixup_alpha=0, stage2_epochs=0), local=local)
    run = finish(driver(experiment))
    model, private = plain_fedper(run, experiment)
    assert [line["phase"] for line in run.history] == ["bpfed.train"] * 2
    assert run.server.model == model
    assert run.memory.keys() == private.keys()
    for k, head in private.items():
        assert torch.equal(run.memory[k]["V"]["head.weight"], head["weight"])
        assert torch.equal(run.memory[k]["V"]["head.bias"], head["bias"])


def test_heads_are_born_different_and_like_a_linear_layers():
    run = driver(tiny(algorithm=bpfed()))
    born = [client_of(run, k, memory={}).state.V for k in run.selectable]
    assert all(a != b for i, a in enumerate(born) for b in born[:i])
    values = torch.cat([head.flat for head in born])
    assert values.abs().max() <= 1 / 8
    assert float(values.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.03)
    assert born[0] == client_of(run, 0, memory={}, seed=99).state.V  # whenever it happens


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 5.0])
def test_lambda_is_beta_distributed(alpha):
    client = client_of(driver(tiny(algorithm=bpfed())))
    lam = BPFed(mixup_alpha=alpha).beta(client, 40_000)
    assert 0 <= lam.min() <= lam.max() <= 1
    assert float(lam.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(lam.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
    if alpha == 1:
        assert float((lam < 0.1).float().mean()) == pytest.approx(0.1, abs=0.006)


@pytest.mark.parametrize("mixup", ["batch", "sample"])
def test_a_mixed_step_by_hand(mixup):
    run = toy([{0: 9, 3: 4}], {"mixup": mixup, "mixup_alpha": 0.7, "stage2_epochs": 0}, local=FULL)
    client = client_of(run, seed=stream(0, CALL, 0, 0, 0))
    start, rng = run.server.model.replace(client.state.V), torch.Generator().manual_seed(client.rng.initial_seed())
    order = torch.randperm(13, generator=rng)
    u = torch.rand(2, 1 if mixup == "batch" else 13, generator=rng)
    t = torch.sqrt(u[0] ** (-1 / 0.7) - 1) * torch.cos(2 * math.pi * u[1])
    lam, pair = (1 + t / torch.sqrt(1 + t * t)) / 2, torch.randperm(13, generator=rng)
    x, y, lam = client.x[order], client.y[order], lam.expand(13)
    soft = lam[:, None] * F.one_hot(y, 10) + (1 - lam)[:, None] * F.one_hot(y[pair], 10)
    flat = start.flat.clone().requires_grad_()
    weight = lam.view(-1, 1, 1, 1)
    logits = client.logits(Params(start.layout, flat, start.buffers), weight * x + (1 - weight) * x[pair])
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, soft), flat)
    finish(run)
    end = Params(start.layout, start.flat - 0.1 * grad, start.buffers)
    torch.testing.assert_close(run.server.model.body.flat, end.body.flat, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run.memory[0]["V"].flat, end.head.flat, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixup", ["batch", "sample"])
def test_mixup_uses_the_experiments_loss(mixup):
    runs = [finish(toy(SMALL, {"mixup": mixup}, local={"lr": 0.05, "loss": loss})) for loss in ("ce", "focal")]
    assert runs[0].server.model != runs[1].server.model


def test_classifiers_stay_at_home():
    run = driver(tiny(algorithm=bpfed()))
    start = run.server.model
    sent = run.parts[0].local(client_of(run, memory={}), start.body).terms()
    assert sent.keys() == {"n", "U"}
    assert all(name.startswith("body.") for name in sent["U"])
    finish(run)
    body = 4 * len(start.body.flat)
    assert [line["metrics"]["bytes/up"] for line in run.history] == [3 * body, 3 * body, 6 * 4 * 64 * 64]
    assert run.history[0]["metrics"]["bytes/down"] == 3 * body
    assert run.server.model.head == start.head
    assert run.server.model.body != start.body
    assert not [name for name in run.parts[0].view(run.server)[0] if name.startswith("head.")]
    assert not [k for k in run.history[-1]["metrics"] if k.startswith("generic/")]


# Stage 2: the covariance ------------------------------------------------------------------------------------------


def features(run, id):
    client = client_of(run, id)
    return client.features(run.server.model, client.x).double().numpy(), client.y.numpy()


def test_with_disjoint_classes_m_glo_is_the_covariance_within_the_pooled_classes():
    run = finish(toy([{0: 12, 1: 5}, {2: 9}, {3: 4, 7: 20}]))
    z, y = (np.concatenate(part) for part in zip(*(features(run, k) for k in range(3)), strict=True))
    pooled = sum((y == c).sum() * np.cov(z[y == c].T) for c in np.unique(y)) / len(y)
    M = run.server.M.double().numpy()
    np.testing.assert_allclose(M, pooled, rtol=1e-4, atol=1e-6)
    assert (M == M.T).all()
    assert np.linalg.eigvalsh(M).min() > -1e-6
    assert M.trace() > 0


@pytest.mark.parametrize("singleton", ["skip", "zero"])
def test_m_glo_by_the_formula(singleton):
    """Client 0 has a singleton, client 1 has nothing else."""
    run = finish(toy([{0: 7, 1: 3, 2: 1}, {0: 1, 4: 1}, {1: 6, 4: 2}], {"singleton": singleton}))
    weighted, total = np.zeros((64, 64)), 0
    for k, alone in enumerate((1, 2, 0)):
        z, y = features(run, k)
        M_k = sum((y == c).sum() * np.cov(z[y == c].T) for c in np.unique(y) if (y == c).sum() > 1)
        counted = len(y) if singleton == "zero" else len(y) - alone
        weighted, total = weighted + (len(y) * M_k / counted if counted else 0), total + (len(y) if counted else 0)
    np.testing.assert_allclose(run.server.M.double().numpy(), weighted / total, rtol=1e-4, atol=1e-6)


class Answer:
    """A cohort whose sum is given, and which keeps what it is sent."""

    def __init__(self, total):
        self.total, self.sent = total, ()

    def sum(self, local, *shared):
        return self.total

    def map(self, local, *shared):
        self.sent = shared


def test_perturbations_have_the_global_covariance_and_only_copies_have_them():
    run = finish(toy([{0: 12, 1: 5, 2: 9}]))
    client, algorithm = client_of(run), run.parts[0]
    A = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    M = A @ A.T  # of rank 3
    clients = Answer(Sum(n=4, M=4 * M.double()))
    algorithm.retrain(run.server, clients)
    root = clients.sent[-1].float()
    torch.testing.assert_close(root @ root, M, rtol=1e-4, atol=1e-4)
    z, rows = torch.zeros(26, 64), torch.arange(26).repeat(1000)
    e = algorithm.perturbed(client, z, rows, root, torch.arange(len(rows)))
    assert (e[:26] == 0).all()
    torch.testing.assert_close(torch.cov(e[26:].T), M, atol=0.25, rtol=0.05)
    assert e[26:].mean(0).abs().max() < 0.05
    z = torch.randn(26, 64, generator=client.rng)
    assert torch.equal(algorithm.perturbed(client, z, rows, None, torch.arange(50)), z[rows[:50]])


# Stage 2: balance -------------------------------------------------------------------------------------------------


def test_every_owned_class_gets_as_many_rows_as_the_largest_evenly_spread():
    client = client_of(toy([{0: 11, 1: 4, 2: 3, 5: 1, 9: 11}]))
    rows = BPFed().balanced(client)
    assert rows[:30].tolist() == list(range(30))
    assert torch.bincount(client.y[rows], minlength=10).tolist() == [11, 11, 11, 0, 0, 11, 0, 0, 0, 11]
    copies = torch.bincount(rows[30:], minlength=30)
    assert sorted(copies[client.y == 1].tolist()) == [1, 2, 2, 2]  # 7 over 4
    assert sorted(copies[client.y == 2].tolist()) == [2, 3, 3]  # 8 over 3
    assert copies[client.y == 5].tolist() == [10]
    assert copies[(client.y == 0) | (client.y == 9)].sum() == 0
    # Who gets the remainder is left to chance.
    again = {tuple(torch.bincount(BPFed().balanced(client)[30:], minlength=30).tolist()) for _ in range(20)}
    assert len(again) > 1


def test_soft_labels_by_hand():
    client = client_of(toy([{0: 16, 3: 4, 8: 1}]))
    half, quarter = 0.5 * 0.25**0.5, 0.5 * (1 / 16) ** 0.5
    q = BPFed(smooth_power=0.5).soft_labels(client)
    torch.testing.assert_close(q.sum(1), torch.ones(10))
    expected = {0: {0: 0.5, 3: 0.25, 8: 0.25}, 3: {3: 1 - half, 0: half / 2, 8: half / 2}}
    expected[8] = {8: 1 - quarter, 0: quarter / 2, 3: quarter / 2}
    for c, row in expected.items():
        assert q[c].tolist() == pytest.approx([row.get(j, 0.0) for j in range(10)])
    everywhere = BPFed(smooth_power=0.5, smoothing="all").soft_labels(client)
    torch.testing.assert_close(everywhere.sum(1), torch.ones(10))
    assert everywhere[3].tolist() == pytest.approx([1 - half if j == 3 else half / 9 for j in range(10)])
    linear = BPFed(smooth_power=1.0, smooth_max=0.2).soft_labels(client)
    assert linear[3].tolist() == pytest.approx([0.025, 0, 0, 0.95, 0, 0, 0, 0, 0.025, 0])


def test_soft_labels_without_smoothing_are_one_hot():
    client = client_of(toy([{0: 16, 3: 4, 8: 1}]))
    assert torch.equal(BPFed(smooth_max=0.0).soft_labels(client), torch.eye(10))
    assert torch.equal(BPFed(smoothing="none").soft_labels(client), torch.eye(10))
    only = client_of(toy([{4: 6}]))
    assert torch.equal(BPFed().soft_labels(only), torch.eye(10))


@pytest.mark.parametrize(
    ("knobs", "classes"),
    [
        ({"smoothing": "none"}, range(10)),
        ({"smoothing": "none", "softmax_support": "owned"}, (1, 4, 6)),
        ({}, range(10)),
        ({"softmax_support": "owned"}, (1, 4, 6)),
        ({"smoothing": "all"}, range(10)),
    ],
)
def test_three_steps_of_retraining_by_hand(knobs, classes):
    """Full batches: V, b and s descend sum_j -q_j log p_j together, and prediction is s (V z + b)."""
    fixed = {"feature_augmentation": False, "stage2_epochs": 3, "stage2_batch": 4096, "stage2_lr": 0.3}
    run = toy([{1: 9, 4: 5, 6: 2}], fixed | {"stage2_momentum": 0.5, "stage2_weight_decay": 0.01} | knobs, local=FULL)
    run.advance()
    client = client_of(run)
    V, b = (client.state.V[name].clone().requires_grad_() for name in ("head.weight", "head.bias"))
    s = torch.ones(10, requires_grad=True)
    z, q = client.features(run.server.model, client.x), torch.eye(10)
    if knobs.get("smoothing") != "none":
        for c, n in {1: 9, 4: 5, 6: 2}.items():
            g = 0.5 * (n / 9) ** 0.4
            for j in range(10) if knobs.get("smoothing") == "all" else (1, 4, 6):
                q[c, j] = 1 - g if j == c else g / (9 if knobs.get("smoothing") == "all" else 2)
    optimizer = torch.optim.SGD([V, b, s], lr=0.3, momentum=0.5, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        odds = torch.exp(s * (z @ V.T + b))
        p = odds / odds[:, list(classes)].sum(1, keepdim=True)
        (-(q[client.y] * torch.log(p)).sum() / len(z)).backward()
        optimizer.step()
    run.advance()
    assert (s - 1).abs().max() > 1e-3
    predict = run.parts[0].personal(client_of(run), *run.parts[0].view(run.server))
    torch.testing.assert_close(predict(client.x), s * (z @ V.T + b), rtol=1e-4, atol=1e-5)
    assert run.history[-1]["metrics"]["bytes/up"] == 0  # nothing to exchange without feature augmentation


def test_plain_cross_entropy_is_smoothing_by_nothing():
    zero, none = (finish(toy(SMALL, knobs)) for knobs in ({"smooth_max": 0.0}, {"smoothing": "none"}))
    assert torch.equal(heads(zero), heads(none))


# Switches ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual():
    return finish(toy(SMALL))


@pytest.mark.parametrize(
    "knob",
    [
        {"feature_augmentation": False},
        {"redraw_each_epoch": True},
        {"singleton": "zero"},
        {"smoothing": "none"},
        {"smoothing": "all"},
        {"smooth_max": 0.2},
        {"smooth_power": 2.0},
        {"softmax_support": "owned"},
        {"head_init": "reinit"},
        {"stage2_epochs": 3},
        {"stage2_lr": 0.1},
        {"stage2_momentum": 0.0},
        {"stage2_weight_decay": 0.1},
        {"stage2_batch": 8},
    ],
    ids=str,
)
def test_a_switch_of_stage_2_changes_the_classifiers_alone(knob, usual):
    run = finish(toy(SMALL, knob))
    assert run.server.model == usual.server.model
    assert not torch.equal(heads(run), heads(usual))
    if "feature_augmentation" in knob:
        assert run.server.M is None
    else:
        assert torch.equal(run.server.M, usual.server.M) == ("singleton" not in knob)


@pytest.mark.parametrize("knob", [{"mixup_alpha": 0.0}, {"mixup_alpha": 0.3}, {"mixup": "sample"}], ids=str)
def test_a_switch_of_stage_1_changes_the_extractor(knob, usual):
    assert finish(toy(SMALL, knob)).server.model.body != usual.server.model.body


def test_redrawn_perturbations_differ_between_epochs():
    """With a vanishing step, an epoch's mean loss depends on the noise alone."""
    knobs = {"stage2_lr": 1e-12, "stage2_batch": 4096, "stage2_weight_decay": 0.0}
    losses = {}
    for redraw in False, True:
        for epochs in 1, 2:
            run = toy([{0: 9, 1: 1}], knobs | {"redraw_each_epoch": redraw, "stage2_epochs": epochs})
            losses[redraw, epochs] = finish(run).history[-1]["metrics"]["train/loss"]
    assert losses[False, 2] == pytest.approx(losses[False, 1], rel=2e-6)
    assert losses[True, 2] != pytest.approx(losses[True, 1], rel=2e-5)


def test_the_same_bits_twice(usual):
    assert finish(toy(SMALL)).fingerprint() == usual.fingerprint()


def test_retraining_helps_the_owned_classes():
    run = finish(driver(tiny(algorithm="bpfed", rounds=8, evaluate={"every": 8})))
    before, after = (line["metrics"]["personal/acc_owned"] for line in run.history[-2:])
    assert after > before + 0.05


def test_contradictions_are_refused():
    with pytest.raises(ValidationError, match="softmax_support: owned leaves out"):
        tiny(algorithm=bpfed(smoothing="all", softmax_support="owned"))
    with pytest.raises(ValueError, match=r"one linear classifier, but this network has head\.experts"):
        driver(tiny(algorithm=bpfed(), model={"name": "cnn_small", "experts": 2}))


# Degenerate clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["cnn_small", {"name": "resnet8", "width": 4}], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("knobs", [{}, {"singleton": "zero", "redraw_each_epoch": True, "softmax_support": "owned"}])
def test_degenerate_clients_neither_fail_nor_spoil(network, knobs):
    """One sample, one class, a sample of each class, and an ordinary client; two of them are never drawn."""
    clients = [{3: 1}, {5: 8}, dict.fromkeys(range(10), 1), {0: 7, 1: 4, 2: 2}]
    run = finish(toy(clients, knobs, model=network, clients_per_round=2))
    assert sorted(run.memory) == [0, 1, 2, 3]
    assert torch.isfinite(heads(run)).all()
    assert torch.isfinite(run.server.M).all()
    assert torch.isfinite(run.server.model.flat).all()
    born = torch.stack([client_of(run, k, memory={}).state.V.flat for k in range(4)])
    assert ((heads(run) - born).abs().amax(1) > 0).all()


def test_where_nobody_has_two_samples_of_a_class_there_is_no_noise():
    run = finish(toy([{3: 1}, {0: 1, 4: 1}]))
    assert torch.equal(run.server.M, torch.zeros(64, 64))
    assert torch.isfinite(heads(run)).all()
