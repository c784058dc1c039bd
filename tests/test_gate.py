"""Poisoned updates: whatever a client sends, it is turned away by name, and the round goes on or the run fails."""

import pytest
import torch
from conftest import driver, finish, tiny

from algorithms.base import Sum
from algorithms.clustered import ClusteredFedAvg
from algorithms.fedavg import FedAvg
from algorithms.params import Layout, Params
from orchestrator.gate import form, strangers
from orchestrator.worker import ClientFailed

BAD, LOCAL, UPDATE = 4, FedAvg.local, ClusteredFedAvg.update
EVERYBODY = {"clients_per_round": 6, "rounds": 2}


def filled(w, value):
    return Params(w.layout, torch.full_like(w.flat, value), w.buffers)


def reshaped(w):
    (name, shape), *rest = w.layout.weights
    return Params(Layout(((name, (shape[1], shape[0], *shape[2:])), *rest), w.layout.buffers), w.flat, w.buffers)


#: How an upload is spoilt: (model, weight) -> what is sent instead, and what is said of it.
SUMS = {
    "not a number": (lambda w, n: Sum.weighted(n, w=filled(w, float("nan"))), "'w.weights' is not finite"),
    "infinite": (lambda w, n: Sum.weighted(n, w=filled(w, float("-inf"))), "'w.weights' is not finite"),
    "huge": (lambda w, n: Sum.weighted(n, w=filled(w, 1e30)), "'w.weights' holds"),
    "another shape": (lambda w, n: Sum.weighted(n, w=reshaped(w)), r"'w.body.\S+' is float \(.*\), but the model's is"),
    "another type": (lambda w, n: Sum.weighted(n, w=w.to(torch.float16)), r"'w.body.\S+' is float16"),
    "a part of it": (lambda w, n: Sum.weighted(n, w=w.body), "'w.head.weight' is missing, but the others' is float"),
    "no such term": (lambda w, n: Sum.weighted(n, v=w), r"'w.body.\S+' is missing"),
    "one more term": (lambda w, n: Sum.weighted(n, w=w) | Sum(v=1.0), "'v' is a number, but the others send none"),
    "a negative count": (lambda w, n: Sum.weighted(-n, w=w), r"'w' counts -\d+ times"),
}  # fmt: skip


def poison(monkeypatch, spoil, who=(BAD,)):
    def local(self, client, w):
        sent = LOCAL(self, client, w)
        return spoil(sent.w / client.n, client.n) if client.id in who else sent

    monkeypatch.setattr(FedAvg, "local", local)


@pytest.mark.parametrize("how", SUMS)
def test_a_bad_upload_is_left_out_of_a_sum_and_counted(monkeypatch, how):
    poison(monkeypatch, SUMS[how][0])
    run = finish(driver(tiny(**EVERYBODY, failures={"bad_update": "skip"})))
    assert [line["metrics"]["clients/rejected"] for line in run.history] == [1, 1]
    poison(monkeypatch, lambda w, n: Sum.weighted(n, w=filled(w, float("nan"))))
    without = finish(driver(tiny(**EVERYBODY, failures={"bad_update": "skip"})))
    assert run.server.model == without.server.model, "as if that client had sent nothing"
    assert torch.isfinite(run.server.model.flat).all()


@pytest.mark.parametrize("how", SUMS)
def test_or_it_fails_the_run_by_name(monkeypatch, how):
    poison(monkeypatch, SUMS[how][0])
    with pytest.raises(ClientFailed, match=f"client {BAD}, round 0: {SUMS[how][1]}"):
        finish(driver(tiny(**EVERYBODY)))


def test_who_counts_nothing_changes_nothing(monkeypatch):
    poison(monkeypatch, lambda w, n: Sum.weighted(0, w=filled(w, 7.0)))
    nothing = finish(driver(tiny(**EVERYBODY))).server.model
    poison(monkeypatch, SUMS["not a number"][0])
    assert finish(driver(tiny(**EVERYBODY, failures={"bad_update": "skip"}))).server.model == nothing


def test_a_round_without_a_usable_update_leaves_everything_as_it_was(monkeypatch):
    skipping = tiny(**EVERYBODY, failures={"bad_update": "skip"})
    run = driver(skipping)
    before = run.server.model
    poison(monkeypatch, SUMS["infinite"][0], who=range(6))
    run = finish(driver(skipping))
    assert run.server.model == before
    assert [line["metrics"]["clients/rejected"] for line in run.history] == [6, 6]


VALUES = {
    "not a number": (lambda n, w: (n, filled(w, float("nan"))), "'1.weights' is not finite"),
    "another shape": (lambda n, w: (n, reshaped(w)), r"'1.body.\S+' is float"),
    "a part of it": (lambda n, w: (n, w.body), "'1.head.weight' is missing"),
    "text for a number": (lambda n, w: ("many", w), "'0' is str, but the others' is a number"),
}


@pytest.mark.parametrize("how", VALUES)
def test_single_values_go_through_the_same_gate(monkeypatch, how):
    def update(self, client, w):
        n, own = UPDATE(self, client, w)
        return VALUES[how][0](n, own) if client.id == BAD else (n, own)

    monkeypatch.setattr(ClusteredFedAvg, "update", update)
    changes = {**EVERYBODY, "algorithm": "clustered"}
    run = finish(driver(tiny(**changes, failures={"bad_update": "skip"})))
    assert [line["metrics"]["clients/rejected"] for line in run.history] == [1, 1]
    with pytest.raises(ClientFailed, match=f"client {BAD}, round 0: {VALUES[how][1]}"):
        finish(driver(tiny(**changes)))


def test_memories_are_gated_too(monkeypatch):
    from algorithms.ditto import Ditto

    train = Ditto.local

    def local(self, client, w):
        sent = train(self, client, w)
        client.state.v = filled(client.state.v, float("inf"))
        return sent

    monkeypatch.setattr(Ditto, "local", local)
    with pytest.raises(ClientFailed, match=r"client 0, round 0: 'memory.v.weights' is not finite"):
        finish(driver(tiny(**EVERYBODY, algorithm="ditto")))


def test_no_client_answers_twice_or_unasked():
    run = driver(tiny(**EVERYBODY))
    do = run.engine.run
    run.engine.run = lambda jobs, shared, origin: [*do(jobs, shared, origin), *do(jobs[:1], shared, origin)]
    with pytest.raises(RuntimeError, match=r"asked clients \[0, 1, 2, 3, 4, 5\], but \[0, 0, 1, 2, 3, 4, 5\] answered"):
        run.advance()


def test_entries_may_differ_in_their_keys_but_not_in_kind():
    a, b, c = (form(Sum(z=z)) for z in ({1: torch.ones(2)}, {2: torch.ones(2), 3: torch.ones(2)}, {}))
    assert strangers([(a, [0]), (b, [1]), (c, [2])]) == {}
    odd = form(Sum(z={1: torch.ones(3)}))
    assert strangers([(a, [0]), (b, [1]), (odd, [2])]) == {2: "'z.*' is float (3,), but the others' is float (2,)"}
    assert strangers([(form(torch.ones(3)), [0, 1]), (form(torch.ones(0)), [2])]) == {}, "nothing to say"
