"""BalanceFL: its covariance and its loss against numpy, and one step of a client against plain PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny

from algorithms.balancefl import BalanceFL
from algorithms.params import Params
from orchestrator.client import CALL, stream

LOCAL = {"lr": 0.05, "batch": 4096, "momentum": 0.0}


def balancefl(local=LOCAL, **fields):
    return driver(tiny(algorithm={"balancefl": fields}, local=local, clients_per_round=1, rounds=1))


def log_softmax(z):
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def loss_by_numpy(z, perturbed, teacher, y, T=2.0, lam=1.0, ent=0.002):
    """Return the objective, over the columns of the classes in the batch and over those of the others."""
    owned = np.unique(y)
    missing = np.setdiff1d(np.arange(z.shape[1]), owned)
    ce = -log_softmax(perturbed[:, owned])[np.arange(len(y)), np.searchsorted(owned, y)].mean()
    target = np.exp(log_softmax(teacher[:, missing] / T))
    inherited = -(target * log_softmax(z[:, missing] / T)).sum(1).mean()
    p = np.exp(log_softmax(z[:, owned]))
    return ce + lam * inherited - ent * -(p * np.log(p)).sum()


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}])
def test_the_covariance_is_the_mean_over_classes_by_their_counts(model):
    run = driver(tiny(algorithm="balancefl", model=model))
    for k in run.selectable:
        client = run.engine.worker.client(k, 0, {}, run.origin, 0)
        z, y = client.embed(run.origin).double().numpy(), client.y.numpy()
        M = np.zeros((z.shape[1], z.shape[1]))
        for c in np.unique(y):
            if (y == c).sum() > 1:
                M += (y == c).sum() * np.cov(z[y == c].T)
        A = run.parts[0].spread(client, run.origin)
        assert A.shape == z.shape
        np.testing.assert_allclose(
            (A.double().T @ A.double()).numpy(), M / len(y), rtol=1e-3, atol=1e-5 * M.max() / len(y)
        )
    assert (run.split.counts == 1).any()  # a class of one sample is among them


@pytest.mark.parametrize("y", [[0, 2, 2, 5, 0], [1, 1, 1, 1, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 5]])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "inherit_weight": 3.0, "entropy_weight": 0.5}])
def test_the_loss_by_numpy(y, fields):
    rng = np.random.default_rng(3)
    z, perturbed, teacher = rng.normal(0, 2, (3, 5, 6))
    run = balancefl()
    client = run.engine.worker.client(run.selectable[0], 0, {}, run.origin, 0)
    tensors = (torch.tensor(v) for v in (z, perturbed, teacher, y))
    loss = BalanceFL(**fields).loss(client, *tensors)
    values = {"temperature": 2.0, "inherit_weight": 1.0, "entropy_weight": 0.002} | fields
    assert float(loss) == pytest.approx(loss_by_numpy(z, perturbed, teacher, np.array(y), *values.values()), rel=1e-6)


def test_nothing_is_inherited_where_no_class_or_only_one_is_missing():
    run = balancefl()
    client = run.engine.worker.client(run.selectable[0], 0, {}, run.origin, 0)
    z = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for y in ([0, 1, 2, 3], [0, 1, 2, 2]):
        with_it, without = (
            BalanceFL(inherit_weight=lam).loss(client, z[0], z[1], z[2], torch.tensor(y)) for lam in (5.0, 0.0)
        )
        assert with_it.item() == pytest.approx(without.item())
        (slope,) = torch.autograd.grad(with_it, z)
        assert torch.isfinite(slope).all()
        assert not slope[2].any()  # the teacher learns nothing


def test_a_clients_steps_by_hand():
    """Two batches: sampled by class, small classes perturbed, the received model as teacher of both."""
    run = balancefl(LOCAL | {"epochs": 2}, entropy_weight=0.05, inherit_weight=4.0)
    (k,) = run._draw(run.plan[0])
    client = run.engine.worker.client(k, 0, {}, run.origin, 0)
    n, y, losses = client.n, client.y, []
    rng = torch.Generator().manual_seed(stream(0, CALL, 0, 0, k))
    members = [torch.nonzero(y == c).flatten() for c in y.unique()]
    counts = torch.bincount(y, minlength=10)
    owned, missing = counts > 0, counts == 0
    A = run.parts[0].spread(client, run.origin)
    flat = run.origin.flat
    for _ in range(2):
        classes, places = torch.randint(len(members), (n,), generator=rng), torch.rand(n, generator=rng)
        rows = torch.stack([members[c][int(u * len(members[c]))] for c, u in zip(classes, places, strict=True)])
        rows = rows[torch.randperm(n, generator=rng)]
        noisy = torch.rand(n, generator=rng) < (1 - counts / counts.max())[y[rows]]
        assert 0.3 < noisy.float().mean() < 1
        assert not noisy[y[rows] == counts.argmax()].any()
        noise = torch.randn(n, n, generator=rng) @ A
        flat = flat.clone().requires_grad_()
        w = Params(run.origin.layout, flat, run.origin.buffers)
        h = client.features(w, client.x[rows])
        z, perturbed = (F.linear(x, w["head.weight"], w["head.bias"]) for x in (h, h + noisy[:, None] * noise))
        target = F.softmax(client.logits(run.origin, client.x[rows])[:, missing] / 2, 1)
        loss = F.cross_entropy(perturbed[:, owned], torch.cumsum(owned, 0)[y[rows]] - 1)
        p = F.softmax(z[:, owned], 1)
        loss = loss + 4 * F.cross_entropy(z[:, missing] / 2, target) + 0.05 * (p * p.log()).sum()
        (slope,) = torch.autograd.grad(loss, flat)
        flat = flat.detach() - 0.05 * slope
        losses.append(loss.item())
    run.advance()
    torch.testing.assert_close(run.server.model.flat, flat, rtol=1e-4, atol=2e-6)
    assert run.history[0]["metrics"]["train/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_classes_that_fedavg_forgets_are_learnt():
    """Four rounds on long-tailed digits: what it is all for."""
    settings = {"rounds": 4, "clients_per_round": 6, "evaluate": {"every": 9, "what": ["generic"]}}
    ours, plain = (finish(driver(tiny(algorithm=name, **settings))) for name in ("balancefl", "fedavg"))
    assert ours.history[-1]["metrics"]["generic/acc"] > plain.history[-1]["metrics"]["generic/acc"] + 0.05
