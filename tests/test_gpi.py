"""The proxy round: what classifier updates tell about classes, by hand and on digits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, tiny

import algorithms
from algorithms.gpi import GPI
from orchestrator.client import CALL, stream
from orchestrator.data import Split, load
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

LR = 0.05
LOCAL = {"lr": LR, "batch": 64, "loss": "balanced_softmax", "prior": "gpi"}


def run_of(dataset, counts, **changes):
    """Return a run whose clients have these counts, [clients][classes], of the data set's images."""
    rows = {c: iter(np.flatnonzero(dataset.y_train == c)) for c in range(dataset.classes)}
    train = tuple(np.sort([next(rows[c]) for c, n in enumerate(mine) for _ in range(n)]) for mine in counts)
    none = tuple(np.zeros(0, int) for _ in counts)
    parts = Split(train=train, validation=none, test=tuple(np.arange(2) for _ in counts), counts=np.array(counts))
    data = {"name": dataset.name, "clients": len(counts), "imbalance": 1}
    chosen = tiny(data=data, clients_per_round=1, **changes)
    return Driver(chosen, dataset, parts, InProcess(Worker(chosen, dataset, parts)))


@pytest.fixture
def twins(tmp_path):
    """Return three classes whose images are all the same two, in turn: features do not depend on the class."""
    two = np.random.default_rng(0).integers(0, 256, (2, 8, 8), dtype=np.uint8)
    x, y = np.tile(two, (60, 1, 1)), np.repeat(np.arange(3), 40)
    np.savez(tmp_path / "twins.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return load(str(tmp_path / "twins.npz"))


def start(run):
    """Let a run begin from a classifier of zeros, and return the mean over the images of sum_j h_j there."""
    model = run.server.model
    run.server.model = model = model.replace({name: torch.zeros_like(t) for name, t in model.head.items()})
    client = run.engine.worker.client(0, 0, {}, model, 0)
    with torch.no_grad():
        return float(client.features(model, client.x[:2]).sum(1).mean())


COUNTS = [[8, 2, 2], [4, 16, 4]]


def test_a_proxy_is_the_surplus_over_a_uniform_guess(twins):
    run = run_of(twins, COUNTS, algorithm=["gpi", "fedavg"], local=LOCAL)
    s = start(run)
    run.advance()
    assert s > 0.1
    for k, counts in enumerate(COUNTS):
        n_k = sum(counts)
        expected = [LR / n_k * (n - n_k / 3) * s for n in counts]
        torch.testing.assert_close(run.server.proxies[k], torch.tensor(expected), rtol=1e-4, atol=1e-6)
        assert (run.server.proxies[k] > 0).tolist() == [n > n_k / 3 for n in counts]


@pytest.mark.parametrize(
    ("fields", "pi"),
    [
        # Only a client's largest class is above a third: its 12 or 24 samples go there, and nothing falls below 5.
        ({}, [12, 24, 5]),
        ({"floor": 0.5}, [12, 24, 0.5]),
        # n_k/n * (1/3) lr s for the largest class of each; the third class gets a thousandth of the largest.
        ({"normalise": False}, [1, 2, 0.002]),
    ],
)
def test_the_prior_by_hand(twins, fields, pi):
    run = run_of(twins, COUNTS, algorithm=[{"gpi": fields}, "fedavg"], local=LOCAL)
    start(run)
    run.advance()
    torch.testing.assert_close(run.server.prior, torch.tensor(pi) / sum(pi), rtol=1e-4, atol=0)


def test_each_clients_samples_are_shared_out_by_its_proxy():
    omega = torch.tensor([0.6, -3.0, 0.2, 0.2])
    assert GPI().weigh(50, omega).tolist() == [30, 0, 10, 10]
    assert GPI(normalise=False).weigh(50, omega).tolist() == pytest.approx([30, 0, 10, 10])
    assert GPI().weigh(50, 7 * omega).tolist() == [30, 0, 10, 10], "the scale of a proxy says nothing"
    assert GPI(normalise=False).weigh(50, 7 * omega).tolist() == pytest.approx([210, 0, 70, 70])


@pytest.mark.parametrize("alpha", [0.5, 0.1])
@pytest.mark.parametrize(("experts", "seed"), [(1, 0), (1, 1), (3, 0)])
def test_is_close_to_the_label_distribution(alpha, experts, seed):
    data = {"name": "digits", "clients": 10, "alpha": alpha, "imbalance": 50}
    model = {"name": "cnn_small", "experts": experts}
    run = driver(tiny(data=data, model=model, local=LOCAL | {"batch": 16}, seed=seed))
    run.advance()
    truth = torch.from_numpy(run.split.global_counts).float()
    assert F.cosine_similarity(run.server.prior, truth, dim=0) > 0.9


@pytest.mark.parametrize("normalise", [True, False])
def test_is_a_distribution_that_the_loss_gets(normalise):
    run = driver(tiny(algorithm=[{"gpi": {"normalise": normalise}}, "fedavg"], local=LOCAL | {"batch": 16}))
    initial = run.server.model
    line = run.advance()
    prior = run.server.prior
    assert prior.min() > 0
    assert float(prior.sum()) == pytest.approx(1)
    assert prior[:3].sum() > prior[-3:].sum()
    assert run.server.model == initial, "the proxy round leaves the model alone"
    assert not any("acc" in name for name in line["metrics"])
    assert sorted(run.server.proxies) == run.selectable, "everyone takes part"
    run.advance()
    client = run.engine.worker.client(0, 1, {}, initial, 0, proxy=run.proxy)
    assert torch.equal(client.prior, prior)


def test_experts_are_averaged():
    model = {"name": "cnn_small", "experts": 2}
    run = driver(tiny(model=model, local=LOCAL))
    initial = run.server.model
    run.advance()
    client = run.engine.worker.client(2, 0, {}, initial, stream(0, CALL, 0, 0, 2), lr=LR)
    trained = client.fit(GPI().objective, w=initial).w
    rows = [(trained[f"head.experts.{i}.weight"] - initial[f"head.experts.{i}.weight"]).sum(1) for i in (0, 1)]
    torch.testing.assert_close(run.server.proxies[2], (rows[0] + rows[1]) / 2)


def test_does_not_depend_on_the_loss_that_comes_later():
    proxies = []
    for loss in ({"loss": "ce"}, {"loss": "focal"}, {"loss": "balanced_softmax", "prior": "gpi"}):
        run = driver(tiny(algorithm=["gpi", "fedavg"], local={"lr": LR, "batch": 16} | loss))
        run.advance()
        proxies.append(torch.stack(list(run.server.proxies.values())))
    assert torch.equal(proxies[0], proxies[1])
    assert torch.equal(proxies[0], proxies[2])


def test_more_epochs_move_the_classifier_further():
    norms = []
    for epochs in (1, 3):
        run = driver(tiny(algorithm=[{"gpi": {"epochs": epochs}}, "fedavg"], local=LOCAL))
        run.advance()
        norms.append(sum(float(omega.norm()) for omega in run.server.proxies.values()))
    assert norms[1] > 1.5 * norms[0]


@pytest.mark.parametrize("normalise", [True, False])
def test_where_nobody_learns_every_class_is_alike(normalise):
    counts = np.eye(10, dtype=int)[:3].tolist()  # batch norm cannot train on one image
    chain = [{"gpi": {"normalise": normalise}}, "fedavg"]
    run = run_of(digits(), counts, algorithm=chain, local=LOCAL, model={"name": "resnet8", "width": 4})
    run.advance()
    assert all(omega.eq(0).all() for omega in run.server.proxies.values())
    torch.testing.assert_close(run.server.prior, torch.full((10,), 0.1))


def test_is_refused_where_no_classifier_is_shared():
    with pytest.raises(ValueError, match="prior 'gpi' is read off a shared classifier, which local does not train"):
        algorithms.build([{"local": {}}], prior="gpi")
    with pytest.raises(ValueError, match="local does not train"):
        tiny(algorithm="local", local=LOCAL).chain()


def test_runs_once_and_first():
    assert [part.name for part in algorithms.build([{"fedavg": {}}], prior="gpi").parts] == ["gpi", "fedavg"]
    assert [part.name for part in algorithms.build([{"gpi": {}}, {"fedavg": {}}], prior="gpi").parts] == [
        "gpi",
        "fedavg",
    ]
    assert [part.name for part in algorithms.build([{"ldae": {}}], prior="gpi").parts] == ["gpi", "ldae"]
    assert [part.name for part in algorithms.build([{"ldae": {}}], prior="global").parts] == ["gpi", "ldae"]


def test_only_an_estimated_prior_needs_a_round_before():
    for prior, first in (("none", "fedavg"), ("local", "fedavg"), ("global", "fedavg"), ("gpi", "gpi")):
        assert algorithms.build([{"fedavg": {}}], prior).parts[0].name == first
    assert [part.name for part in algorithms.build([{"gpi": {}}, {"fedavg": {}}], "gpi").parts] == ["gpi", "fedavg"]


def test_a_round_that_prepares_changes_neither_draws_nor_learning_rates():
    local = {"lr": 0.1, "batch": 16, "schedule": {"at": [1], "factor": 0.5}}
    plain = driver(tiny(local=local))
    with_gpi = driver(tiny(local=local | {"loss": "balanced_softmax", "prior": "gpi"}))
    assert [turn.name for turn in with_gpi.plan] == ["gpi.proxy", "fedavg.train", "fedavg.train"]
    for a, b in zip(plain.plan, with_gpi.plan[1:], strict=True):
        assert plain._draw(a) == with_gpi._draw(b)
        assert a.index == b.index
