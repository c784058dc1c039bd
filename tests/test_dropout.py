"""Clients that do not answer: who is away follows from the seed, and every method goes on with the others."""

import pytest
from conftest import driver, finish, tiny
from test_every_algorithm import NAMES, assert_finite, experiment

from algorithms.fedavg import FedAvg


@pytest.mark.parametrize("name", NAMES)
def test_every_method_goes_on_without_some(name):
    run = finish(driver(experiment(name, failures={"dropout": 0.5})))
    assert_finite(run)
    assert all(run.history[i]["metrics"]["clients/dropped"] > 0 for i in (0, 1))


TRAIN = FedAvg.train


def heard(experiment, monkeypatch):
    """Run, and return who has trained in each round, and the run."""
    log = []

    def noting(self, server, clients):
        log.append(set(clients.ids))
        TRAIN(self, server, clients)

    monkeypatch.setattr(FedAvg, "train", noting)
    return log, finish(driver(experiment))


def test_those_who_answer_are_a_part_of_those_drawn(monkeypatch):
    changes = {"rounds": 40, "clients_per_round": 4, "evaluate": {"every": 40}}
    drawn, _ = heard(tiny(**changes), monkeypatch)
    there, run = heard(tiny(**changes, failures={"dropout": 0.3}), monkeypatch)
    assert all(some <= those for some, those in zip(there, drawn, strict=True))
    assert all(there), "somebody always answers"
    away = [len(those - some) for some, those in zip(there, drawn, strict=True)]
    assert 0.2 < sum(away) / 160 < 0.4
    assert [line["metrics"].get("clients/dropped", 0) for line in run.history] == away


def test_who_is_away_survives_a_resume(tmp_path):
    broken = tiny(rounds=6, failures={"dropout": 0.5, "checkpoint_s": 0})
    run = driver(broken, tmp_path)
    for _ in range(3):
        run.advance()
    assert finish(driver(broken, tmp_path)).fingerprint() == finish(driver(broken)).fingerprint()


def test_groups_are_made_of_those_who_told_their_labels():
    local = {"lr": 0.05, "batch": 16, "loss": "balanced_softmax", "prior": "gpi"}
    ldae = {"ldae": {"grouping": "label_distribution", "num_experts": 2}}
    run = finish(driver(tiny(algorithm=ldae, local=local, failures={"dropout": 0.5})))
    assert sum(map(len, run.server.groups)) < 6


# Stragglers ---------------------------------------------------------------------------------------------------------


def steps_taken(experiment, monkeypatch):
    """Return how many steps every client has taken in every round."""
    log, local = {}, FedAvg.local

    def counting(self, client, w):
        fit, taken = client.fit, []
        client.fit = lambda *a, **k: taken.append(fit(*a, **k)) or taken[-1]
        sent = local(self, client, w)
        log.setdefault(len(run.history), {})[client.id] = taken[0].steps
        return sent

    counting.__name__ = "local"
    with monkeypatch.context() as patched:
        patched.setattr(FedAvg, "local", counting)
        run = driver(experiment)
        finish(run)
    return log


def test_stragglers_manage_a_part_of_their_steps(monkeypatch):
    changes = {"rounds": 20, "clients_per_round": 6, "evaluate": {"every": 20}, "local": {"lr": 0.01, "epochs": 2}}
    full = steps_taken(tiny(**changes), monkeypatch)
    slow = steps_taken(tiny(**changes, failures={"stragglers": 0.5}), monkeypatch)
    pairs = [(slow[r][id], full[r][id]) for r in full for id in full[r]]
    assert all(1 <= some <= every for some, every in pairs)
    late = [some / every for some, every in pairs if some < every]
    assert 0.35 < len(late) / len(pairs) < 0.65
    assert 0.35 < sum(late) / len(late) < 0.65, "uniform in how much they manage"
    assert len({frozenset(id for id in slow[r] if slow[r][id] < full[r][id]) for r in full}) > 5, "not always the same"


def test_stragglers_follow_the_seed():
    slow = tiny(rounds=4, failures={"stragglers": 0.7})
    assert finish(driver(slow)).fingerprint() == finish(driver(slow)).fingerprint()
    assert finish(driver(slow)).fingerprint() != finish(driver(tiny(rounds=4))).fingerprint()
