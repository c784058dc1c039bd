"""FED-RoD: the generic half is FedAvg with a balanced softmax, the personal half learns beside it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny
from torch import nn

from algorithms.fedrod import FedRoD
from algorithms.params import Params

LOCAL = {"lr": 0.05, "batch": 32, "momentum": 0.9, "epochs": 2}
NETS = ["cnn_small", {"name": "resnet8", "width": 4}]
EVEN = {"name": "digits", "clients": 6, "alpha": 100.0, "imbalance": 1}  # everybody has every class


def begin(knobs=None, **changes):
    return driver(tiny(**{"local": LOCAL, "algorithm": {"fedrod": knobs or {}}} | changes))


def client_of(run, id, seed=0, lr=0.05):
    return run.engine.worker.client(id, 0, run.memory, run.origin, seed, lr=lr)


@pytest.mark.parametrize("net", NETS, ids=["cnn", "resnet"])
def test_the_generic_half_is_fedavg_with_balanced_softmax_and_the_local_prior(net):
    balanced = LOCAL | {"epochs": 1, "loss": "balanced_softmax", "prior": "local"}
    mine = begin(model=net, data=EVEN, local=LOCAL | {"epochs": 1})
    assert (mine.split.counts > 0).all()
    finish(mine)
    fedavg = finish(driver(tiny(model=net, data=EVEN, local=balanced)))
    assert mine.server.model == fedavg.server.model
    assert mine.history[-1]["metrics"]["generic/acc"] == fedavg.history[-1]["metrics"]["generic/acc"]
    plain = finish(driver(tiny(model=net, data=EVEN, local=LOCAL | {"epochs": 1})))
    assert mine.server.model != plain.server.model


def test_with_counts_to_the_power_of_zero_it_is_fedavg():
    mine, fedavg = finish(begin({"count_power": 0.0})), finish(driver(tiny(local=LOCAL)))
    assert (mine.split.counts == 0).any()
    assert mine.server.model == fedavg.server.model


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("net", NETS, ids=["cnn", "resnet"])
def test_a_clients_epochs_are_two_optimizers_on_one_forward_pass(net, power):
    run = begin({"count_power": power}, model=net, local=LOCAL | {"weight_decay": 1e-3})
    client, twin = (client_of(run, 1, seed=7) for _ in range(2))
    sent = run.parts[0].local(client, run.server.model)

    model = copy.deepcopy(run.engine.worker.network).train()
    personal = copy.deepcopy(model.head)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3) for m in (model, personal)]
    missing = client.counts == 0
    assert missing.any()
    for x, y in twin.batches(2):
        h = model.body(x)
        z = model.head(h)
        offset = power * client.counts.clamp_min(1).log()
        losses = (
            F.cross_entropy((z + offset).masked_fill(missing, -torch.inf), y),
            F.cross_entropy(z.detach() + personal(h.detach()), y),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    expected = Params.of(model)
    torch.testing.assert_close((sent.w / sent.n).flat, expected.flat, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close((sent.w / sent.n).buffers, expected.buffers, rtol=1e-3, atol=1e-5)
    own = Params.of(nn.ModuleDict({"head": personal}))
    torch.testing.assert_close(client.state.psi.flat, own.flat, rtol=1e-3, atol=1e-5)
    assert sent.n == client.n


def test_a_class_without_samples_is_left_alone_by_the_generic_half():
    run = begin()
    client = client_of(run, 0)
    assert 0 < len(client.owned) < 10
    w = run.parts[0].local(client, run.server.model)
    change = (w.w / w.n)["head.weight"] - run.server.model["head.weight"]
    assert change[client.owned].abs().amax(1).min() > 1e-4
    assert change[client.counts == 0].abs().max() < 1e-6  # but for rounding in n w / n
    personal = client.state.psi["head.weight"] - run.server.model["head.weight"]
    assert personal.abs().amax(1).min() > 1e-5


def test_logits_add_up():
    run = finish(begin(rounds=1))
    stranger = next(k for k in run.selectable if k not in run.memory)
    for k in (stranger, *run.memory):
        client, w = client_of(run, k), run.server.model
        psi = run.memory[k]["psi"] if k in run.memory else run.origin.head
        with torch.no_grad():
            h = client.features(w, client.x)
            expected = h @ (w["head.weight"] + psi["head.weight"]).T + w["head.bias"] + psi["head.bias"]
            torch.testing.assert_close(FedRoD().personal(client, w)(client.x), expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(FedRoD().generic(client, w)(client.x), client.logits(w, client.x))


def test_the_personal_half_learns_what_is_the_clients_own():
    run = finish(begin(rounds=10, clients_per_round=6, evaluate={"every": 10}))
    last = run.history[-1]["metrics"]
    fedavg = finish(driver(tiny(local=LOCAL, rounds=10, clients_per_round=6, evaluate={"every": 10})))
    assert last["personal/acc_dist"] > fedavg.history[-1]["metrics"]["personal/acc_dist"]
    assert last["generic/acc"] > 0.5
