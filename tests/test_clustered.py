"""Clustered FedAvg: the weights that clusters give to clients, and whose model a client is tested with."""

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny

from orchestrator.client import CALL, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

LOCAL = {"lr": 0.05, "batch": 16}


def two_kinds(sizes, **changes):
    """Return a run of clients 0 and 2 with the classes 0 to 4, and 1 and 3 with 5 to 9, so many images of each."""
    data = digits()
    rows = [np.flatnonzero(data.y_train == c) for c in range(10)]
    train = tuple(
        np.sort(np.concatenate([rows[c][40 * (k // 2) :][:size] for c in range(5 * (k % 2), 5 * (k % 2) + 5)]))
        for k, size in enumerate(sizes)
    )
    counts = np.stack([np.bincount(data.y_train[t], minlength=10) for t in train])
    tests = tuple(np.flatnonzero(data.y_test == 5 * (k % 2))[:5] for k in range(4))
    parts = Split(train, tuple(t[:0] for t in train), tests, counts)
    base = {"data": {"name": "digits", "clients": 4}, "clients_per_round": 4, "local": LOCAL}
    base["evaluate"] = {"every": 9, "what": ["generic"]}
    experiment = tiny(**base | changes)
    return Driver(experiment, data, parts, InProcess(Worker(experiment, data, parts)))


def clustered(num_clusters, **fields):
    return {"clustered": {"num_clusters": num_clusters, **fields}}


def updates(run):
    """Return each client's update in the coming first round."""
    seeds = {k: stream(0, CALL, 0, 0, k) for k in run._draw(run.plan[0])}
    clients = {k: run.engine.worker.client(k, 0, {}, run.origin, seed, lr=0.05) for k, seed in seeds.items()}
    return {k: run.parts[0].update(client, run.origin)[1] for k, client in clients.items()}


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}])
def test_a_cluster_for_each_client_is_fedavg(model):
    # One round: rounding grows with training, by kinks of the network.
    own = finish(driver(tiny(algorithm=clustered(3), model=model, rounds=1))).server.model
    plain = finish(driver(tiny(model=model, rounds=1))).server.model
    torch.testing.assert_close(own.flat, plain.flat, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own.buffers, plain.buffers, rtol=1e-4, atol=1e-5)


def test_with_clients_of_one_size_clusters_change_nothing_for_the_global_model():
    for kappa in (1, 2, 3):
        own = finish(two_kinds([12] * 4, algorithm=clustered(kappa))).server.model
        torch.testing.assert_close(own.flat, finish(two_kinds([12] * 4)).server.model.flat, rtol=1e-4, atol=1e-6)


def test_clients_of_one_kind_share_their_update_and_its_weight():
    """Sizes 150, 25, 50, 75 in two clusters: j's weight is its cluster's samples over n times its cluster's clients."""
    run = two_kinds([30, 5, 10, 15], algorithm=clustered(2))
    delta = {k: d.flat.double() for k, d in updates(run).items()}
    run.advance()
    weight = {0: 200 / 300 / 2, 2: 200 / 300 / 2, 1: 100 / 300 / 2, 3: 100 / 300 / 2}
    expected = run.origin.flat + sum(weight[k] * delta[k] for k in range(4))
    torch.testing.assert_close(run.server.model.flat.double(), expected, rtol=1e-5, atol=1e-7)
    for k, other in {0: 2, 1: 3}.items():
        mean = run.origin.flat + (delta[k] + delta[other]) / 2
        for own in (k, other):
            torch.testing.assert_close(run.memory[own]["w"].flat.double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kappa", [1, 2, 3, 4, 9])
def test_there_are_as_many_clusters_as_wanted_even_where_two_are_natural(kappa):
    run = two_kinds([30, 5, 10, 15], algorithm=clustered(kappa))
    delta = list(updates(run).values())
    assert len(set(run.parts[0].cluster(delta, seed=0))) == min(kappa, 4)


def test_one_cluster_is_the_plain_mean():
    run = two_kinds([30, 5, 10, 15], algorithm=clustered(1))
    mean = sum(d.flat for d in updates(run).values()) / 4
    run.advance()
    torch.testing.assert_close(run.server.model.flat, run.origin.flat + mean, rtol=1e-5, atol=1e-7)


def test_it_is_mupfls_interface_alone():
    fields = {"bavd": False, "pkcf": False, "kappa_min": 2, "kappa_max": 2, "eval_model": "cluster"}
    settings = {"rounds": 2, "clients_per_round": 5}
    theirs = finish(driver(tiny(algorithm={"mupfl": fields}, **settings)))
    ours = finish(driver(tiny(algorithm=clustered(2), **settings)))
    assert ours.server.model == theirs.server.model
    assert {k: m["w"] for k, m in ours.memory.items()} == {k: m["w"] for k, m in theirs.memory.items()}
    mine, other = ours.history[-1]["metrics"], theirs.history[-1]["metrics"]
    assert {k: v for k, v in mine.items() if "/acc" in k} == {k: v for k, v in other.items() if "/acc" in k}


def test_a_client_is_tested_with_its_clusters_model_or_with_everybodys():
    own = driver(tiny(algorithm=clustered(2)))
    shared = driver(tiny(algorithm=clustered(2, eval_model="global")))
    for run in own, shared:
        run.advance()
    assert own.server.model == shared.server.model
    assert shared.memory == {}
    view = own.parts[0].view(own.server)
    for k in own.selectable:
        client, other = (run.engine.worker.client(k, 0, run.memory, run.origin, 0) for run in (own, shared))
        w = own.memory[k]["w"] if k in own.memory else own.server.model
        assert torch.equal(own.parts[0].personal(client, *view)(client.x), client.logits(w, client.x))
        plain = client.logits(own.server.model, client.x)
        assert torch.equal(shared.parts[0].personal(other, *view)(client.x), plain)
        assert torch.equal(own.parts[0].generic(client, *view)(client.x), plain)
    assert len(own.memory) == 3
