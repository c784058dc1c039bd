"""RIDE by hand: temperatures, the term that drives experts apart, the whole objective, and its limits."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny

from algorithms.ride import RIDE
from orchestrator.client import CALL, stream

LDAM = {"lr": 0.01, "batch": 16, "loss": "ldam", "prior": "global"}


def experiment(fields=None, **changes):
    return tiny(**{"algorithm": {"ride": fields or {}}, "local": LDAM, "rounds": 1} | changes)


def client_of(run, id=0, **call):
    return run.engine.worker.client(id, 0, {}, run.origin, stream(0, CALL, 0, 0, id), lr=0.01, **call)


def test_temperatures_by_hand():
    # psi = 0.2 * 4 * pi + 0.8
    prior = torch.tensor([0.5, 0.25, 0.25, 0.0])
    found = RIDE(temperature_spread=0.2).temperatures(prior)
    torch.testing.assert_close(found, torch.tensor([1.2, 1.0, 1.0, 0.8]) / 1.2)
    assert RIDE(temperature_spread=0.0).temperatures(prior).tolist() == [1, 1, 1, 1]
    uniform = RIDE().temperatures(torch.full((8,), 1 / 8))
    assert uniform.tolist() == pytest.approx([1] * 8)
    alone = RIDE(temperature_spread=0.99).temperatures(torch.eye(100)[0])
    assert (alone > 0).all()


def by_hand(v, T):
    """Return the sum over experts, and the mean over images, of mean(T)^2 KL(mean || expert), number by number."""
    experts, images, classes = v.shape
    total = 0.0
    for b in range(images):
        mean = [sum(float(v[i, b, c]) for i in range(experts)) / experts / T[c] for c in range(classes)]
        p = [math.exp(m) / sum(map(math.exp, mean)) for m in mean]
        for i in range(experts):
            own = [float(v[i, b, c]) / T[c] for c in range(classes)]
            q = [math.exp(o) / sum(map(math.exp, own)) for o in own]
            total += sum(a * math.log(a / e) for a, e in zip(p, q, strict=True))
    return (sum(T) / classes) ** 2 * total / images


def test_the_term_by_hand():
    v = 2 * torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    prior = torch.tensor([0.6, 0.2, 0.15, 0.05])
    ride = RIDE(temperature_spread=0.3)
    assert float(ride.apart(v, prior)) == pytest.approx(by_hand(v, ride.temperatures(prior).tolist()), rel=1e-4)
    assert float(ride.apart(v[:1].expand(3, -1, -1), prior)) == pytest.approx(0, abs=1e-6)


def test_experts_move_away_from_a_mean_that_stays():
    """With T = 1 the gradient of KL(p || q_i) is q_i - p for each image, and no part of it comes through the mean."""
    v = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (grad,) = torch.autograd.grad(RIDE(temperature_spread=0.0).apart(v, torch.full((4,), 0.25)), v)
    torch.testing.assert_close(grad, (v.softmax(2) - v.mean(0).softmax(1)).detach() / 3)


@pytest.mark.parametrize("diversity", [-0.2, 0.0, 0.7])
@pytest.mark.parametrize("prior", ["local", "global"])
def test_the_objective_is_every_experts_loss_and_the_term(diversity, prior):
    run = driver(experiment({"diversity": diversity, "num_experts": 2}, local=LDAM | {"prior": prior}))
    client, w = client_of(run, 1), run.server.model
    x, y = client.x[:9], client.y[:9]
    with torch.no_grad():
        found = run.parts[0].objective(client, x, y, w)
        h = client.features(w, x).chunk(2, dim=1)
        v = torch.stack(
            [30 * F.normalize(h[i]) @ F.normalize(w[f"head.experts.{i}.weight"]).T for i in range(2)]
        ).double()
    n = torch.from_numpy(run.split.counts).double()
    n = n[1].clamp_min(0.1) if prior == "local" else n.sum(0)
    m = 0.5 * n**-0.25 / (n**-0.25).max()
    psi = 0.05 * 10 * n / n.sum() + 0.95
    losses = sum(F.cross_entropy(v_i - 30 * m * F.one_hot(y, 10), y) for v_i in v)
    expected = float(losses) + diversity * by_hand(v, (psi / psi.max()).tolist())
    assert float(found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "local", [{"lr": 0.05, "batch": 16}, LDAM, LDAM | {"loss": "lade", "prior": "gpi"}], ids=["ce", "ldam", "lade"]
)
@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}], ids=["cnn", "resnet"])
def test_one_expert_is_fedavg_bit_for_bit(local, model):
    one = finish(driver(experiment({"num_experts": 1, "diversity": 0.0}, local=local, model=model)))
    plain = finish(driver(experiment(algorithm="fedavg", local=local, model=model)))
    assert one.server.model == plain.server.model
    assert one.history[-1]["metrics"]["generic/acc"] == plain.history[-1]["metrics"]["generic/acc"]


def test_one_expert_has_nobody_to_differ_from():
    runs = [finish(driver(experiment({"num_experts": 1, "diversity": d}))).server.model for d in (-0.2, 0.0)]
    assert runs[0] == runs[1]


def test_all_clients_train_all_experts_which_are_averaged():
    run = driver(experiment(clients_per_round=2))
    start, ids = run.server.model, run._draw(run.plan[0])
    run.advance()
    trained = {id: client_of(run, id).fit(run.parts[0].objective, w=start).w for id in ids}
    n = {id: client_of(run, id).n for id in ids}
    mean = sum((n[id] * trained[id].flat).double() for id in ids) / sum(n.values())
    assert torch.equal(run.server.model.flat, mean.float())
    for i in range(3):
        for part in (f"body.experts.{i}.", f"head.experts.{i}."):
            assert all((trained[id].under(part) - start.under(part)).norm() > 1e-3 for id in ids)


def test_the_term_drives_experts_apart():
    """From one start, small steps on the same images leave experts the further apart, the lower d is."""

    def spread(diversity):
        run = driver(experiment({"diversity": diversity}, local=LDAM | {"momentum": 0}))
        client = client_of(run)
        w = client.fit(run.parts[0].objective, epochs=3, lr=1e-4, batch=4096, w=run.server.model).w
        with torch.no_grad():
            v = client.classify(w, client.features(w, client.x), each=True)
        assert len(v) == 3
        return float(RIDE(temperature_spread=0.0).apart(v, client.prior))

    together, neither, apart = (spread(d) for d in (5.0, 0.0, -5.0))
    assert together < 0.99 * neither
    assert apart > 1.01 * neither


def test_a_network_that_cannot_have_experts_is_refused():
    with pytest.raises(ValueError, match="model 'cnn_mupfl' takes no experts"):
        driver(experiment(model="cnn_mupfl"))
