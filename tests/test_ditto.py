"""Ditto: a global model that is FedAvg's, and personal ones held near what was received."""

import pytest
import torch
from conftest import driver, finish, tiny

from algorithms.maths import proximal
from algorithms.params import Params

ONE_STEP = {"lr": 0.1, "momentum": 0.0, "batch": 4096}


def run(knobs=None, **changes):
    return finish(driver(tiny(algorithm={"ditto": knobs or {}}, **changes)))


def client_of(run, id):
    return run.engine.worker.client(id, 0, run.memory, run.origin, 0)


def gradient(run, id, w):
    """Return the gradient of a client's full-batch loss."""
    client = client_of(run, id)
    flat = w.flat.clone().requires_grad_()
    loss = run.parts[0].objective(client, client.x, client.y, Params(w.layout, flat, w.buffers))
    return torch.autograd.grad(loss, flat)[0]


@pytest.mark.parametrize("knobs", [{}, {"prox_weight": 0.0}, {"prox_weight": 0.3, "personal_epochs": 2}])
def test_the_global_model_is_fedavgs(knobs):
    model = {"name": "resnet8", "width": 4}
    mine, fedavg = run(knobs, model=model), finish(driver(tiny(model=model)))
    assert mine.server.model == fedavg.server.model
    assert mine.history[-1]["metrics"]["generic/acc"] == fedavg.history[-1]["metrics"]["generic/acc"]


def test_without_the_pull_a_clients_model_is_trained_locally():
    """One full batch an epoch: the order of the samples makes no difference but in the last bits."""
    changes = {"local": ONE_STEP | {"epochs": 2, "momentum": 0.9}, "rounds": 3}
    mine, local = run({"prox_weight": 0.0}, **changes), finish(driver(tiny(algorithm="local", **changes)))
    assert set(mine.memory) == set(local.memory)
    for k, memory in local.memory.items():
        torch.testing.assert_close(mine.memory[k]["v"].flat, memory["w"].flat, rtol=1e-3, atol=1e-5)
    pulled = run(**changes)
    assert all(not torch.allclose(pulled.memory[k]["v"].flat, m["w"].flat, atol=1e-4) for k, m in local.memory.items())


def test_a_second_participation_by_hand():
    """v <- v - eta (grad F(v) + lambda (v - w)) with the w that was received, not the one that was sent."""
    lam = 0.7
    mine = driver(tiny(algorithm={"ditto": {"prox_weight": lam}}, local=ONE_STEP, clients_per_round=6))
    w0 = mine.server.model
    mine.advance()
    w1, v1 = mine.server.model, {k: memory["v"] for k, memory in mine.memory.items()}
    mine.advance()
    for k, v in v1.items():
        torch.testing.assert_close(v.flat, w0.flat - 0.1 * gradient(mine, k, w0), rtol=1e-4, atol=1e-6)
        by_hand = v.flat - 0.1 * (gradient(mine, k, v) + lam * (v.flat - w1.flat))
        torch.testing.assert_close(mine.memory[k]["v"].flat, by_hand, rtol=1e-4, atol=1e-6)


def test_personal_epochs_are_the_experiments_unless_given():
    runs = {
        e: run({"personal_epochs": e}, rounds=1, local={"lr": 0.05, "batch": 16, "epochs": 2}) for e in (None, 2, 1)
    }
    models = {e: {k: memory["v"] for k, memory in r.memory.items()} for e, r in runs.items()}
    assert models[None] == models[2]
    assert all(models[2][k] != models[1][k] for k in models[1])
    assert all(memory["v"] == r.origin for r in [run({"personal_epochs": 0})] for memory in r.memory.values())


def test_who_predicts_with_what():
    mine = run(rounds=1)
    stranger = next(k for k in mine.selectable if k not in mine.memory)
    for k in (stranger, *mine.memory):
        client, view = client_of(mine, k), mine.parts[0].view(mine.server)
        v = mine.memory[k]["v"] if k in mine.memory else mine.origin
        assert torch.equal(mine.parts[0].personal(client, *view)(client.x), client.logits(v, client.x))
        assert torch.equal(mine.parts[0].generic(client, *view)(client.x), client.logits(mine.server.model, client.x))


def test_the_proximal_term_by_hand():
    w, anchor = Params.pack({"a": torch.tensor([1.0, 2.0])}), Params.pack({"a": torch.tensor([0.0, 4.0])})
    held = proximal(lambda client, x, y, w: 10 * w["a"].sum(), 0.5, anchor)
    assert float(held(None, None, None, w)) == 10 * 3 + 0.25 * (1 + 4)
