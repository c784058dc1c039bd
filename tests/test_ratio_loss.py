"""Ratio Loss: the ratios by backpropagation and in closed form, and the weights that clients make of them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny

from algorithms.params import Params
from algorithms.ratio_loss import RatioLoss
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

GENERIC = {"every": 9, "what": ["generic"]}


def ratio_loss(**fields):
    return driver(tiny(algorithm={"ratio_loss": fields}, evaluate=GENERIC))


def server_of(run):
    return run.engine.worker.client(run.split.server_id, 0, {}, run.origin, 0)


def deltas(run, w):
    """Return the gradient of the classifier's weights [q, p, j] on the server's images of each class q."""
    server, found = server_of(run), []
    for q in range(10):
        weight = w["head.weight"].clone().requires_grad_()
        h = client_features(server, w, server.x[server.y == q])
        loss = F.cross_entropy(F.linear(h, weight, w["head.bias"]), torch.full((len(h),), q))
        found.append(torch.autograd.grad(loss, weight)[0].double().numpy())
    return np.stack(found)


def client_features(client, w, x):
    with torch.no_grad():
        return client.features(w, x)


def ratios_by_loops(Delta, outlier=None):
    """Return R_p as the formula is printed, over the weights where its denominator is not 0."""
    found = []
    for p in range(10):
        terms, clear = [], []
        for j in range(Delta.shape[2]):
            others = [Delta[q, p, j] for q in range(10) if q != p]
            if sum(others) != 0:
                terms.append(9 * Delta[p, p, j] / sum(others))
                clear.append(outlier is None or max(map(abs, others)) <= outlier * abs(Delta[p, p, j]))
        terms = [t for t, ok in zip(terms, clear, strict=True) if ok] or terms
        found.append(abs(np.mean(terms)))
    return np.array(found)


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}])
@pytest.mark.parametrize("normalise", [True, False])
def test_without_ratios_it_is_fedavg_bit_for_bit(model, normalise):
    fields = {"beta": 0.0, "normalise": normalise}
    ours = finish(driver(tiny(algorithm={"ratio_loss": fields}, model=model, evaluate=GENERIC)))
    plain = finish(driver(tiny(model=model, evaluate=GENERIC)))
    assert ours.server.model == plain.server.model
    mine, theirs = ours.history[0]["metrics"], plain.history[0]["metrics"]
    assert mine["bytes/up"] == theirs["bytes/up"]
    assert mine["bytes/down"] == theirs["bytes/down"] + 3 * 10 * 4  # ten weights to each of three clients


def test_it_weighs_whatever_loss_the_experiment_has():
    local = {"lr": 0.05, "batch": 16, "loss": "focal"}
    ours = finish(driver(tiny(algorithm={"ratio_loss": {"beta": 0.0}}, local=local, evaluate=GENERIC)))
    theirs = finish(driver(tiny(local=local, evaluate=GENERIC)))
    torch.testing.assert_close(ours.server.model.flat, theirs.server.model.flat, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("outlier", [None, 0.8, 0.02])
def test_ratios_are_those_of_backpropagation(outlier):
    run = finish(ratio_loss(beta=0.0))
    w = run.server.model
    expected = ratios_by_loops(deltas(run, w), outlier)
    found = RatioLoss(outlier=outlier, ratio_max=1e9).ratios(server_of(run), w)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-3)
    assert expected.max() / expected.min() > 2


def test_an_outlier_counts_only_where_it_is_clear_and_else_all_count():
    run = ratio_loss()
    everything, some, nothing = (RatioLoss(outlier=o).ratios(server_of(run), run.origin) for o in (None, 0.2, 1e-9))
    assert (some > everything).any()
    assert torch.equal(nothing, everything)


def test_ratios_of_a_classifier_that_knows_nothing():
    """All probabilities are 1/C: R_p = (C - 1)^2 mean_j hbar_p[j] / sum_{q != p} hbar_q[j]."""
    run = ratio_loss()
    zero = {name: torch.zeros_like(t) for name, t in run.origin.head.items()}
    w, server = run.origin.replace(zero), server_of(run)
    h = client_features(server, w, server.x)
    hbar = torch.stack([h[server.y == q].mean(0) for q in range(10)]).double()
    rest = hbar.sum(0) - hbar
    alive = rest > 1e-6
    expected = torch.where(alive, 81 * hbar / rest, 0).sum(1) / alive.sum(1)
    torch.testing.assert_close(RatioLoss().ratios(server, w).double(), expected, rtol=1e-3, atol=0)
    capped = RatioLoss(ratio_max=9.0).ratios(server, w)
    torch.testing.assert_close(capped.double(), expected.clamp_max(9), rtol=1e-3, atol=0)
    assert expected.min() < 9 < expected.max()


@pytest.mark.parametrize("normalise", [True, False])
def test_a_clients_step_by_hand(normalise):
    local = {"lr": 0.05, "batch": 4096, "momentum": 0.0}
    fields = {"alpha": 0.5, "beta": 0.2, "normalise": normalise}
    experiment = tiny(algorithm={"ratio_loss": fields}, local=local, clients_per_round=1, rounds=1, evaluate=GENERIC)
    run = driver(experiment)
    (k,) = run._draw(run.plan[0])
    client = run.engine.worker.client(k, 0, {}, run.origin, 0)
    weight = torch.tensor(0.5 + 0.2 * ratios_by_loops(deltas(run, run.origin))).float()[client.y]
    flat = run.origin.flat.clone().requires_grad_()
    logits = client.logits(Params(run.origin.layout, flat, run.origin.buffers), client.x)
    losses = F.cross_entropy(logits, client.y, reduction="none")
    loss = (weight * losses).sum() / (weight.sum() if normalise else len(weight))
    (slope,) = torch.autograd.grad(loss, flat)
    run.advance()
    torch.testing.assert_close(run.server.model.flat, run.origin.flat - 0.05 * slope, rtol=1e-3, atol=2e-6)


def test_classes_that_the_server_lacks_have_ratio_0():
    """The mean over the others is then over those that it has."""
    data, run = digits(), ratio_loss()
    rows = run.split.server[~np.isin(data.y_train[run.split.server], [2, 7])]
    parts = Split(run.split.train, run.split.validation, run.split.test, run.split.counts, rows)
    less = Driver(run.experiment, data, parts, InProcess(Worker(run.experiment, data, parts)))
    R = RatioLoss().ratios(server_of(less), run.origin)
    D = deltas(run, run.origin)
    D[[2, 7]] = 0
    expected = ratios_by_loops(D) * 7 / 9
    np.testing.assert_allclose(R.numpy(), expected, rtol=2e-3)
    assert R[2] == R[7] == 0
    none = Split(run.split.train, run.split.validation, run.split.test, run.split.counts)
    bare = Driver(run.experiment, data, none, InProcess(Worker(run.experiment, data, none)))
    assert not RatioLoss().ratios(server_of(bare), run.origin).any()


def test_a_class_of_no_weight_teaches_nothing():
    """With alpha 0 and no images on the server there is no weight at all: the model stays where it is."""
    run = ratio_loss(alpha=0.0)
    data, none = digits(), Split(run.split.train, run.split.validation, run.split.test, run.split.counts)
    bare = Driver(run.experiment, data, none, InProcess(Worker(run.experiment, data, none)))
    bare.advance()
    torch.testing.assert_close(bare.server.model.flat, run.origin.flat, rtol=1e-6, atol=1e-8)


def test_wrong_fields_are_refused():
    with pytest.raises(ValueError, match="no class has any weight; set one of them above 0"):
        RatioLoss(alpha=0.0, beta=0.0)
    with pytest.raises(ValueError, match=r"this one has: head\.experts"):
        driver(tiny(algorithm="ratio_loss", model={"name": "cnn_small", "experts": 2}))
