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
