"""The long-tail losses by hand, their limits, what they are given, and what they do not go with."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny

from algorithms.losses import LADE, LDAM, LOSSES, BalancedSoftmax, CrossEntropy, FedLC
from algorithms.priors import pseudo_counts
from orchestrator.client import CALL, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.experiment import Experiment, dump
from orchestrator.models import build
from orchestrator.space import trials
from orchestrator.sweep_file import read
from orchestrator.worker import Worker
from orchestrator.yaml_file import InputError

PRIORS = ["local", "global", "gpi"]


def batch(size=7, classes=4, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(size, classes, generator=rng)
    return z, torch.randint(classes, (size,), generator=rng)


def local(loss, prior="none", **others):
    return {"lr": 0.01, "batch": 16, "loss": loss, "prior": prior} | others


def client_of(run, id=0, round=0, **call):
    seed = stream(run.experiment.seed, CALL, round, 0, id)
    return run.engine.worker.client(id, 0, {}, run.origin, seed, lr=run.experiment.local.lr, **call)


def small(directory=None, **changes):
    """Return a run of three clients: one has a single sample, one a single class, one a bit of everything."""
    dataset = digits()
    rows = [np.flatnonzero(dataset.y_train == c) for c in range(10)]
    train = (rows[3][:1], rows[5][:17], np.concatenate([r[: 2 + c] for c, r in enumerate(rows)]))
    counts = np.stack([np.bincount(dataset.y_train[t], minlength=10) for t in train])
    none = tuple(t[:0] for t in train)
    parts = Split(train=train, validation=none, test=tuple(np.arange(3) for _ in train), counts=counts)
    chosen = tiny(**{"data": {"name": "digits", "clients": 3}} | changes)
    return Driver(chosen, dataset, parts, InProcess(Worker(chosen, dataset, parts)), directory)


# FedLC --------------------------------------------------------------------------------------------------------------


def test_fedlc_by_hand():
    z, y = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), torch.tensor([0, 2])
    n = torch.tensor([16.0, 81.0, 1.0])
    expected = 0.0
    for row, c in zip(z.tolist(), y.tolist(), strict=True):
        calibrated = [v - 0.6 * m for v, m in zip(row, (1 / 2, 1 / 3, 1), strict=True)]
        expected += math.log(sum(map(math.exp, calibrated))) - calibrated[c]
    assert float(FedLC(0.6)(z, y, n)) == pytest.approx(expected / 2)


def test_fedlc_without_margin_is_cross_entropy():
    z, y = batch()
    assert torch.equal(FedLC(0.0)(z, y, torch.tensor([3.0, 0.0, 1.0, 50.0])), CrossEntropy()(z, y, torch.ones(4)))


def test_fedlc_masks_classes_that_a_client_has_not():
    z = torch.tensor([[1.0, 20.0, 1.0]], requires_grad=True)
    loss = FedLC(1.0)(z, torch.tensor([0]), torch.tensor([1.0, 0.0, 1.0]))
    assert loss.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(loss, z)
    assert grad.tolist() == [[pytest.approx(-0.5), pytest.approx(0, abs=1e-30), pytest.approx(0.5)]]
    # 100 tau: a small margin only pushes the class away.
    weak = FedLC(0.01)(z, torch.tensor([0]), torch.tensor([1.0, 0.0, 1.0]))
    assert weak.item() == pytest.approx(math.log(2 + math.exp(20 - 1 - 1 + 0.01)), rel=1e-5)


@pytest.mark.parametrize("prior", ["none", "local"])
def test_fedlc_goes_by_the_clients_own_counts(prior):
    run = driver(tiny(local=local("fedlc", prior)))
    client = client_of(run, 2)
    counts = torch.from_numpy(run.split.counts[2]).float()
    assert (counts == 0).any()
    z, y = batch(classes=10)
    expected = F.cross_entropy(z - counts.clamp_min(1e-8) ** -0.25, y)
    torch.testing.assert_close(client.loss(z, y), expected)


def test_fedlc_without_margin_is_fedavg_bit_for_bit():
    none = finish(small(local=local({"fedlc": {"margin": 0}})))
    assert none.server.model == finish(small(local=local("ce"))).server.model


# LDAM ---------------------------------------------------------------------------------------------------------------

N = torch.tensor([256.0, 81.0, 16.0, 1.0])


def test_margins_by_hand():
    torch.testing.assert_close(LDAM().margins(N), torch.tensor([1 / 8, 1 / 6, 1 / 4, 1 / 2]))
    torch.testing.assert_close(LDAM(margin=0.2).margins(N), torch.tensor([0.05, 0.2 / 3, 0.1, 0.2]))
    torch.testing.assert_close(LDAM().margins(1000 * N), LDAM().margins(N))


def test_ldam_by_hand():
    z, y = batch(3)
    m, expected = [1 / 8, 1 / 6, 1 / 4, 1 / 2], []
    for row, c in zip(z.tolist(), y.tolist(), strict=True):
        row[c] -= 20 * m[c]
        expected.append(math.log(sum(map(math.exp, row))) - row[c])
    assert float(LDAM(scale=20.0)(z, y, N)) == pytest.approx(sum(expected) / 3)


def test_ldam_without_margin_is_cross_entropy_of_scaled_cosines():
    z, y = batch()
    assert torch.equal(LDAM(margin=0.0)(z, y, N), F.cross_entropy(z, y))
    run = driver(tiny(local=local({"ldam": {"margin": 0, "drw_from": 1, "scale": 12}}, "global"), clients_per_round=1))
    start = run.server.model
    (k,) = run._draw(run.plan[0])
    run.advance()

    def scaled(client, x, y, w):
        h = F.normalize(client.features(w, x))
        return F.cross_entropy(12 * h @ F.normalize(w["head.experts.0.weight"]).T, y)

    by_hand = client_of(run, k).fit(scaled, w=start).w
    torch.testing.assert_close(run.server.model.flat, by_hand.flat, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(by_hand.flat, start.flat, atol=1e-3)


def test_class_weights_by_hand():
    # beta 1/2: 1/2 over 1/2, 3/4 and 7/8 is 1, 2/3 and 4/7; their sum 47/21 becomes 3.
    found = LDAM(drw_beta=0.5).weights(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([1, 2 / 3, 4 / 7]) * 3 * 21 / 47)
    assert LDAM(drw_beta=0.0).weights(N).tolist() == [1, 1, 1, 1]
    n = np.array([5000, 387.5, 20, 1, 0.1])
    exact = (1 - 0.9999) / (1 - 0.9999**n)
    np.testing.assert_allclose(LDAM().weights(torch.tensor(n).float()).numpy(), exact / exact.sum() * 5, rtol=1e-5)


def test_weighted_ldam_is_the_weighted_mean():
    z, y = batch()
    each = torch.stack([LDAM(drw_from=1.0)(z[i : i + 1], y[i : i + 1], N) for i in range(len(y))])
    w = LDAM().weights(N)[y]
    torch.testing.assert_close(LDAM(drw_from=0.0)(z, y, N), (w * each).sum() / w.sum())
    torch.testing.assert_close(LDAM()(z, y, N), each.mean())


def test_classes_are_weighted_when_it_is_time():
    loss = LDAM()
    assert [loss.at(r / 9).drw_from == 0 for r in range(9)] == [False] * 6 + [True] * 3
    assert all(LDAM(drw_from=0.0).at(p).drw_from == 0 for p in (0.0, 0.5))
    assert all(LDAM(drw_from=1.0).at(p) == LDAM(drw_from=1.0) for p in (0.0, 0.999))
    assert LDAM(margin=0.3, scale=9.0, drw_beta=0.5).at(0.9) == LDAM(0.3, 9.0, 0.0, 0.5)


def test_a_run_defers_its_weights(tmp_path):
    """Of three rounds, only the last one is weighted; so it is after a resumption."""
    never, later, always = (
        {"local": local({"ldam": {"drw_from": share}}, "global"), "rounds": 3, "failures": {"checkpoint_s": 0}}
        for share in (1.0, 2 / 3, 0.0)
    )
    plain, deferred = small(**never), small(tmp_path, **later)
    for _ in range(2):
        plain.advance()
        deferred.advance()
        assert plain.server.model == deferred.server.model
    assert finish(small(**always)).server.model != plain.server.model
    again = finish(small(tmp_path, **later))
    finish(plain)
    finish(deferred)
    assert plain.server.model != deferred.server.model
    assert again.fingerprint() == deferred.fingerprint()


# LADE ---------------------------------------------------------------------------------------------------------------


def test_lade_by_hand():
    z = [[1.0, -2.0, 0.5], [0.0, 3.0, 1.0], [2.0, 2.0, -1.0], [0.3, 0.1, 0.2]]
    y, pi, C = [0, 1, 0, 0], [0.7, 0.2, 0.1], 3
    bsm = 0.0
    for row, c in zip(z, y, strict=True):
        shifted = [v + math.log(p) for v, p in zip(row, pi, strict=True)]
        bsm += (math.log(sum(map(math.exp, shifted))) - shifted[c]) / len(y)
    lader = 0.0
    for c in range(C):
        own = [row[c] for row, k in zip(z, y, strict=True) if k == c]
        first = sum(own) / len(own) if own else 0.0  # nobody is of class 2
        moved = [row[c] - math.log(pi[c]) - math.log(C) for row in z]
        second = math.log(sum(map(math.exp, moved)) / len(moved))
        lader -= pi[c] * (first - second - 0.25 * second**2)
    found = LADE(weight=0.3, remine=0.25)(torch.tensor(z), torch.tensor(y), torch.tensor(pi))
    assert float(found) == pytest.approx(bsm + 0.3 * lader)


def test_lade_without_its_term_is_balanced_softmax():
    z, y = batch()
    pi = torch.tensor([0.6, 0.3, 0.09, 0.01])
    assert torch.equal(LADE(weight=0.0)(z, y, pi), BalancedSoftmax()(z, y, pi))
    losses = {"lade": {"weight": 0}}, "balanced_softmax"
    runs = [finish(small(local=local(loss, "local"))) for loss in losses]
    assert runs[0].server.model == runs[1].server.model


# What losses are given ----------------------------------------------------------------------------------------------


def test_pseudo_counts_by_hand():
    mine, all_of_us = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([6.0, 3.0, 1.0])
    share = torch.tensor([3 / 4.1, 1 / 4.1, 0.1 / 4.1])
    assert pseudo_counts("local", share, mine, all_of_us).tolist() == pytest.approx([3, 1, 0.1])
    assert pseudo_counts("global", torch.tensor([0.6, 0.3, 0.1]), mine, all_of_us).tolist() == pytest.approx([6, 3, 1])
    assert pseudo_counts("gpi", torch.tensor([0.5, 0.3, 0.2]), mine, all_of_us).tolist() == pytest.approx([5, 3, 2])


@pytest.mark.parametrize("prior", PRIORS)
def test_ldam_gets_as_many_samples_as_the_prior_stands_for(prior):
    run = driver(tiny(local=local({"ldam": {"drw_from": 0, "drw_beta": 0.9}}, prior)))
    proxy = torch.arange(1.0, 11.0) / 55
    client = client_of(run, 1, proxy=proxy)
    counts = torch.from_numpy(run.split.counts).float()
    n = {"local": counts[1].clamp_min(0.1), "global": counts.sum(0), "gpi": counts.sum() * proxy}[prior]
    z, y = batch(classes=10)
    z = z - 30 * F.one_hot(y, 10) * 0.5 * n**-0.25 / (n**-0.25).max()
    torch.testing.assert_close(
        client.loss(batch(classes=10)[0], y),
        F.cross_entropy(z, y, weight=(1 / (1 - 0.9 ** n.double())).float()),
        rtol=1e-4,
        atol=1e-5,
    )


def test_every_job_carries_the_progress_of_its_phase():
    run = small(local=local("ldam", "gpi"), rounds=4, clients_per_round=1, algorithm=["fedavg", "finetune"])
    engine, seen = run.engine.run, []

    def recorded(jobs, shared, origin):
        seen.extend(job.progress for job in jobs if job.task == "run")
        return engine(jobs, shared, origin)

    run.engine.run = recorded
    finish(run)
    everyone = [0.0] * len(run.selectable)
    assert seen == [*everyone, 0.0, 0.25, 0.5, 0.75, *everyone]


# The cosine classifier ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn_small", "resnet8"])
def test_a_cosine_classifier_takes_the_place_of_a_linear_one(name):
    plain, cosine = (build(name, (1, 8, 8), 10, cosine=scale, seed=3).eval() for scale in (None, 7.0))
    assert [n for n, _ in cosine.head.named_parameters(prefix="head")] == ["head.experts.0.weight"]
    assert cosine.experts == 0
    mine, other = dict(plain.body.named_parameters()), dict(cosine.body.named_parameters())
    assert mine.keys() == other.keys()
    assert all(torch.equal(t, other[n]) for n, t in mine.items())
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        h, w = cosine.body(x).double(), cosine.head.experts[0].weight.double()
        cos = (h @ w.T) / h.norm(dim=1, keepdim=True) / w.norm(dim=1)
        torch.testing.assert_close(cosine(x), 7 * cos.float())


def test_experts_take_the_scale_of_the_loss():
    network = build("cnn_small", (1, 8, 8), 10, experts=2, cosine=7.0, seed=3)
    assert [expert.scale for expert in network.head.experts] == [7.0, 7.0]
    default = build("cnn_small", (1, 8, 8), 10, experts=2, seed=3)
    assert [expert.scale for expert in default.head.experts] == [30.0, 30.0]
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), default.parameters(), strict=True))


def test_the_loss_decides_about_the_classifier():
    names = {loss: set(driver(tiny(local=local(loss, "global"))).server.model.head) for loss in ("lade", "ldam")}
    assert names == {"lade": {"head.weight", "head.bias"}, "ldam": {"head.experts.0.weight"}}
    run = driver(tiny(local=local({"ldam": {"scale": 5}}, "global")))
    z = client_of(run).logits(run.server.model, client_of(run).x)
    assert 1 < z.abs().max() <= 5


# Together -----------------------------------------------------------------------------------------------------------

COMBINATIONS = [
    *(("fedavg", loss, "none") for loss in ("ce", "focal", "fedlc")),
    *(
        (name, loss, prior)
        for name, losses in (("fedavg", ("balanced_softmax", "ldam", "lade")), ("ride", ("ldam", "lade")))
        for loss in losses
        for prior in PRIORS
    ),
    *(("paco", "balanced_softmax", prior) for prior in PRIORS),
    ("ride", "fedlc", "local"),
    ("ldae", "ldam", "gpi"),
    (["fedavg", {"ecl": {"epochs": 1}}], "fedlc", "none"),
    (["fedavg", {"ecl": {"epochs": 1}}], "ldam", "global"),
    (["paco", {"finetune": {"epochs": 1}}], "balanced_softmax", "local"),
    ("bpfed", "lade", "local"),
    ({"bpfed": {"mixup": "sample", "stage2_epochs": 1}}, "fedlc", "none"),
]


@pytest.mark.parametrize(("algorithm", "loss", "prior"), COMBINATIONS)
def test_every_loss_and_prior_trains_to_finite_weights(algorithm, loss, prior):
    """LDAM is weighted from the first round on."""
    named = {"ldam": {"drw_from": 0}} if loss == "ldam" else loss
    fields = {"num_experts": 2} if algorithm in ("ride", "ldae") else {}
    chain = {algorithm: fields} if isinstance(algorithm, str) else algorithm
    run = small(algorithm=chain, local=local(named, prior))
    start = run.server.model
    finish(run)
    assert run.server.model.flat.isfinite().all()
    assert run.server.model != start
    losses = [line["metrics"]["train/loss"] for line in run.history]
    assert all(map(math.isfinite, losses))


def test_priors_make_different_models():
    for loss in ("ldam", "lade"):
        flats = [finish(small(local=local(loss, prior), rounds=1)).server.model.flat for prior in PRIORS]
        assert len({tuple(flat.tolist()) for flat in flats}) == 3


# Combinations that make no sense ------------------------------------------------------------------------------------


def wrong(text):
    with pytest.raises(InputError) as caught:
        read(None, text)
    return [message.removeprefix("<text>:") for message in caught.value.messages]


@pytest.mark.parametrize("name", ["bpfed", "fedloge", "mupfl"])
def test_a_linear_classifier_cannot_be_a_cosine_one(name):
    for chain in (name, f"[fedavg, {name}]"):
        assert wrong(f"algorithm: {chain}\nlocal:\n  loss: ldam\n  prior: local") == [
            f"3:9: local.loss: loss 'ldam' does not fit: it needs a cosine classifier, but {name} a linear one"
        ]
    assert read(None, f"algorithm: {name}\nlocal: {{loss: fedlc}}")


@pytest.mark.parametrize("loss", ["focal", "fedlc", "ldam", "lade"])
def test_paco_has_a_loss_of_its_own(loss):
    prior = "local" if LOSSES[loss].uses_prior else "none"
    (found,) = wrong(f"algorithm: paco\nlocal: {{loss: {loss}, prior: {prior}}}")
    assert found.startswith(f"2:15: local.loss: loss '{loss}' does not fit: paco extends balanced_softmax: choose")
    assert read(None, "algorithm: paco\nlocal: {loss: balanced_softmax, prior: local}")


@pytest.mark.parametrize("prior", ["global", "gpi"])
def test_fedlc_knows_no_other_prior(prior):
    assert wrong(f"local: {{loss: fedlc, prior: {prior}}}") == [
        "1:29: local.prior: loss 'fedlc' is one of each client's own counts; leave the prior out"
    ]


@pytest.mark.parametrize("loss", ["ldam", "lade"])
def test_a_prior_must_be_chosen(loss):
    (found,) = wrong(f"local: {{loss: {loss}}}")
    assert found.startswith(f"1:8: local.prior: loss '{loss}' needs a class prior; choose one of global, gpi, local")


def test_a_prior_that_nobody_can_estimate():
    assert wrong("algorithm: local\nlocal: {loss: lade, prior: gpi}") == [
        "2:28: local.prior: prior 'gpi' is read off a shared classifier, which local does not train"
    ]


def test_in_a_grid_fedlc_is_one_trial():
    sweep = read(None, "local: {loss: !grid [fedlc, ldam], prior: !grid [local, global]}")
    assert [(t.experiment.local.loss[0], t.experiment.local.prior) for t in trials(sweep)] == [
        ("fedlc", "none"), ("ldam", "local"), ("ldam", "global")
    ]  # fmt: skip


def test_losses_read_back():
    text = "local: {loss: {ldam: {scale: 16, drw_from: 0.8}}, prior: gpi}\nalgorithm: ride"
    e = Experiment.model_validate(read(None, text).experiment)
    again = Experiment.model_validate(read(None, dump(e)).experiment)
    assert again == e
    assert again.local.make_loss() == LDAM(scale=16.0, drw_from=0.8)
    assert tiny(local=local("ldam", "local")).local.make_loss() == LDAM()


# Two views ----------------------------------------------------------------------------------------------------------


def test_an_image_may_come_in_several_views():
    run = driver(tiny(local=local("ce", augment="crop_flip")))
    one, two = client_of(run), client_of(run)
    for (x, y), (xs, ys) in zip(one.batches(1), two.batches(1, views=2), strict=True):
        assert xs.shape == (2, *x.shape)
        assert torch.equal(y, ys)
        assert not torch.equal(xs[0], xs[1])
    first = next(client_of(run).batches(1))[0]
    assert torch.equal(next(client_of(run).batches(1, views=2))[0][0], first)
    plain = client_of(driver(tiny()))
    xs, ys = next(plain.batches(1, views=3))
    assert torch.equal(xs[0], xs[2])
    assert all((plain.y[(plain.x == x).flatten(1).all(1)] == c).all() for x, c in zip(xs[0], ys, strict=True))


def test_views_reach_the_objective():
    shapes = []

    def objective(client, x, y, w):
        shapes.append(x.shape)
        return client.loss(client.logits(w, x[1]), y)

    run = driver(tiny())
    client_of(run).fit(objective, views=2, batch=4096, w=run.server.model)
    assert shapes == [(2, client_of(run).n, 1, 8, 8)]
