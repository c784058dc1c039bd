"""pFedLA: mixtures and their learning by hand, and the direction in which the weights move."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny

from algorithms.params import Params
from algorithms.parts import layers
from algorithms.pfedla import PFedLA
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

RNG = np.random.default_rng


def begin(knobs=None, **changes):
    return driver(tiny(algorithm={"pfedla": knobs or {}}, **changes))


def client_of(run, id, lr=0.05):
    return run.engine.worker.client(id, 0, run.memory, run.origin, 0, lr=lr)


def blocks(population=3, sizes=(4, 2), seed=1):
    """Return the models of some clients, cut into blocks."""
    drawn = RNG(seed).standard_normal((population, sum(sizes)))
    return torch.from_numpy(drawn).split(sizes, dim=1)


def test_the_weights_of_a_block_are_shares():
    method = PFedLA()
    HN = method.newborn(blocks(), RNG(0))
    alpha = method.alpha(HN)
    assert alpha.shape == (2, 3)
    assert (alpha > 0).all()
    torch.testing.assert_close(alpha.sum(1), torch.ones(2, dtype=torch.float64))
    sizes = {name: tuple(t.shape) for name, t in HN.items()}
    assert sizes == {
        "v": (100,),
        **{f"hidden.{i}.weight": (100, 100) for i in range(3)},
        **{f"hidden.{i}.bias": (100,) for i in range(3)},
        "out.weight": (2, 3, 100),
        "out.bias": (2, 3),
    }
    assert 0 <= HN["out.weight"].min() < 0.01
    assert 0.99 < HN["out.weight"].max() <= 1
    small = PFedLA(embedding_dim=7, hidden_dim=5, hidden_layers=1).newborn(blocks(), RNG(0))
    assert (small["v"].shape, small["hidden.0.weight"].shape, small["out.weight"].shape) == ((7,), (5, 7), (2, 3, 5))
    assert small["hidden.0.weight"].abs().max() <= 1 / math.sqrt(7)


def written(HN, hidden):
    """Return alpha as nn modules compute it."""
    e = HN["v"]
    for i in range(hidden):
        e = (HN[f"hidden.{i}.weight"] @ e + HN[f"hidden.{i}.bias"]).clamp_min(0)
    out = torch.stack([(w @ e + b).clamp_min(0) for w, b in zip(HN["out.weight"], HN["out.bias"], strict=True)])
    return out / out.sum(1, keepdim=True)


@pytest.mark.parametrize("hidden", [1, 3])
def test_each_block_is_mixed_by_its_own_weights(hidden):
    method, theta = PFedLA(hidden_layers=hidden), blocks()
    HN = method.newborn(theta, RNG(0))
    alpha = written(HN, hidden)
    torch.testing.assert_close(method.alpha(HN), alpha)
    by_hand = [sum(alpha[i, j] * theta[i][j] for j in range(3)) for i in range(2)]
    torch.testing.assert_close(method.mixed(HN, theta), torch.cat(by_hand))
    assert not torch.allclose(alpha[0], alpha[1])


def test_the_hypernetwork_descends_the_loss_of_the_mixture():
    """For a loss L(theta) the chain rule gives its gradient: compare with differences of L over every weight."""
    method, theta = PFedLA(embedding_dim=3, hidden_dim=4, hidden_layers=2, hn_lr=0.1), blocks()
    HN, target = method.newborn(theta, RNG(5)), torch.arange(6.0, dtype=torch.float64)

    def loss(flat):
        return float(((method.mixed(Params(HN.layout, flat, HN.buffers), theta) - target) ** 2).sum()) / 2

    step = method.descended(HN, theta, method.mixed(HN, theta) - target).flat - HN.flat
    differences = torch.zeros_like(HN.flat)
    for i in range(len(differences)):
        e = torch.zeros_like(HN.flat)
        e[i] = 1e-6
        differences[i] = (loss(HN.flat + e) - loss(HN.flat - e)) / 2e-6
    torch.testing.assert_close(step, -0.1 * differences, rtol=1e-4, atol=1e-7)
    assert step.abs().max() > 1e-3


def test_weights_move_towards_the_client_that_helps():
    """Training moved client 0 towards where client 1 already is, and away from client 2."""
    method = PFedLA(hn_lr=0.01)
    change = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=torch.float64)
    theta = torch.stack([torch.zeros(4, dtype=torch.float64), change, -change]).split([3, 1], dim=1)
    HN = method.newborn(theta, RNG(0))
    before = method.alpha(HN)
    gain = method.alpha(method.descended(HN, theta, gradient=-change)) - before
    assert (gain[:, 1] > 1e-4).all()
    assert (gain[:, 2] < -1e-4).all()


def split_of(*clients):
    """Return a split of given training rows; everybody is tested on a few images."""
    data = digits()
    counts = np.stack([np.bincount(data.y_train[rows], minlength=10) for rows in clients])
    nothing = tuple(rows[:0] for rows in clients)
    return Split(train=tuple(clients), validation=nothing, test=tuple(np.arange(5) for _ in clients), counts=counts)


def test_in_a_federation_the_one_with_the_same_classes_gains_weight():
    """Clients 0 and 1 have digits 0 to 4, client 2 the others: 0 and 1 come to use each other's layers, not 2's."""
    data = digits()
    low, high = (np.flatnonzero(part) for part in (data.y_train < 5, data.y_train >= 5))
    parts = split_of(low[:60], low[60:120], high[:60])
    chosen = tiny(
        data={"name": "digits", "clients": 3},
        algorithm={"pfedla": {"hn_lr": 0.05}},
        clients_per_round=3,
        rounds=4,
        evaluate={"every": 4},
    )
    run = Driver(chosen, data, parts, InProcess(Worker(chosen, data, parts)))
    method = run.parts[0]
    run.advance()
    before = {k: method.alpha(HN).mean(0) for k, HN in run.server.HN.items()}
    finish(run)
    gain = {k: method.alpha(HN).mean(0) - before[k] for k, HN in run.server.HN.items()}
    for k, friend in ((0, 1), (1, 0)):
        assert gain[k][friend] > gain[k][2]
        assert gain[k][2] < 0
    assert gain[2][2] > max(gain[2][0], gain[2][1])


def test_a_round_by_hand():
    """From a common start the mixture is that start; then each theta_k is what its client has trained."""
    local = {"lr": 0.1, "momentum": 0.0, "batch": 4096}
    run = begin(local=local, model={"name": "resnet8", "width": 4})
    run.advance()
    alone = driver(tiny(algorithm="local", local=local, model={"name": "resnet8", "width": 4}))
    alone.advance()
    assert set(run.server.theta) == set(run.server.HN) == set(run.memory) == set(alone.memory)
    for k, memory in alone.memory.items():
        torch.testing.assert_close(run.memory[k]["w"].flat, memory["w"].flat, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(run.memory[k]["w"].flat, run.server.theta[k], rtol=1e-5, atol=1e-6)
    assert run.server.model == run.origin

    stored, HN = dict(run.server.theta), dict(run.server.HN)
    sizes = [sum(run.origin[n].numel() for n in layer) for layer in layers(run.origin)]
    theta = torch.stack([stored.get(j, run.origin.flat) for j in range(6)]).split(sizes, dim=1)
    run.advance()
    again = [k for k in run._draw(run.plan[1]) if k in HN]
    assert again
    for k in again:
        start = torch.cat([a @ block for a, block in zip(written(HN[k], 3), theta, strict=True)])
        client = client_of(run, k, lr=0.1)
        change = (
            client.fit(run.parts[0].objective, w=Params(run.origin.layout, start, run.origin.buffers)).w.flat - start
        )
        torch.testing.assert_close(run.server.theta[k], start + change, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(run.memory[k]["w"].flat, run.server.theta[k], rtol=1e-5, atol=1e-6)
        expected = run.parts[0].descended(HN[k], theta, -change)
        torch.testing.assert_close(run.server.HN[k].flat, expected.flat, rtol=1e-3, atol=1e-5)


def test_running_statistics_are_the_clients_own():
    run = begin(model={"name": "resnet8", "width": 4}, local={"lr": 0.1, "momentum": 0.0, "batch": 4096})
    client = client_of(run, 0)
    own = client.state.w
    kept = torch.linspace(1, 2, own.buffers.numel())
    client.state.w = Params(own.layout, own.flat, kept.clone())
    start = own.flat * 1.1
    change = run.parts[0].update(client, start)
    torch.testing.assert_close(client.state.w.flat, start + change)
    sent = Params(own.layout, start, kept)
    seen = F.conv2d(client.x, sent["body.stem.conv.weight"], padding=1).mean((0, 2, 3))
    expected = 0.9 * sent["body.stem.bn.running_mean"] + 0.1 * seen
    torch.testing.assert_close(client.state.w["body.stem.bn.running_mean"], expected)


def test_a_block_of_which_nothing_is_said_is_mixed_evenly():
    method, theta = PFedLA(hidden_layers=1), blocks()
    HN = method.newborn(theta, RNG(0))
    HN = HN.replace({"out.bias": torch.tensor([[-1e3] * 3, [0.0] * 3], dtype=torch.float64)})
    alpha = method.alpha(HN)
    torch.testing.assert_close(alpha[0], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert alpha[1].std() > 0.01
    assert method.descended(HN, theta, torch.ones(6, dtype=torch.float64)).flat.isfinite().all()


def test_a_client_whose_update_is_left_out_changes_nothing(monkeypatch):
    run = begin(rounds=1, failures={"bad_update": "skip"})
    bad, *good = run._draw(run.plan[0])
    honest = PFedLA.update

    def update(self, client, start):
        return honest(self, client, start) * (math.nan if client.id == bad else 1)

    monkeypatch.setattr(PFedLA, "update", update)
    run.advance()
    assert set(run.server.theta) == set(run.server.HN) == set(run.memory) == set(good)


def test_clients_have_no_generic_model_and_keep_their_own():
    run = finish(begin(rounds=1))
    assert not [m for m in run.history[-1]["metrics"] if m.startswith("generic/")]
    stranger = next(k for k in run.selectable if k not in run.memory)
    for k in (stranger, *run.memory):
        client = client_of(run, k)
        w = run.memory[k]["w"] if k in run.memory else run.origin
        assert torch.equal(run.parts[0].personal(client)(client.x), client.logits(w, client.x))
    n = run.origin.flat.numel()
    assert run.history[-1]["metrics"]["bytes/up"] == run.history[-1]["metrics"]["bytes/down"] == 3 * 4 * n
