"""CReFF: FedAvg untouched, federated features matched at the right classifier, and a classifier trained on them."""

import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny

from algorithms import federated_features as ff
from orchestrator.client import CALL, stream

FIELDS = {"features_per_class": 6, "match_steps": 4, "grad_batch": 10_000, "grad_repeats": 1, "head_epochs": 3}
BATCH_NORM = {"name": "resnet8", "width": 4}
GENERIC = {"every": 9, "what": ["generic"]}


def creff(model="cnn_small", **fields):
    return driver(tiny(algorithm={"creff": FIELDS | fields}, model=model, evaluate=GENERIC))


def class_gradients(run, k, w):
    """Return the classifier's gradients [C, d + 1] on all of a client's images of each class, by backpropagation."""
    client = run.engine.worker.client(k, 0, {}, run.origin, 0)
    found = {}
    for c in client.owned.tolist():
        head = {name: t.detach().clone().requires_grad_() for name, t in w.head.items()}
        own = client.x[client.y == c]
        logits = client.classify(head, client.features(w, own).detach())
        weight, bias = torch.autograd.grad(F.cross_entropy(logits, torch.full((len(own),), c)), list(head.values()))
        found[c] = torch.cat([weight, bias[:, None]], 1)
    return found


@pytest.mark.parametrize("model", ["cnn_small", BATCH_NORM], ids=["no batch norm", "batch norm"])
def test_the_trained_model_is_fedavgs_bit_for_bit_and_the_tested_one_differs_in_the_head(model):
    run, plain = finish(creff(model)), finish(driver(tiny(model=model, evaluate=GENERIC)))
    tested, fedavg = run.server.model, plain.server.model
    assert tested.replace(run.server.v) == fedavg
    assert tested.body == fedavg.body
    assert all((tested[name] != fedavg[name]).any() for name in fedavg.head)
    for ours, theirs in zip(run.history, plain.history, strict=True):  # the server's own training is not the clients'
        assert ours["metrics"]["train/loss"] == theirs["metrics"]["train/loss"]


def test_features_are_matched_at_the_retrained_classifier_to_the_mean_over_who_has_the_class():
    run = creff()
    run.advance()
    h, u, tested = run.server.h, run.server.model.head, run.server.model
    assert u != run.server.v
    sent = [class_gradients(run, k, tested) for k in run._draw(run.plan[1])]
    z = {c: [g[c] for g in sent if c in g] for c in range(10)}
    assert len({len(of_c) for of_c in z.values()}) > 1  # some classes are known to fewer clients
    run.advance()
    expected = ff.match(h, u, {c: torch.stack(g).mean(0) for c, g in z.items() if g}, 4, 0.1)
    torch.testing.assert_close(run.server.h, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(run.server.h, h)


def test_the_head_begins_anew_and_is_trained_on_the_features_by_plain_sgd():
    run = creff(head_epochs=5, head_lr=0.3, head_batch=7)
    run.advance()
    h, d = run.server.h, run.server.h.shape[2]
    rng = torch.Generator().manual_seed(stream(0, CALL, 0, 0, 6))  # the server comes after clients 0 to 5
    start = (2 * torch.rand(10 * d + 10, generator=rng) - 1) / d**0.5
    weight, bias = start[: 10 * d].view(10, d).requires_grad_(), start[10 * d :].requires_grad_()
    x, y = h.flatten(0, 1), torch.arange(10).repeat_interleave(6)
    for _ in range(5):
        for rows in torch.randperm(60, generator=rng).split(7):
            loss = F.cross_entropy(F.linear(x[rows], weight, bias), y[rows])
            slopes = torch.autograd.grad(loss, (weight, bias))
            with torch.no_grad():
                weight -= 0.3 * slopes[0]
                bias -= 0.3 * slopes[1]
    torch.testing.assert_close(run.server.model["head.weight"], weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.server.model["head.bias"], bias.detach(), rtol=1e-4, atol=1e-5)


def test_what_is_tested_and_handed_on_has_the_retrained_head():
    chain = [{"creff": FIELDS}, {"finetune": {"epochs": 0}}]
    run = finish(driver(tiny(algorithm=chain, rounds=1)))
    before, after = (line["metrics"] for line in run.history)
    assert {k: v for k, v in before.items() if "/acc" in k} == {k: v for k, v in after.items() if "/acc" in k}
    once = creff()
    once.advance()
    assert run.origin == once.server.model


def test_only_a_linear_classifier_is_retrained():
    with pytest.raises(ValueError, match=r"class gradients need .* this one has: head\.experts"):
        driver(tiny(algorithm="creff", model={"name": "cnn_small", "experts": 2}))
