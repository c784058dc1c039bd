"""What the server owns, and what it does with it: which images, and whose work stays unchanged."""

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny

from algorithms.fedavg import FedAvg
from orchestrator.data import Split, describe, split
from orchestrator.data.partition import long_tail
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.worker import ClientFailed, Worker

OPTIONS = {"clients": 6, "alpha": 0.5, "imbalance": 10, "seed": 3}


def owned(images, **options):
    return split(digits(), **OPTIONS | options, server_images=images)


# Which images --------------------------------------------------------------------------------------------------------


def test_the_server_has_so_many_of_each_class_and_takes_none_from_clients():
    made, y = owned(5), digits().y_train
    assert np.bincount(y[made.server]).tolist() == [5] * 10
    assert len(set(made.server)) == 50
    assert np.array_equal(made.server, np.sort(made.server))
    plain = split(digits(), **OPTIONS)
    assert plain.digest == made.digest
    for a, b in zip(plain.train, made.train, strict=True):
        assert np.array_equal(a, b)
    assert len(plain.server) == 0
    assert describe(digits(), made)["server"] == 50


def test_images_that_no_client_has_come_first():
    """The long tail leaves out few images of the first class and many of the last."""
    y = digits().y_train
    kept = long_tail(y, 10, 10)
    left = np.bincount(y, minlength=10) - np.bincount(y[kept], minlength=10)
    images = int(left[1]) + 3
    assert left[0] < left[1] < images < left[2]
    made = owned(images, validation=0.3)
    train = np.concatenate(made.train)
    from_clients = np.bincount(y[np.intersect1d(made.server, train)], minlength=10)
    assert from_clients.tolist() == [images - left[0], 3, *[0] * 8]
    assert np.bincount(y[made.server], minlength=10).tolist() == [images] * 10
    assert not set(made.server) & set(np.concatenate(made.validation))


def test_where_nothing_was_left_out_all_come_from_clients_and_no_more_than_there_are():
    y = digits().y_train
    assert set(owned(4, imbalance=1).server) <= set(range(len(y)))
    everything = owned(10_000, imbalance=1)
    assert np.array_equal(everything.server, np.arange(len(y)))
    tail = owned(10_000)
    assert np.array_equal(tail.server, np.arange(len(y)))


def test_the_draw_follows_the_seed_and_nothing_else():
    assert np.array_equal(owned(5).server, owned(5, alpha=2.0, clients=9, partition="grouped_equal").server)
    assert not np.array_equal(owned(5).server, owned(5, seed=4).server)


def test_only_an_algorithm_that_asks_gets_any():
    assert len(split_for(tiny(), digits()).server) == 0
    chain = ["fedavg", {"ratio_loss": {"images_per_class": 3}}, "finetune"]
    assert len(split_for(tiny(algorithm=chain), digits()).server) == 30


def test_it_survives_saving_also_in_a_file_from_before(tmp_path):
    made, path = owned(5), tmp_path / "split.npz"
    made.save(path)
    assert np.array_equal(Split.read(path).server, made.server)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive if name != "server"}
    np.savez(path, **arrays)
    assert len(Split.read(path).server) == 0


# What it does with them ----------------------------------------------------------------------------------------------


def asking(monkeypatch, probe, **changes):
    """Return a run of a FedAvg that lets the server do `probe` before the clients train, and what it answered."""
    answers = []

    def train(self, server, clients):
        answers.append([clients.server(self.probe, server.model), clients.only([0]).server(self.probe, server.model)])
        total = clients.sum(self.local, server.model)
        server.model = total.w / total.n

    probe.__name__ = "probe"
    monkeypatch.setattr(FedAvg, "probe", probe, raising=False)
    monkeypatch.setattr(FedAvg, "train", train)
    experiment, data = tiny(evaluate={"every": 9, "what": ["generic"]}, **changes), digits()
    parts = split(data, clients=6, alpha=0.5, imbalance=10, server_images=4)
    return Driver(experiment, data, parts, InProcess(Worker(experiment, data, parts))), answers


def test_it_works_like_a_client_with_its_own_images(monkeypatch):
    def probe(self, client, w):
        assert client.state.fields() == {}
        fit = client.fit(self.objective, w=w)
        return {
            "y": client.y,
            "n": client.n,
            "counts": client.counts,
            "owned": client.owned,
            "w": fit.w,
            "id": client.id,
        }

    plain = finish(driver(tiny(evaluate={"every": 9, "what": ["generic"]})))
    run, answers = asking(monkeypatch, probe)
    finish(run)
    (first, second), _ = answers
    assert torch.equal(first["y"], torch.from_numpy(digits().y_train[run.split.server]))
    assert (first["n"], first["id"]) == (40, 6)
    assert first["counts"].tolist() == [4] * 10
    assert first["w"] != run.origin
    assert first["w"] != second["w"]  # the second call shuffles anew
    # What clients did, and what is said of them, is as if the server had done nothing.
    assert run.server.model == plain.server.model
    assert run.memory == {}
    for ours, theirs in zip(run.history, plain.history, strict=True):
        for name in ("train/loss", "bytes/up", "bytes/down", "generic/acc"):
            assert ours["metrics"].get(name) == theirs["metrics"].get(name)


def test_clients_priors_do_not_count_the_servers_images(monkeypatch):
    def probe(self, client, w):
        return client.prior

    local = {"lr": 0.05, "batch": 16, "loss": "balanced_softmax"}
    run, answers = asking(monkeypatch, probe, local=local | {"prior": "global"})
    run.advance()
    counts = run.split.counts.sum(0)
    np.testing.assert_allclose(answers[0][0].numpy(), counts / counts.sum(), rtol=1e-5)
    run, answers = asking(monkeypatch, probe, local=local | {"prior": "local"})
    run.advance()
    np.testing.assert_allclose(answers[0][0].numpy(), np.full(10, 0.1), rtol=1e-5)


def test_it_keeps_no_clients_memory(monkeypatch):
    monkeypatch.setattr(FedAvg, "client_state", lambda self, client, model: {"seen": 0})
    run, answers = asking(monkeypatch, lambda self, client, w: len(client.state.fields()))
    run.advance()
    assert answers == [[0, 0]]
    assert sorted(run.memory) == run._draw(run.plan[0])


def test_a_failure_names_the_server(monkeypatch):
    def probe(self, client, w):
        raise KeyError("lost")

    run, _ = asking(monkeypatch, probe)
    with pytest.raises(ClientFailed, match=r"^the server, round 0, FedAvg\.probe: 'lost'"):
        run.advance()


def test_its_result_is_never_left_out(monkeypatch):
    """A client's bad update may be skipped, but without the server's there is nothing to go on with."""
    run, _ = asking(monkeypatch, lambda self, client, w: w * float("nan"), failures={"bad_update": "skip"})
    with pytest.raises(ClientFailed, match=r"the server, round 0: '.*weights' is not finite"):
        run.advance()
