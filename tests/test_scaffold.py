"""SCAFFOLD and FedNova against explicit gradients, and the steps that both count."""

import numpy as np
import pytest
import torch
from conftest import driver as driven
from conftest import finish, tiny

from algorithms.maths import effective_steps
from algorithms.params import Params
from orchestrator.client import CALL, SAMPLING, stream
from orchestrator.experiment import Evaluate

BATCH_NORM = {"name": "resnet8", "width": 4}
THREE = {"name": "digits", "clients": 3, "alpha": 1.0, "imbalance": 10}


def driver(experiment):
    """Return a driver that does not test what nobody asks for."""
    return driven(experiment.model_copy(update={"evaluate": Evaluate(every=9, what=("generic",))}))


def drawn(run, round):
    wanted = run.experiment.clients_per_round
    rng = np.random.default_rng(stream(run.experiment.seed, SAMPLING, round))
    return sorted(rng.choice(run.selectable, wanted, replace=False).tolist()) if wanted < 3 else run.selectable


def gradient(run, k, flat, decay=0.0):
    """Return the gradient of client k's whole loss, weight decay included."""
    client = run.engine.worker.client(k, 0, {}, run.origin, 0)
    flat = flat.clone().requires_grad_()
    w = Params(run.origin.layout, flat, run.origin.buffers)
    loss = torch.nn.functional.cross_entropy(client.logits(w, client.x), client.y)
    return torch.autograd.grad(loss, flat)[0] + decay * flat.detach()


def trained(run, k, round=0):
    """Return client k's fit of plain training, as it is in the first call of a round."""
    seed = stream(run.experiment.seed, CALL, round, 0, k)
    client = run.engine.worker.client(k, 0, {}, run.origin, seed, lr=run.experiment.local.lr)
    return client.fit(run.parts[0].objective, w=run.server.model)


# Steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_effective_steps_are_how_far_a_constant_gradient_gets(m, steps):
    way, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = m * velocity + 1
        way += velocity
    assert effective_steps(steps, m) == pytest.approx(way, rel=1e-9)
    closed = (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)  # as FedNova's authors write it
    assert effective_steps(steps, m) == pytest.approx(closed, rel=1e-9, abs=1e-9)


# SCAFFOLD ------------------------------------------------------------------------------------------------------------


def scaffold_by_gradients(run, rounds, lr, m, decay, epochs):
    """Run SCAFFOLD with full batches; a control variate is the average of the gradients, not what the weights say."""
    w, K = run.origin.flat, len(run.selectable)
    c, c_k = torch.zeros_like(w), {k: torch.zeros_like(w) for k in run.selectable}
    for round in range(rounds):
        dw, dc = [], []
        for k in drawn(run, round):
            w_k, velocity, gradients = w, torch.zeros_like(w), []
            for _ in range(epochs):
                gradients.append(gradient(run, k, w_k, decay))
                velocity = m * velocity + gradients[-1] - c_k[k] + c
                w_k = w_k - lr * velocity
            shares = torch.tensor([(1 - m ** (epochs - s)) / (1 - m) for s in range(epochs)])
            average = (shares[:, None] * torch.stack(gradients)).sum(0) / shares.sum()
            dw.append(w_k - w)
            dc.append(average - c_k[k])
            c_k[k] = average
        w = w + torch.stack(dw).mean(0)
        c = c + len(dc) / K * torch.stack(dc).mean(0)
    return w, c, c_k


@pytest.mark.parametrize(("m", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.05)])
def test_scaffold_is_what_its_gradients_say(m, decay):
    """Three rounds of three steps with two of three clients; the third step of a round would show a wrong average."""
    local = {"lr": 0.02, "momentum": m, "weight_decay": decay, "batch": 4096, "epochs": 3}
    run = driver(tiny(algorithm="scaffold", data=THREE, local=local, clients_per_round=2, rounds=3))
    w, c, c_k = scaffold_by_gradients(run, 3, 0.02, m, decay, 3)
    finish(run)
    torch.testing.assert_close(run.server.model.flat, w, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(run.server.c, c, rtol=1e-3, atol=1e-4)
    for k, memory in run.memory.items():
        torch.testing.assert_close(memory["c"], c_k[k], rtol=1e-3, atol=2e-4)
    assert len(run.memory) == 3
    assert c.norm() > 0.05


def test_the_first_visit_is_fedavgs():
    scaffold, fedavg = (driver(tiny(algorithm=name, clients_per_round=1)) for name in ("scaffold", "fedavg"))
    for run in scaffold, fedavg:
        run.advance()
    torch.testing.assert_close(scaffold.server.model.flat, fedavg.server.model.flat, rtol=1e-6, atol=1e-7)
    assert scaffold.history[0]["metrics"]["train/loss"] == fedavg.history[0]["metrics"]["train/loss"]


def test_clients_count_alike_whatever_their_size():
    run = driver(tiny(algorithm="scaffold"))
    models = [trained(run, k).w.flat for k in run._draw(run.plan[0])]
    run.advance()
    torch.testing.assert_close(run.server.model.flat, torch.stack(models).mean(0), rtol=1e-5, atol=1e-7)


def test_the_servers_variate_is_the_mean_of_the_clients():
    """Over all who have data, the never drawn with 0; two of these twelve have none."""
    data = {"name": "digits", "clients": 12, "alpha": 0.02, "imbalance": 10}
    run = finish(driver(tiny(algorithm="scaffold", data=data, rounds=3, local={"lr": 0.01, "batch": 16})))
    assert len(run.memory) < len(run.selectable) < 12
    mean = torch.stack([memory["c"] for memory in run.memory.values()]).sum(0) / len(run.selectable)
    torch.testing.assert_close(run.server.c, mean, rtol=1e-4, atol=1e-6)


def test_the_servers_step_leaves_batch_norm_buffers_alone():
    one, two = (driver(tiny(algorithm={"scaffold": {"global_lr": g}}, model=BATCH_NORM)) for g in (1.0, 2.0))
    start = one.server.model
    for run in one, two:
        run.advance()
    assert torch.equal(one.server.model.buffers, two.server.model.buffers)
    assert not torch.equal(one.server.model.buffers, start.buffers)
    twice = 2 * (one.server.model.flat - start.flat)
    torch.testing.assert_close(two.server.model.flat - start.flat, twice, rtol=1e-3, atol=1e-6)


# FedNova -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["cnn_small", BATCH_NORM], ids=["no batch norm", "batch norm"])
def test_fednova_with_equal_steps_is_fedavg(model):
    local = {"lr": 0.02, "batch": 4096, "epochs": 3, "weight_decay": 1e-3}
    nova, fedavg = (finish(driver(tiny(algorithm=name, model=model, local=local))) for name in ("fednova", "fedavg"))
    torch.testing.assert_close(nova.server.model.flat, fedavg.server.model.flat, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(nova.server.model.buffers, fedavg.server.model.buffers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("m", [0.0, 0.9])
def test_fednova_with_unequal_steps_by_hand(m):
    local = {"lr": 0.02, "batch": 16, "momentum": m}
    run = driver(tiny(algorithm="fednova", local=local, model=BATCH_NORM))
    w = run.server.model
    fits = {k: trained(run, k) for k in run._draw(run.plan[0])}
    n = {k: len(run.split.train[k]) for k in fits}
    a = {k: (fit.steps - m * (1 - m**fit.steps) / (1 - m)) / (1 - m) for k, fit in fits.items()}
    assert len({fit.steps for fit in fits.values()}) == 3
    p = {k: n[k] / sum(n.values()) for k in n}
    tau_eff = sum(p[k] * a[k] for k in n)
    d = sum(p[k] * (w.flat - fits[k].w.flat).double() / (0.02 * a[k]) for k in n)
    run.advance()
    torch.testing.assert_close(run.server.model.flat.double(), w.flat - 0.02 * tau_eff * d, rtol=1e-5, atol=1e-7)
    buffers = sum(p[k] * fits[k].w.buffers.double() for k in n)
    torch.testing.assert_close(run.server.model.buffers.double(), buffers, rtol=1e-5, atol=1e-7)
