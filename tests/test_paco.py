"""PaCo by hand: its loss, and a visit with momentum encoder, queue and two views against a plain loop."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny

from algorithms.losses import BalancedSoftmax
from algorithms.paco import PaCo, project
from orchestrator.client import CALL, stream

BSM = {"lr": 0.05, "batch": 16, "loss": "balanced_softmax", "prior": "global"}
BATCH_NORM = {"name": "resnet8", "width": 4}


def experiment(fields=None, **changes):
    return tiny(**{"algorithm": {"paco": fields or {}}, "local": BSM, "rounds": 1} | changes)


def units(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


# The loss -----------------------------------------------------------------------------------------------------------


def test_without_other_images_it_is_balanced_softmax():
    pi, none = torch.tensor([0.7, 0.2, 0.1]), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    z, y, q = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 0, 0]), units(5, 4)
    for i in range(5):
        alone = PaCo(pair_weight=0.0).contrast(z[i : i + 1] + pi.log(), y[i : i + 1], q[i : i + 1], *none)
        torch.testing.assert_close(alone, BalancedSoftmax()(z[i : i + 1], y[i : i + 1], pi))
    # Images of no weight are as good as none.
    keys, labels = units(6, 4, seed=2), torch.tensor([0, 0, 1, 2, 2, 1])
    ignored = PaCo(pair_weight=0.0, feature_weight=0.0).contrast(z + pi.log(), y, q, keys, labels)
    torch.testing.assert_close(ignored, BalancedSoftmax()(z, y, pi))


def test_the_loss_by_hand():
    """Two images of classes 0 and 1, two keys of classes 0 and 0; everything written out."""
    z = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    q, keys = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    paco = PaCo(pair_weight=0.3, centre_weight=2.0, feature_weight=0.5, temperature=0.5)
    # Image 0 sees image 1 at 0 and the keys at 0.6/0.5 and 1/0.5; both keys are of its class.
    below = math.exp(1) + math.exp(-1) + 0.5 * (math.exp(0) + math.exp(1.2) + math.exp(2))
    logp = [1 - math.log(below), 1.2 - math.log(below), 2 - math.log(below)]
    first = -(2 * logp[0] + 0.3 * logp[1] + 0.3 * logp[2]) / 2.6
    # Image 1 sees image 0 at 0 and the keys at 0.8/0.5 and 0; nobody else is of its class.
    below = math.exp(0.5) + math.exp(2) + 0.5 * (math.exp(0) + math.exp(1.6) + math.exp(0))
    second = -(2 - math.log(below))
    found = paco.contrast(z, torch.tensor([0, 1]), q, keys, torch.tensor([0, 0]))
    assert float(found) == pytest.approx((first + second) / 2)


def reference(z, y, q, keys, labels, alpha, beta, gamma, tau):
    """Return the loss by loops over images and candidates."""
    losses = []
    for i in range(len(y)):
        candidates = [(z[i, c], 1.0, beta if c == y[i] else 0.0) for c in range(z.shape[1])]
        images = [(q[j], y[j]) for j in range(len(y)) if j != i] + list(zip(keys, labels, strict=True))
        candidates += [(q[i] @ f / tau, gamma, alpha if c == y[i] else 0.0) for f, c in images]
        log_sum = torch.stack([weight * logit.exp() for logit, weight, _ in candidates]).sum().log()
        weights = sum(positive for *_, positive in candidates)
        losses.append(-sum(positive * (logit - log_sum) for logit, _, positive in candidates) / weights)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("alpha", "beta", "gamma", "tau"), [(0.01, 1, 1, 0.05), (0.5, 2, 0.3, 0.2), (1, 1, 2, 1)])
def test_the_loss_and_its_gradient_against_loops(alpha, beta, gamma, tau):
    z = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    q, keys = units(6, 4).double().requires_grad_(), units(9, 4, seed=1).double()
    y, labels = torch.tensor([0, 1, 2, 0, 0, 1]), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0])
    paco = PaCo(pair_weight=alpha, centre_weight=beta, feature_weight=gamma, temperature=tau)
    found = paco.contrast(z, y, q, keys, labels)
    expected = reference(z, y, q, keys, labels, alpha, beta, gamma, tau)
    torch.testing.assert_close(found, expected)
    mine, other = (torch.autograd.grad(loss, (z, q)) for loss in (found, expected))
    torch.testing.assert_close(mine, other)


# A visit ------------------------------------------------------------------------------------------------------------


class Projection(torch.nn.Module):
    """The projection as a module."""

    def __init__(self, P):
        super().__init__()
        self.hidden = torch.nn.Linear(*P["hidden.weight"].shape[::-1])
        self.out = torch.nn.Linear(*P["out.weight"].shape[::-1])
        self.load_state_dict(dict(P))

    def forward(self, h):
        return F.normalize(self.out(F.relu(self.hidden(h))))


def plain_visit(run, id, w, P, m, length):
    """Train as PaCo does with modules, an optimizer and a list for a queue; return both trained modules."""
    local = run.experiment.local
    network = copy.deepcopy(run.engine.worker.network)
    network.load_state_dict(dict(w), strict=False)  # batch norm here counts no batches
    query = torch.nn.ModuleDict({"net": network.train(), "projection": Projection(P)})
    key = copy.deepcopy(query).eval()
    optimizer = torch.optim.SGD(query.parameters(), local.lr, momentum=local.momentum)
    client = run.engine.worker.client(id, 0, {}, w, 0)
    pi = torch.from_numpy(run.split.counts.sum(0)).float()
    pi = pi / pi.sum()
    queue = []
    order = torch.Generator().manual_seed(stream(run.experiment.seed, CALL, run.round, 0, id))
    for _ in range(local.epochs):
        for rows in torch.randperm(client.n, generator=order).split(local.batch):
            y = client.y[rows]
            one, two = (run.engine.worker.augment(client.x[rows], order) for _ in range(2))
            with torch.no_grad():
                pairs = [(key.parameters(), query.parameters()), (key.buffers(), query.buffers())]
                for mine, theirs in pairs:
                    for a, b in zip(mine, theirs, strict=True):
                        a.copy_(m * a + (1 - m) * b)
                k = key["projection"](key["net"].body(two))
            h = query["net"].body(one)
            q, z = query["projection"](h), query["net"].head(h) + pi.log()
            queue = [*zip(k, y, strict=True), *queue]
            keys, labels = (torch.stack(list(t)) for t in zip(*queue, strict=True))
            loss = reference(z, y, q, keys, labels, 0.1, 1.0, 1.0, 0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = queue[:length]
    return query


@pytest.mark.parametrize(
    ("model", "augment"), [("cnn_small", "none"), ("cnn_small", "crop_flip"), (BATCH_NORM, "none")]
)
def test_a_round_against_a_plain_loop(model, augment):
    """The second round of two clients, which starts from an average, a projection already learned, and new queues."""
    fields = {"queue": 10, "key_momentum": 0.7, "temperature": 0.5, "pair_weight": 0.1}
    local = BSM | {"batch": 6, "lr": 0.02, "augment": augment}
    data = {"name": "digits", "clients": 12, "alpha": 0.5, "imbalance": 10}
    run = driver(experiment(fields, rounds=2, clients_per_round=2, model=model, local=local, data=data))
    run.advance()
    w, P, ids = run.server.model, run.server.projection, run._draw(run.plan[1])
    n = {id: int(run.split.counts[id].sum()) for id in ids}
    assert max(n.values()) > 3 * 6
    trained = {id: plain_visit(run, id, w, P, m=0.7, length=10) for id in ids}
    run.advance()
    for name, value in run.server.model.items():
        mean = sum(n[id] * trained[id]["net"].state_dict()[name].double() for id in ids) / sum(n.values())
        torch.testing.assert_close(value, mean.float(), rtol=1e-3, atol=2e-5, msg=name)
    for name, value in run.server.projection.items():
        mean = sum(n[id] * trained[id]["projection"].state_dict()[name].double() for id in ids) / sum(n.values())
        torch.testing.assert_close(value, mean.float(), rtol=1e-3, atol=2e-5, msg=name)
    assert (run.server.projection - P).norm() > 1e-2, "the projection learns too"


@pytest.mark.parametrize("model", ["cnn_small", BATCH_NORM], ids=["cnn", "batch norm"])
def test_images_without_weight_leave_fedavg_with_balanced_softmax(model):
    """With batch norm this also tells that the momentum encoder's pass leaves the model's statistics alone."""
    none = {"feature_weight": 0.0, "pair_weight": 0.0}
    local = BSM | {"lr": 0.01}
    paco = finish(driver(experiment(none, model=model, local=local))).server
    plain = finish(driver(experiment(algorithm="fedavg", model=model, local=local))).server
    torch.testing.assert_close(paco.model.flat, plain.model.flat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(paco.model.buffers, plain.model.buffers, rtol=1e-4, atol=1e-5)


def test_a_longer_queue_is_another_objective():
    runs = [finish(driver(experiment({"queue": length}))).server.model for length in (0, 8, 1024)]
    assert runs[0] != runs[1]
    assert runs[1] != runs[2]


# The projection -----------------------------------------------------------------------------------------------------


def test_a_projection_is_drawn_once_as_torch_draws_linear_layers():
    paco = PaCo(projection_dim=5)
    model = driver(experiment()).server.model
    P, again, other = (paco.newborn(model, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert again == P
    assert other != P
    shapes = {name: tuple(t.shape) for name, t in P.items()}
    assert shapes == {"hidden.weight": (64, 64), "hidden.bias": (64,), "out.weight": (5, 64), "out.bias": (5,)}
    assert 0.99 / 8 < P.flat.abs().max() <= 1 / 8
    h = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(project(P, h), Projection(P)(h).detach())
    runs = [driver(experiment(seed=seed, clients_per_round=1)) for seed in (0, 0, 1)]
    drawn = [finish(run).server.projection for run in runs]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_experts_are_projected_together():
    run = finish(driver(experiment(model={"name": "cnn_small", "experts": 2})))
    assert run.server.projection["hidden.weight"].shape == (128, 128)


def test_tests_use_the_classifier_alone():
    run = finish(driver(experiment()))
    client = run.engine.worker.client(0, 0, {}, run.origin, 0)
    w = run.server.model
    with torch.no_grad():
        predicted = run.parts[0].generic(client, *run.parts[0].view(run.server))(client.x)
        expected = client.features(w, client.x) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(predicted, expected)
