"""Classifiers made after the features: cRT, LWS, tau-norm and MiSLAS against plain PyTorch and numbers by hand."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny
from pydantic import ValidationError

import algorithms
from algorithms.base import State
from algorithms.maths import balanced, linear, smoothed
from algorithms.mislas import MiSLAS
from algorithms.params import Params
from algorithms.tau_norm import TauNorm
from orchestrator.client import CALL, SAMPLING, SERVER, stream
from orchestrator.models import build
from orchestrator.space import trials
from orchestrator.sweep_file import read

NETS = {"cnn_small": "cnn_small", "resnet8": {"name": "resnet8", "width": 4}}
nets = pytest.mark.parametrize("net", NETS)
FULL = {"lr": 0.1, "momentum": 0.0, "batch": 4096}


def run(name, net="cnn_small", local=None, **knobs):
    """Return a driver of FedAvg and then this, after FedAvg."""
    local = {"local": local} if local else {}
    made = driver(tiny(model=NETS[net], algorithm=["fedavg", {name: knobs}], rounds=1, **local))
    made.advance()
    return made


def client_of(made, id=0, seed=7):
    return made.engine.worker.client(id, 1, made.memory, made.server.model, seed, lr=0.1)


def scores(line):
    return {k: v for k, v in line["metrics"].items() if k.startswith(("personal/", "generic/"))}


def drawn(client, rows=True):
    """Return images and labels of an epoch in one batch, as `fit` draws them, classes alike or all as they are."""
    rows = balanced(client.y)(client.rng) if rows else torch.arange(client.n)
    rows = rows[torch.randperm(client.n, generator=client.rng)]
    return client.x[rows], client.y[rows]


@pytest.mark.parametrize("name", ["crt", "lws", "tau_norm", "mislas", "fedafa"])
def test_named_alone_they_follow_fedavg(name):
    assert [part.name for part in algorithms.build([{name: {}}]).parts] == ["fedavg", name]


# cRT -----------------------------------------------------------------------------------------------------------------


@nets
@pytest.mark.parametrize("sampling", ["instance", "class_balanced"])
def test_crt_equals_a_plain_loop(net, sampling):
    """Two rounds: the classifier is drawn once, then trained by SGD and averaged; the body is as FedAvg left it."""
    made = run("crt", net, {"lr": 0.05, "batch": 20, "epochs": 2}, sampling=sampling, rounds=2)
    w = made.server.model
    network = copy.deepcopy(made.engine.worker.network).eval()
    network.load_state_dict(dict(w), strict=False)
    born = torch.Generator().manual_seed(int(np.random.default_rng(stream(0, SERVER, 1)).integers(2**63)))
    bound = 1 / network.head.in_features**0.5
    v = torch.rand(w.head.flat.shape, generator=born) * 2 * bound - bound
    finish(made)
    assert len(made.plan) == 3
    for round in (1, 2):
        rng = np.random.default_rng(stream(0, SAMPLING, round))
        total, samples = torch.zeros_like(v, dtype=torch.float64), 0
        for k in sorted(rng.choice(made.selectable, 3, replace=False).tolist()):
            client = client_of(made, k, stream(0, CALL, round, 0, k))
            torch.nn.utils.vector_to_parameters(v.clone(), network.head.parameters())
            optimizer = torch.optim.SGD(network.head.parameters(), 0.05, momentum=0.9)
            for _ in range(2):
                x, y = drawn(client, sampling == "class_balanced")
                for part in torch.arange(client.n).split(20):
                    if len(part) > 1 or net == "cnn_small":
                        optimizer.zero_grad()
                        F.cross_entropy(network(x[part]), y[part]).backward()
                        optimizer.step()
            total += client.n * torch.nn.utils.parameters_to_vector(network.head.parameters()).detach().double()
            samples += client.n
        v = (total / samples).float()
    torch.testing.assert_close(made.server.model.head.flat, v, rtol=1e-4, atol=1e-6)
    assert made.server.model.body == w.body  # also what batch norm remembers


def test_crt_sends_the_classifier_only_and_has_a_rate_of_its_own():
    made = finish(run("crt", rounds=1))
    assert made.history[1]["metrics"]["bytes/up"] == 3 * 4 * 65 * 10
    slow = finish(run("crt", rounds=1, lr=1e-4))
    assert slow.server.model != made.server.model
    assert finish(run("crt", rounds=1, lr=0.05)).server.model == made.server.model  # the experiment's


def test_crt_uses_the_experiments_loss():
    local = {"lr": 0.05, "batch": 16, "loss": "balanced_softmax", "prior": "local"}
    runs = [run("crt", rounds=1), run("crt", local=local, rounds=1)]
    heads = []
    for made in runs:
        made.server = State({"model": runs[0].server.model})  # both from the same features
        heads.append(finish(made).server.model.head)
    assert heads[0] != heads[1]


# LWS -----------------------------------------------------------------------------------------------------------------


@nets
def test_lws_without_training_is_the_model_before(net):
    made = finish(run("lws", net, epochs=0))
    assert scores(made.history[0]) == scores(made.history[1])
    assert all(torch.equal(memory["s"], torch.ones(10)) for memory in made.memory.values())


@nets
def test_lws_learns_scales_alone_by_hand(net):
    made = run("lws", net, FULL, epochs=1, lr=0.3)
    w = made.server.model
    client, twin = client_of(made), client_of(made)
    x, y = drawn(twin)
    z = twin.logits(w, x)
    p = z.softmax(1)
    # dCE/ds_c = mean of (p_c - [y = c]) z_c
    expected = 1 - 0.3 * ((p - F.one_hot(y, 10)) * z).mean(0)
    made.parts[1].local(client, w)
    torch.testing.assert_close(client.state.s, expected, rtol=1e-4, atol=1e-6)
    predict = made.parts[1].personal(client, w)
    with torch.no_grad():
        torch.testing.assert_close(predict(client.x), expected * client.logits(w, client.x), rtol=1e-4, atol=1e-5)
    finish(made)
    assert made.server.model == w
    assert made.history[0]["metrics"]["generic/acc"] == made.history[1]["metrics"]["generic/acc"]
    assert {frozenset(memory) for memory in made.memory.values()} == {frozenset({"s"})}


# tau-norm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tau", "rows"), [(0.0, [[3, 4], [0, 2]]), (1.0, [[0.6, 0.8], [0, 1]]), (0.5, None)])
def test_tau_norm_by_hand(tau, rows):
    rows = rows or [[3 / math.sqrt(5), 4 / math.sqrt(5)], [0, math.sqrt(2)]]
    head = {"head.weight": torch.tensor([[3.0, 4], [0, 2], [0, 0]]), "head.bias": torch.tensor([7.0, -1, 0])}
    model = Params.pack({"body.a": torch.arange(3.0), **head})
    server = State({"model": model})
    TauNorm(tau=tau).normalise(server, None)
    torch.testing.assert_close(server.model["head.weight"], torch.tensor([*rows, [0, 0]], dtype=torch.float32))
    assert server.model["head.bias"].tolist() == [0, 0, 0]
    assert server.model.body == model.body


def test_tau_zero_leaves_all_but_the_bias():
    made = run("tau_norm", tau=0)
    before = made.server.model
    finish(made)
    assert torch.equal(made.server.model["head.weight"], before["head.weight"])
    assert made.server.model.body == before.body
    assert made.server.model == before.replace({"head.bias": torch.zeros(10)})
    assert made.history[1]["metrics"]["bytes/up"] == made.history[1]["metrics"]["bytes/down"] == 0
    assert not made.memory


def test_tau_is_one_by_default_and_the_same_for_everyone():
    made = finish(run("tau_norm"))
    torch.testing.assert_close(made.server.model["head.weight"].norm(dim=1), torch.ones(10))
    client = client_of(made)
    algorithm = made.parts[1]
    with torch.no_grad():
        expected = F.linear(client.features(made.server.model, client.x), made.server.model["head.weight"])
        for predict in (algorithm.personal(client, made.server.model), algorithm.generic(client, made.server.model)):
            torch.testing.assert_close(predict(client.x), expected)


def test_tau_can_be_swept():
    text = "algorithm: [fedavg, tau_norm: {tau: !grid [0, 0.5, 1]}]"
    found = [trial.experiment.chain().parts for trial in trials(read(text=text))]
    assert [[type(part).__name__ for part in parts] for parts in found] == [["FedAvg", "TauNorm"]] * 3
    assert [parts[1].tau for parts in found] == [0, 0.5, 1]


def test_classifiers_without_lengths_are_refused():
    model = Params.of(build("cnn_small", (1, 8, 8), 10, experts=2))
    with pytest.raises(ValueError, match=r"tau-norm rescales one linear classifier.*head.experts.0.weight"):
        TauNorm().server_state(model)
    plain = Params.of(build("cnn_small", (1, 8, 8), 10))
    assert linear(plain, "it") == plain.head


# MiSLAS --------------------------------------------------------------------------------------------------------------


def test_smoothing_by_hand():
    n = torch.tensor([100.0, 10, 55, 0])
    q = MiSLAS(smooth_head=0.4, smooth_tail=0.1).soft_labels(n)
    eps = [0.4, 0.1, 0.1 + 0.3 * math.sin(math.pi / 4)]
    for c, e in enumerate(eps):
        expected = [e / 4 + (1 - e) * (j == c) for j in range(4)]
        torch.testing.assert_close(q[c], torch.tensor(expected))
    torch.testing.assert_close(q.sum(1), torch.ones(4))
    # As the authors write it: (1 - eps) times the usual loss, eps times the mean over all classes.
    z, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 2])
    e, log_p = torch.tensor(eps)[y], z.log_softmax(1)
    theirs = (-(1 - e) * log_p[range(5), y] - e * log_p.mean(1)).mean()
    torch.testing.assert_close(F.cross_entropy(z, q[y]), theirs)


def test_classes_of_one_size_are_all_tail():
    for n in ([0.0, 8, 8], [0.0, 0, 3]):
        q = MiSLAS(smooth_tail=0.2).soft_labels(torch.tensor(n))
        torch.testing.assert_close(q[2], torch.tensor([0.2, 0.2, 2.6]) / 3)
        assert torch.equal(MiSLAS().soft_labels(torch.tensor(n)), torch.eye(3))


def test_shared_smoothing_by_hand():
    others = torch.tensor([[0.0, 1, 1], [1, 1, 0], [0, 0, 0]])
    expected = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.9, 0], [0, 0, 1]])
    torch.testing.assert_close(smoothed(torch.tensor([0.4, 0.2, 0.0]), others), expected)


@nets
def test_mislas_without_training_is_the_model_before(net):
    made = finish(run("mislas", net, epochs=0))
    assert scores(made.history[0]) == scores(made.history[1])


@nets
@pytest.mark.parametrize("shift", [False, True])
def test_a_mislas_step_by_hand(net, shift):
    made = run("mislas", net, FULL, epochs=1, lr=0.2, smooth_head=0.4, smooth_tail=0.05, shift_bn=shift)
    w = made.server.model
    client, twin = client_of(made), client_of(made)
    network = copy.deepcopy(made.engine.worker.network)
    network.load_state_dict(dict(w), strict=False)
    network.body.train(shift)
    x, y = drawn(twin)
    with torch.no_grad():
        h = network.body(x)
    s = torch.ones(10, requires_grad=True)
    n = twin.counts
    n_1, n_K = n.max(), n[n > 0].min()
    eps = (0.05 + 0.35 * torch.sin(math.pi * (n - n_K) / (2 * (n_1 - n_K))))[y]
    log_p = (s * network.head(h)).log_softmax(1)
    loss = -((1 - eps) * log_p[range(len(y)), y] + eps * log_p.mean(1)).mean()
    trained = [*network.head.parameters(), s]
    expected = [t - 0.2 * g for t, g in zip(trained, torch.autograd.grad(loss, trained), strict=True)]
    made.parts[1].local(client, w)
    v = client.state.v
    torch.testing.assert_close(v.flat, torch.cat([t.detach().flatten() for t in expected]), rtol=1e-4, atol=1e-6)
    statistics = [t.flatten() for t in network.body.buffers()] if shift else []
    assert len(v.buffers) == sum(map(len, statistics))
    if statistics:
        torch.testing.assert_close(v.buffers, torch.cat(statistics), rtol=1e-4, atol=1e-6)
        assert not torch.equal(v.buffers, w.body.buffers)
    network.eval()
    with torch.no_grad():
        (W, b, scale), h = expected, network.body(client.x)
        got = made.parts[1].personal(client, w)(client.x)
    torch.testing.assert_close(got, scale * F.linear(h, W, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_mislas_leaves_the_global_model(shift):
    made = run("mislas", "resnet8", epochs=1, shift_bn=shift)
    w = made.server.model
    finish(made)
    assert made.server.model == w
    for memory in made.memory.values():
        assert {name for name, _ in memory["v"].layout.weights} == {"head.weight", "head.bias", "s"}
    assert made.history[0]["metrics"]["generic/acc"] == made.history[1]["metrics"]["generic/acc"]


def test_more_smoothing_for_the_tail_is_refused():
    with pytest.raises(ValidationError, match=r"smooth_tail 0.3 is above smooth_head 0.2; exchange"):
        tiny(algorithm={"mislas": {"smooth_head": 0.2, "smooth_tail": 0.3}})
