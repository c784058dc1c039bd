"""Class gradients, feature matching, activation maps and clusters against autograd and against numbers by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import driver, tiny
from torch import tensor

from algorithms import federated_features as ff
from algorithms.params import Params

NETWORKS = ["cnn_small", {"name": "resnet8", "width": 4}]


def somebody(model="cnn_small", id=0, seed=5):
    """Return a client with data, and the initial model."""
    run = driver(tiny(model=model))
    return run.engine.worker.client(id, 0, {}, run.server.model, seed, lr=0.05), run.server.model


def autograd(client, w, rows, k):
    """Return what backpropagation says of the classifier's gradient on these images of class k."""
    head = {name: t.detach().clone().requires_grad_() for name, t in w.head.items()}
    logits = client.classify(head, client.features(w, client.x[rows]).detach())
    weight, bias = torch.autograd.grad(F.cross_entropy(logits, torch.full((len(rows),), k)), list(head.values()))
    return torch.cat([weight, bias[:, None]], 1)


# Class gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", NETWORKS, ids=["no batch norm", "batch norm"])
def test_class_gradients_are_those_of_backpropagation(model):
    client, w = somebody(model)
    before = w.clone()
    z = ff.class_gradients(client, w, batch=8, repeats=3)
    assert sorted(z) == client.owned.tolist()
    again, _ = somebody(model)
    for k in z:
        rows = (client.y == k).nonzero().flatten()
        draws = [rows[torch.randperm(len(rows), generator=again.rng)[:8]] for _ in range(3)]
        expected = torch.stack([autograd(client, w, drawn, k) for drawn in draws]).mean(0)
        torch.testing.assert_close(z[k], expected, rtol=1e-4, atol=1e-6)
    assert max(int((client.y == k).sum()) for k in z) > 8 > min(int((client.y == k).sum()) for k in z)
    assert w == before  # batch norm has learnt nothing


def test_a_small_class_is_used_whole_however_often_it_is_drawn():
    client, w = somebody()
    z = ff.class_gradients(client, w, batch=10_000, repeats=4)
    for k in z:
        rows = (client.y == k).nonzero().flatten()
        torch.testing.assert_close(z[k], autograd(client, w, rows, k), rtol=1e-4, atol=1e-6)


def test_only_a_linear_classifier_has_these_gradients():
    with pytest.raises(ValueError, match=r"this one has: head\.experts\.0\.weight"):
        ff.linear({"body.x": torch.zeros(1), "head.experts.0.weight": torch.zeros(2, 2)})


# Matching ------------------------------------------------------------------------------------------------------------


def problem(classes=4, m=6, d=40, seed=0):
    """Return features to begin with, a classifier, and the gradients of some other features."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, d, generator=rng) / math.sqrt(d)
    v = {"head.weight": weight, "head.bias": torch.randn(classes, generator=rng)}
    real = torch.randn(classes, 9, d, generator=rng).relu() + torch.randn(classes, 1, d, generator=rng)
    weight, bias = ff.gradient(real, torch.arange(classes), ff.linear(v), torch.full((9,), 1 / 9))
    z = {k: torch.cat([weight[k], bias[k][:, None]], 1) for k in range(classes)}
    return torch.randn(classes, m, d, generator=rng), v, z


def creff_loss(h, v, z, k):
    """Return a class's loss as CReFF computes it: by differentiating twice."""
    weight, bias = (t.clone().requires_grad_() for t in ff.linear(v))
    ce = F.cross_entropy(F.linear(h, weight, bias), torch.full((len(h),), k))
    g_w, g_b = torch.autograd.grad(ce, (weight, bias), create_graph=True)
    pairs = [*zip(g_w, z[k][:, :-1], strict=True), (g_b, z[k][:, -1])]
    return sum(1 - a.dot(b) / (a.norm() * b.norm() + 1e-6) for a, b in pairs)


def losses(h, v, z):
    return torch.stack([creff_loss(h[k], v, z, k) for k in sorted(z)]).detach()


@pytest.mark.parametrize("d", [10, 40], ids=["whole space", "turned into the span"])
def test_matching_is_creffs(d):
    h, v, z = problem(d=d)
    expected = h.clone().requires_grad_()
    for _ in range(5):
        (slope,) = torch.autograd.grad(sum(creff_loss(expected[k], v, z, k) for k in z), expected)
        expected = (expected - 0.1 * slope).detach().requires_grad_()
    torch.testing.assert_close(ff.match(h, v, z, 5, 0.1), expected.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(ff.match(h, v, z, 0, 0.1), h)


@pytest.mark.parametrize("d", [10, 40])
def test_matching_brings_every_class_nearer_step_by_step(d):
    h, v, z = problem(d=d)
    path = [losses(h, v, z)]
    for _ in range(30):
        h = ff.match(h, v, z, 1, 0.02)
        path.append(losses(h, v, z))
    assert all((after < before).all() for before, after in itertools.pairwise(path))
    assert losses(ff.match(h, v, z, 500, 0.1), v, z).mean() < path[0].mean() / 2


def test_a_class_that_nobody_sent_stays():
    h, v, z = problem()
    moved = ff.match(h, v, {1: z[1], 3: z[3]}, 10, 0.1)
    assert torch.equal(moved[[0, 2]], h[[0, 2]])
    assert not (moved[[1, 3]] == h[[1, 3]]).any()
    alone = ff.match(h, v, {3: z[3]}, 10, 0.1)  # classes do not disturb each other
    torch.testing.assert_close(alone[3], moved[3], rtol=1e-4, atol=1e-5)


def test_mismatch_by_hand():
    a = tensor([[[3.0, 4.0], [1.0, 0.0]]]), tensor([[1.0, 1.0]])
    same = torch.cat([a[0], a[1][..., None]], -1)
    assert ff.mismatch(a, 7 * same).item() == pytest.approx(0, abs=1e-5)
    assert ff.mismatch(a, -same).item() == pytest.approx(2 + 2 + 2, abs=1e-5)
    other = tensor([[[4.0, 3.0, 1.0], [0.0, 1.0, 0.0]]])  # cos 24/25 and 0, and of the bias 1/sqrt(2)
    assert ff.mismatch(a, other).item() == pytest.approx(1 / 25 + 1 + 1 - 1 / math.sqrt(2), abs=1e-5)


def test_vanishing_gradients_move_nothing_and_break_nothing():
    h, v, z = problem()
    assert torch.equal(ff.match(h, v, {k: 0 * t for k, t in z.items()}, 3, 0.1), h)
    sure = {"head.weight": 1e4 * v["head.weight"], "head.bias": v["head.bias"]}  # a softmax of exact zeros and ones
    assert ff.match(h, sure, z, 3, 0.1).isfinite().all()


def test_features_begin_as_noise_of_the_classifiers_shape():
    _, v, _ = problem(classes=4, d=40)
    h = ff.noise(v, 500, np.random.default_rng(1))
    assert h.shape == (4, 500, 40)
    assert h.dtype == torch.float32
    assert abs(h.mean()) < 0.02
    assert h.std() == pytest.approx(1, abs=0.02)
    assert torch.equal(h, ff.noise(v, 500, np.random.default_rng(1)))


def test_tuning_learns_the_features_classes():
    client, w = somebody()
    h = torch.eye(10, 64)[:, None].repeat(1, 5, 1)  # class k is the k-th unit vector
    v = ff.tuned(client, w.head, h, epochs=60)
    assert v.layout == w.head.layout
    assert torch.equal(client.classify(v, h[:, 0]).argmax(1), torch.arange(10))
    assert ff.tuned(client, w.head, h, epochs=0) == w.head


# Activation maps -----------------------------------------------------------------------------------------------------

# Two batches of two images with one channel of 2 x 2, and their means.
H0 = tensor([[[[0.0, 2.0], [4.0, 6.0]]], [[[2.0, 4.0], [6.0, 8.0]]]])  # mean 1 3 5 7
H1 = tensor([[[[8.0, 0.0], [0.0, 0.0]]], [[[8.0, 4.0], [0.0, 0.0]]]])  # mean 8 2 0 0


def maps(M=None, sign="text", shape="chw", mode="mean", share=0.5):
    return ff.ActivationMaps({} if M is None else M, sign, shape, mode, share)


@pytest.mark.parametrize(
    ("sign", "loss", "after"),
    [
        ("text", 1.5, [1 + 0.5 * 8, 3 + 0.5 * 2, 5.0, 7.0]),  # psi = 2 - 1.5: the loss fell, so these helped
        ("formula", 1.5, [1 - 0.5 * 8, 3 - 0.5 * 2, 5.0, 7.0]),
        ("text", 3.0, [1 - 1.0 * 8, 3 - 1.0 * 2, 5.0, 7.0]),
        ("formula", 3.0, [1 + 1.0 * 8, 3 + 1.0 * 2, 5.0, 7.0]),
    ],
)
def test_two_batches_by_hand(sign, loss, after):
    bavd = maps(sign=sign)
    # The first batch is its own map: 1 3 5 7 is 0 1/3 2/3 1 when normalised, and the mean 1/2.
    assert torch.equal(bavd.drop("relu", H0), H0 * tensor([[0.0, 0.0], [1.0, 1.0]]))
    bavd.learn(tensor(2.0))
    assert bavd.M["relu"].flatten().tolist() == [1, 3, 5, 7]
    # The second batch is judged by the map of the first.
    assert torch.equal(bavd.drop("relu", H1), H1 * tensor([[0.0, 0.0], [1.0, 1.0]]))
    bavd.learn(tensor(loss))
    assert bavd.M["relu"].flatten().tolist() == pytest.approx(after)
    keep = tensor([v >= sum(after) / 4 for v in after]).view(2, 2)
    assert torch.equal(bavd.drop("relu", H0), H0 * keep)
    assert bavd.vector().tolist() == pytest.approx(after)


def test_the_largest_k_of_each_map_are_kept():
    for share, kept in ((0.25, [0, 0, 0, 1]), (0.5, [0, 0, 1, 1]), (0.6, [0, 1, 1, 1]), (1.0, [1, 1, 1, 1])):
        bavd = maps(mode="topk", share=share)
        assert torch.equal(bavd.drop("relu", H0), H0 * tensor(kept).view(2, 2))
    equal = maps(mode="topk", share=0.25)
    assert torch.equal(equal.drop("relu", torch.ones(2, 1, 2, 2)), torch.ones(2, 1, 2, 2))


def test_one_map_per_channel_or_one_for_all():
    h = torch.stack([H0[0, 0], 10 * (8 - H0[0, 0])])[None]  # the second channel is large where the first is small
    each = maps(shape="chw")
    assert torch.equal(each.drop("relu", h)[0, 0] > 0, tensor([[False, False], [True, True]]))
    assert torch.equal(each.drop("relu", h)[0, 1] > 0, tensor([[True, True], [False, False]]))
    one = maps(shape="hw")
    dropped = one.drop("relu", h)  # the mean over channels is 40 31 22 13
    assert torch.equal(dropped, h * tensor([[1.0, 1.0], [0.0, 0.0]]))
    for bavd, size in ((each, 8), (one, 4)):
        bavd.learn(tensor(1.0))
        assert len(bavd.vector()) == size


def test_a_dead_channel_is_kept_and_no_gradient_flows_through_the_map():
    dead = torch.zeros(2, 1, 2, 2)
    h = torch.cat([H0, dead], 1).requires_grad_()
    bavd = maps()
    (slope,) = torch.autograd.grad(bavd.drop("relu", h).sum(), h)
    mask = tensor([[[0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    assert torch.equal(slope, mask.expand(2, -1, -1, -1))
    bavd.learn(tensor(1.0))
    assert not bavd.vector().requires_grad


def test_maps_are_forgotten_or_go_on():
    M = {}
    first = maps(M)
    first.drop("relu", H0)
    first.learn(tensor(2.0))
    again = maps(M)  # a later visit: there is a map, but no earlier loss to compare with
    assert torch.equal(again.drop("relu", H1), H1 * tensor([[0.0, 0.0], [1.0, 1.0]]))
    again.learn(tensor(0.5))
    assert M["relu"].flatten().tolist() == [1, 3, 5, 7]
    again.drop("relu", H1)
    again.learn(tensor(0.0))
    assert M["relu"].flatten().tolist() == [1 + 0.5 * 8, 3 + 0.5 * 2, 5, 7]
    rows = torch.arange(3)
    assert again.forget(rows, torch.Generator()) is rows
    assert again.M == {}
    assert again.vector().shape == (0,)
    again.drop("relu", H1)
    again.learn(tensor(9.0))
    assert again.M["relu"].flatten().tolist() == [8, 2, 0, 0]


# Clusters ------------------------------------------------------------------------------------------------------------


def planted(groups, each=4, noise=0.05, seed=0):
    """Return vectors around as many orthogonal directions as there are groups."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.linalg.qr(torch.randn(30, groups, generator=rng)).Q.T
    return [c + noise * torch.randn(30, generator=rng) for c in centres for _ in range(each)]


@pytest.mark.parametrize("groups", [2, 3, 4, 5])
def test_the_silhouette_finds_the_planted_number(groups):
    found = ff.clusters(ff.cosines(planted(groups)), 2, 6, seed=3)
    assert len(set(found)) == groups
    assert all(len(set(found[4 * g : 4 * g + 4])) == 1 for g in range(groups))


def test_kappa_keeps_to_its_bounds():
    similarity = ff.cosines(planted(3))
    assert len(set(ff.clusters(similarity, 2, 2, seed=0))) == 2
    assert len(set(ff.clusters(similarity, 5, 6, seed=0))) in (5, 6)
    assert len(set(ff.clusters(similarity[:4, :4], 4, 6, seed=0))) == 3  # never as many as there are clients


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients(clients):
    found = ff.clusters(ff.cosines(planted(3, each=1)[:clients]), 2, 6, seed=0)
    assert len(set(found)) == (2 if clients == 3 else 1)


def test_distances_and_their_embedding():
    vectors = [*planted(3), -planted(3)[0], 5 * planted(3)[0], torch.zeros(30), torch.zeros(0)]
    similarity = 0.3 * ff.cosines(vectors) + 0.7 * ff.cosines([v.flip(0)[:7] for v in vectors])
    d = 1 - similarity
    assert d.min() >= 0
    assert d.max() <= 2
    assert torch.equal(d.diagonal(), torch.zeros(len(vectors)).double())
    assert ff.cosines(vectors)[0, 12].item() == pytest.approx(-1)
    assert ff.cosines(vectors)[0, 13].item() == pytest.approx(1)
    assert ff.cosines(vectors)[14, 0] == ff.cosines(vectors)[14, 15] == 0
    x = ff.embed(similarity)
    torch.testing.assert_close(torch.cdist(x, x) ** 2, 2 * d, rtol=0, atol=1e-6)


def test_a_cluster_moves_by_its_mean():
    delta = [Params.pack({"a": tensor([float(v), 0.0])}, {"b": tensor([float(v)])}) for v in (1, 2, 6)]
    means = ff.cluster_means([1, 0, 1], delta)
    assert [m["a"].tolist() for m in means] == [[3.5, 0], [2, 0], [3.5, 0]]
    assert [m["b"].item() for m in means] == [3.5, 2, 3.5]
    assert all(m.flat.dtype == torch.float64 for m in means)


def test_gradients_are_averaged_over_those_who_sent_one():
    w = Params.pack({"a": tensor([2.0])})
    total = ff.fold([ff.weighted(3, w, {0: tensor([1.0])}), ff.weighted(1, w, {0: tensor([4.0]), 7: tensor([5.0])})])
    assert (total.n, total.w["a"].item()) == (4, 8)
    assert {k: (total.z[k] / total.senders[k]).item() for k in total.z} == {0: 2.5, 7: 5}
