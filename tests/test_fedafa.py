"""FedAFA: its probabilities, its steps on features and a whole step of training, by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny

from algorithms.fedafa import FedAFA, replacing, seeding
from algorithms.maths import balanced

NETS = {"cnn_small": "cnn_small", "resnet8": {"name": "resnet8", "width": 4}}
nets = pytest.mark.parametrize("net", NETS)


def run(net="cnn_small", **knobs):
    """Return a driver of FedAvg and then FedAFA, after FedAvg."""
    made = driver(tiny(model=NETS[net], algorithm=["fedavg", {"fedafa": {"epochs": 1, **knobs}}], rounds=1))
    made.advance()
    return made


def client_of(made, id=0, seed=7):
    return made.engine.worker.client(id, 1, made.memory, made.server.model, seed)


def module_of(made, w, training=False):
    """Return the network as an ordinary module with these weights, cut by hand before its last stage."""
    network = copy.deepcopy(made.engine.worker.network).eval()
    network.load_state_dict(dict(w), strict=False)
    layers = dict(network.body.named_children())
    last = ["fc", "relu3"] if "fc" in layers else ["stage3", "pool"]
    stage = torch.nn.Sequential(*(layers[name] for name in last), network.head).train(training)
    return torch.nn.Sequential(*(layer for name, layer in layers.items() if name not in last)), stage


def test_probabilities_by_hand():
    n_max = torch.tensor(20.0)
    torch.testing.assert_close(replacing(torch.tensor([20.0, 5, 1]), n_max), torch.tensor([0, 0.75, 0.95]))
    odds = seeding(torch.tensor([20.0, 5, 1]), torch.tensor([5.0, 1]), n_max)
    torch.testing.assert_close(odds, torch.tensor([[0.25, 1, 1], [0.05, 0.8, 1]]))


# Adversarial features ------------------------------------------------------------------------------------------------


def test_one_normalised_step_by_hand():
    """With one hidden layer the gradient is W_1^T (relu' * W_2^T (p - e_t))."""
    made = run()
    client, g = client_of(made), made.server.model
    f, t = client.stem(g, client.x[:6]), torch.tensor([0, 1, 2, 3, 4, 5])
    W1, b1, W2, b2 = (g[name] for name in ("body.fc.weight", "body.fc.bias", "head.weight", "head.bias"))
    hidden = f @ W1.T + b1
    p = (hidden.relu() @ W2.T + b2).softmax(1)
    grad = ((p - F.one_hot(t, 10)) @ W2 * (hidden > 0)) @ W1
    expected = f - 0.3 * grad / (grad**2).sum(1, keepdim=True).sqrt()
    assert (expected < 0).any()
    got = FedAFA(noise=0, steps=1, step_size=0.3).attack(client, g, f, t)
    torch.testing.assert_close(got, expected.clamp(min=0), rtol=1e-4, atol=1e-6)


@nets
def test_steps_raise_the_targets_probability(net):
    made = run(net)
    client, g = client_of(made), made.server.model
    f, t = client.stem(g, client.x[:8]), (client.y[:8] + 1) % 10
    features, stage = module_of(made, g)
    torch.testing.assert_close(f, features(client.x[:8]))
    chances = [
        stage(FedAFA(noise=0, steps=steps).attack(client, g, f, t)).softmax(1)[range(8), t].log().mean().item()
        for steps in (0, 1, 10)
    ]
    assert chances[0] < chances[1] < chances[2]


def test_noise_has_the_given_length_and_features_stay_possible():
    made = run()
    client, g = client_of(made), made.server.model
    f, t = client.stem(g, client.x[:4]), client.y[:4]
    alone = FedAFA(noise=0.7, steps=0)
    torch.testing.assert_close((alone.attack(client, g, f + 9, t) - f - 9).norm(dim=1), torch.full((4,), 0.7))
    assert alone.attack(client, g, f, t).min() == 0
    assert not torch.equal(alone.attack(client, g, f + 9, t), alone.attack(client, g, f + 9, t))
    below = FedAFA(noise=50.0, steps=0).attack(client, g, f - 2, t)
    assert below.min() == (f - 2).min()  # where features may be negative, as far down as these are


@nets
@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_a_batch_is_augmented_as_by_hand(net, threshold):
    """The same draws, then every feature by itself, through modules."""
    made = run(net)
    client, g = client_of(made), made.server.model
    f, y = client.stem(g, client.x), client.y
    _, stage = module_of(made, g)
    n, rng = client.counts[y], torch.Generator().manual_seed(client.rng.initial_seed())
    n_max = n.max()
    chosen = [i for i, u in enumerate(torch.rand(len(y), generator=rng)) if u < 1 - n[i] / n_max]
    odds = torch.tensor([[1 - max(0, a - n[i]) / n_max for a in n] for i in chosen])
    seeds = torch.multinomial(odds, 1, generator=rng)[:, 0]
    noise = torch.randn(f[seeds].shape, generator=rng)
    expected, replaced = f.clone(), 0
    for i, seed, e in zip(chosen, seeds, noise, strict=True):
        h = (f[seed] + 0.5 * e / e.norm()).clamp(min=0)
        for _ in range(10):
            h = h.detach().requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(stage(h[None]), y[i, None]), h)
            h = (h - 0.5 * grad / grad.norm()).clamp(min=0)
        if stage(h[None]).softmax(1)[0, y[i]] >= threshold:
            expected[i] = h.detach()
            replaced += 1
    got = FedAFA(threshold=threshold).augment(client, g, f, y)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    changed = (got != f).flatten(1).any(1)
    assert int(changed.sum()) == replaced
    assert len(chosen) > 3
    assert (replaced == len(chosen)) == (threshold == 0)
    assert (replaced == 0) == (threshold == 1)


def test_classes_are_replaced_as_often_as_they_are_small():
    made = run()
    client, g = client_of(made), made.server.model
    f, always = client.stem(g, client.x), FedAFA(threshold=0.0, steps=0, noise=1.0)
    changed = torch.stack([(always.augment(client, g, f, client.y) != f).any(1) for _ in range(300)]).float().mean(0)
    for c in client.owned:
        expected = 1 - client.counts[c] / client.counts.max()
        assert changed[client.y == c].mean().item() == pytest.approx(expected.item(), abs=0.08)
    client.counts = torch.where(client.counts > 0, 5.0, 0.0)
    assert always.augment(client, g, f, client.y) is f


# The personal phase --------------------------------------------------------------------------------------------------


@nets
def test_a_step_of_training_by_hand(net):
    knobs = {"batch": 4096, "momentum": 0.0, "weight_decay": 0.1, "lr": 0.2, "synthetic_weight": 0.7, "threshold": 0.2}
    made = run(net, **knobs)
    g = made.server.model
    client, twin = client_of(made), client_of(made)
    rows = balanced(twin.y)(twin.rng)
    rows = rows[torch.randperm(len(rows), generator=twin.rng)]
    x, y = twin.x[rows], twin.y[rows]
    features, stage = module_of(made, g, training=True)
    f = features(x).detach()
    mixed = FedAFA(threshold=0.2).augment(twin, g, f, y)
    assert not torch.equal(mixed, f)
    loss = 0.7 * F.cross_entropy(stage(mixed), y) + 0.3 * F.cross_entropy(stage(f), y)
    weights = list(stage.parameters())
    grads = torch.autograd.grad(loss, weights)
    expected = torch.cat([(w - 0.2 * (d + 0.1 * w)).flatten() for w, d in zip(weights, grads, strict=True)])
    made.parts[1].local(client, g)
    torch.testing.assert_close(client.state.v.flat, expected, rtol=1e-3, atol=1e-4)
    statistics = [t.flatten() for t in stage.buffers()]
    if statistics:
        torch.testing.assert_close(client.state.v.buffers, torch.cat(statistics), rtol=1e-3, atol=1e-4)


@nets
def test_only_the_last_stage_and_the_classifier_learn(net):
    made = run(net)
    g = made.server.model
    finish(made)
    last = "body.fc." if net == "cnn_small" else "body.stage3."
    assert made.server.model == g
    assert len(made.memory) == len(made.selectable)
    for memory in made.memory.values():
        assert set(memory["v"]) == {name for name in g if name.startswith((last, "head."))}
        assert memory["v"] != g.under(last, "head.")
    client = client_of(made)
    with torch.no_grad():
        got = made.parts[1].personal(client, g)(client.x)
        torch.testing.assert_close(got, client.logits(g | client.state.v, client.x))
    before, after = made.history[0]["metrics"], made.history[1]["metrics"]
    assert before["generic/acc"] == after["generic/acc"]
    assert after["bytes/up"] == 0


def test_untrained_it_is_the_global_model():
    made = finish(run(epochs=0))
    before, after = (line["metrics"] for line in made.history)
    assert all(after[k] == before[k] for k in before if k.startswith(("personal/", "generic/")))


def test_experts_have_a_last_stage_too():
    chain = ["fedavg", {"fedafa": {"epochs": 1, "threshold": 0.0}}]
    made = finish(driver(tiny(model={"name": "cnn_small", "experts": 2}, algorithm=chain, rounds=1)))
    assert all(name.startswith(("body.experts.", "head.experts.")) for name in made.memory[0]["v"])
