"""CLIMB: the multipliers by hand, and the weights they give to clients."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import VOID, driver, finish, pixels, scenes, tiny

from orchestrator.client import CALL, stream


def climb(rounds=2, **fields):
    return driver(tiny(algorithm={"climb": fields}, rounds=rounds, evaluate={"every": 9, "what": ["generic"]}))


def trained(run, k, round):
    """Return client k's model after the training of a round that is about to begin."""
    client = run.engine.worker.client(k, 0, {}, run.origin, stream(0, CALL, round, 0, k), lr=0.05)
    return client.fit(run.parts[0].objective, w=run.server.model).w


def losses(run):
    """Return the loss of the current model on each client's images."""
    clients = {k: run.engine.worker.client(k, 0, {}, run.origin, 0) for k in run.selectable}
    return {k: float(F.cross_entropy(c.logits(run.server.model, c.x), c.y)) for k, c in clients.items()}


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}])
def test_without_dual_steps_it_is_fedavg_bit_for_bit(model):
    fields = {"dual_lr": 0.0, "primal_rounds": 1, "tolerance": 0.0}
    run = finish(driver(tiny(algorithm={"climb": fields}, model=model)))
    assert run.server.model == finish(driver(tiny(model=model))).server.model
    assert run.server.lam == {}


def test_a_dual_step_by_hand_and_the_weights_of_the_next_round():
    run = climb(dual_lr=20.0, tolerance=0.05, primal_rounds=1)
    run.advance()
    l_k, K = losses(run), 6
    excess = {k: loss - sum(l_k.values()) / K - 0.05 for k, loss in l_k.items()}
    lam = {k: max(0.0, 20 * over / K) for k, over in excess.items()}
    assert set(run.server.lam) == {k for k in lam if lam[k] > 0}
    assert 0 < len(run.server.lam) < K == len(run.selectable)
    assert run.server.lam == pytest.approx({k: v for k, v in lam.items() if v > 0}, rel=1e-4)
    ids, n = run._draw(run.plan[1]), {k: len(run.split.train[k]) for k in run.selectable}
    omega = {k: 1 + lam[k] - sum(lam.values()) / K for k in ids}
    assert set(ids) & set(run.server.lam)
    assert min(omega.values()) > 0
    total = sum(n[k] * omega[k] for k in ids)
    expected = sum(n[k] * omega[k] / total * trained(run, k, 1).flat.double() for k in ids)
    run.advance()
    torch.testing.assert_close(run.server.model.flat.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_images_is_that_of_all_at_once_bit_for_bit():
    run = climb()
    for id in run.selectable:
        client, w = run.engine.worker.client(id, 0, {}, run.origin, 0), run.server.model
        assert run.parts[0].risk(client, w) == float(client.loss(client.classify(w, client.embed(w)), client.y))


@pytest.mark.parametrize("images", [0.5, 1, 5, 100])
def test_the_loss_of_pixels_is_summed_over_blocks_of_images(images, monkeypatch):
    data = scenes()
    y = data.y_train.copy()
    y[:5], y[5:9, :6] = VOID, VOID  # images of which nothing or little is known weigh as much as is known
    part = {"name": "scenes.npz", "clients": 1, "partition": "foreground"}
    run = driver(pixels(algorithm="climb", data=part, clients_per_round=1), dataset=replace(data, y_train=y))
    client, w = run.engine.worker.client(0, 0, {}, run.origin, 0), run.server.model
    whole = float(client.loss(client.classify(w, client.embed(w)), client.y))
    sizes = []
    classify = client.classify
    monkeypatch.setattr("algorithms.climb.LABELS", int(images * 12 * 16))
    monkeypatch.setattr(client, "classify", lambda w, h: sizes.append(len(h)) or classify(w, h))
    assert run.parts[0].risk(client, w) == pytest.approx(whole, rel=1e-6)
    assert sum(sizes) == 22
    assert max(sizes) == min(22, max(1, images))


def test_multipliers_move_every_few_rounds_and_the_loss_of_everybody_is_asked_then():
    run, seen = climb(rounds=5, dual_lr=10.0, tolerance=0.0, primal_rounds=2), []
    for _ in range(5):
        run.advance()
        seen.append((dict(run.server.lam), run.history[-1]["metrics"]["bytes/up"]))
    assert seen[0][0] == {}
    assert seen[1][0] == seen[2][0] != {}
    assert seen[3][0] == seen[4][0] != seen[1][0]
    assert seen[1][1] == seen[0][1] + 4 * 6  # a number of four bytes from each of six clients
    assert seen[2][1] == seen[0][1]


def test_multipliers_stay_between_zero_and_their_bound():
    run = climb(dual_lr=1e6, tolerance=0.0, primal_rounds=1, dual_max=0.25)
    run.advance()
    assert set(run.server.lam.values()) == {0.25}
    calm = climb(tolerance=3.0, primal_rounds=1)
    calm.server.lam = {0: 0.4, 1: 2.0}
    calm.advance()
    l_k = losses(calm)
    mean = sum(l_k.values()) / 6
    assert 0.4 + (l_k[0] - mean - 3) / 6 < 0
    assert calm.server.lam == pytest.approx({1: 2.0 + (l_k[1] - mean - 3) / 6}, rel=1e-4)


def test_a_client_whose_weight_would_be_negative_counts_nothing():
    run = climb()
    ids = run._draw(run.plan[0])
    run.server.lam = {ids[0]: 30.0}  # the others' weights are 1 - 5
    only = trained(run, ids[0], 0)
    run.advance()
    torch.testing.assert_close(run.server.model.flat, only.flat, rtol=1e-6, atol=1e-7)
    idle = climb()
    absent = next(k for k in idle.selectable if k not in ids)
    idle.server.lam = {absent: 30.0}
    idle.advance()
    assert idle.server.model == idle.origin
