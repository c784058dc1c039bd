"""LDAE by hand: groups, draws, losses, what is trained, what is sent and how it is averaged."""

import math

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny

from algorithms.base import State
from algorithms.ldae import LDAE
from algorithms.params import Params
from orchestrator.checkpoint import fingerprint
from orchestrator.client import CALL, SERVER, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

LOCAL = {"lr": 0.005, "batch": 16, "loss": "balanced_softmax", "prior": "gpi"}
BATCH_NORM = {"name": "resnet32", "width": 4}


def experiment(fields=None, **changes):
    return tiny(**{"algorithm": {"ldae": fields or {}}, "local": LOCAL, "rounds": 1} | changes)


def parts_of(model: Params, i: int) -> tuple[Params, Params]:
    """Split off by hand what all experts share, and what expert i owns."""
    owned = [name for name in model if ".experts." in name]
    mine = [name for name in owned if name.split(".experts.")[1].startswith(f"{i}.")]
    return model.where(lambda name: name not in owned), model.where(lambda name: name in mine)


def metrics(run):
    return [{k: v for k, v in line["metrics"].items() if not k.startswith("time/")} for line in run.history]


# Grouping ------------------------------------------------------------------------------------------------------------


def group(fields, proxies, prior=(1.0, 0.0)):
    memory = {"proxies": {k: torch.tensor(v) for k, v in proxies.items()}, "prior": torch.tensor(prior)}
    return LDAE(**fields).group(State(memory), None)  # proxies alone decide, no client is asked


def test_groups_are_cut_from_the_ranking_by_cosine():
    # Cosines with (1, 0): 0.6, 1, -1, 0.8, 0, 0.6; the length of a proxy does not count, and 4 learned nothing.
    proxies = {0: [3.0, 4.0], 1: [0.001, 0.0], 2: [-5.0, 0.0], 3: [8.0, -6.0], 4: [0.0, 0.0], 7: [30.0, 40.0]}
    assert group({"num_experts": 3}, proxies) == [[1, 3], [0, 7], [4, 2]]
    assert group({"num_experts": 2}, proxies) == [[1, 3, 0], [7, 4, 2]]
    assert group({"num_experts": 4}, proxies) == [[1, 3], [0, 7], [4], [2]]
    assert group({"num_experts": 2}, proxies, prior=(0.0, 9.0)) == [[0, 7, 1], [2, 4, 3]]


def test_groups_by_label_distribution():
    run = finish(driver(experiment({"grouping": "label_distribution", "num_experts": 2})))
    counts = run.split.counts.astype(float)
    cosine = counts @ counts.sum(0) / np.linalg.norm(counts, axis=1)
    ranking = sorted(run.selectable, key=lambda k: -cosine[k])
    assert run.server.groups == [ranking[:3], ranking[3:]]


def test_groups_by_chance_are_kept():
    run = driver(experiment({"grouping": "random", "num_experts": 2}, rounds=2))
    run.advance()
    run.advance()
    groups = run.server.groups
    assert sorted(groups[0] + groups[1]) == run.selectable
    assert [len(part) for part in groups] == [3, 3]
    assert finish(run).server.groups == groups
    other = finish(driver(experiment({"grouping": "random", "num_experts": 2}, rounds=1, seed=5)))
    assert other.server.groups != groups


def test_groups_need_proxies_and_enough_clients():
    with pytest.raises(ValueError, match="let gpi run right before it"):
        group({}, {})
    with pytest.raises(ValueError, match="num_experts is 3, but there are only 2 clients"):
        group({}, {0: [1.0, 0.0], 1: [0.0, 1.0]})
    late = driver(experiment(algorithm=["fedavg", {"ldae": {"num_experts": 2}}]))
    with pytest.raises(ValueError, match="let gpi run right before it"):
        finish(late)


# Selection -----------------------------------------------------------------------------------------------------------

GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def draws(i=0, per_round=4, times=200, **fields):
    rng = np.random.default_rng(1)
    drawn = [LDAE(**fields).select(i, GROUPS, per_round, rng) for _ in range(times)]
    assert all(len(set(ids)) == len(ids) for ids in drawn), "nobody trains one expert twice"
    return drawn


@pytest.mark.parametrize(("i", "per_round"), [(0, 3), (1, 4), (2, 8)])
def test_alpha_1_never_leaves_the_group(i, per_round):
    drawn = draws(i, per_round, group_fraction=1.0)
    assert {k for ids in drawn for k in ids} == set(GROUPS[i])
    assert {len(ids) for ids in drawn} == {min(per_round, len(GROUPS[i]))}


def test_alpha_0_draws_from_all_clients_alike():
    share = np.bincount(np.ravel(draws(times=2000, group_fraction=0.0)), minlength=10) / 2000
    np.testing.assert_allclose(share, 0.4, atol=0.05)


def test_alpha_is_the_share_of_the_group():
    drawn = draws(times=2000, group_fraction=0.5)
    assert {len(ids) for ids in drawn} == {4}
    own = [sum(k in GROUPS[0] for k in ids) for ids in drawn]
    assert min(own) == 2
    # Two of the group for sure; the other two come from the eight clients left, two of which are of the group.
    assert np.mean(own) == pytest.approx(2 + 2 * 2 / 8, abs=0.05)
    assert {sum(k in GROUPS[0] for k in ids[:3]) for ids in draws(group_fraction=0.7)} == {3}  # 2.8 of 4


def test_others_fill_up_a_small_group():
    drawn = draws(2, per_round=6, group_fraction=0.5)
    assert all({8, 9} <= set(ids) and len(ids) == 6 for ids in drawn)
    assert {k for ids in drawn for k in ids} == set(range(10))


def test_how_many_are_drawn():
    assert {len(ids) for ids in draws(per_round=3)} == {3}
    assert {len(ids) for ids in draws(per_round=3, clients_per_expert=7)} == {7}
    assert {len(ids) for ids in draws(per_round=7, total_budget=True)} == {2}
    assert {len(ids) for ids in draws(per_round=3, clients_per_expert=9, total_budget=True)} == {3}
    assert {len(ids) for ids in draws(per_round=2, total_budget=True)} == {1}
    assert all(sorted(ids) == list(range(10)) for ids in draws(clients_per_expert=20))


# What a client trains and sends --------------------------------------------------------------------------------------


def client_of(run, id=0, call=0, round=1):
    seed = stream(run.experiment.seed, CALL, round, call, id)
    proxy = run.server.fields()["prior"]
    return run.engine.worker.client(id, 1, {}, run.origin, seed, lr=run.experiment.local.lr, proxy=proxy)


def after_proxies(fields=None, **changes):
    """Return a run in which only the proxy round is over."""
    run = driver(experiment(fields, **changes))
    run.advance()
    return run


@pytest.mark.parametrize(("model", "loss_logits"), [("cnn_small", "own"), (BATCH_NORM, "mean")])
def test_frozen_experts_stay_bit_identical_and_unsent(model, loss_logits):
    run = after_proxies({"loss_logits": loss_logits}, model=model)
    model = run.server.model
    before = model.clone()
    algorithm, client = run.parts[1], client_of(run)
    sent = algorithm.specialise(client, model, 1)
    assert model == before, "neither weights nor batch-norm buffers may move in place"
    theta, E = parts_of(model, 1)
    assert set(sent.theta) == set(theta)
    assert list(sent.E) == [1]
    assert set(sent.E[1]) == set(E)
    assert sent.n == sent.n_of[1] == client.n
    for old, new in ((theta, sent.theta / client.n), (E, sent.E[1] / client.n)):
        assert not torch.allclose(old.flat, new.flat, rtol=1e-4)
        assert not old.buffers.numel() or not torch.allclose(old.buffers, new.buffers, rtol=1e-4)


@pytest.mark.parametrize(("loss_logits", "matters"), [("mean", True), ("own", False)])
def test_frozen_experts_take_part_in_the_forward_pass_of_the_mean(loss_logits, matters):
    run = after_proxies({"loss_logits": loss_logits})
    model = run.server.model
    other = model.replace({"head.experts.2.weight": -model["head.experts.2.weight"]})
    one, two = (run.parts[1].specialise(client_of(run), w, 0).theta for w in (model, other))
    assert (one != two) == matters


def test_losses_by_hand():
    run = after_proxies()
    w, client = run.server.model, client_of(run)
    x, y, log_pi = client.x[:8], client.y[:8], run.server.prior.log()
    v = client.classify(w, client.features(w, x), each=True)

    def bsm(z):
        return -(z + log_pi).log_softmax(1)[torch.arange(8), y].mean()

    mean, own = LDAE(), LDAE(loss_logits="own")
    for i in (None, 1):
        torch.testing.assert_close(mean.objective(client, x, y, w, i), bsm((v[0] + v[1] + v[2]) / 3))
    torch.testing.assert_close(own.objective(client, x, y, w), bsm(v[0]) + bsm(v[1]) + bsm(v[2]))
    torch.testing.assert_close(own.objective(client, x, y, w, 1), 3 * bsm(v[1]))
    predict = mean.generic(client, w)
    torch.testing.assert_close(predict(x), v.mean(0))  # without the prior


def test_only_theta_and_one_expert_are_uploaded():
    run = finish(driver(experiment({"clients_per_expert": 2})))
    theta, E = ((9 + 1) * 16 + (16 * 9 + 1) * 32), ((32 * 16 + 1) * 64 + 64 * 10)
    line = run.history[1]["metrics"]
    assert line["bytes/up"] == 3 * 2 * 4 * (theta + E)
    assert line["bytes/down"] == 3 * 2 * 4 * (theta + 3 * E)


# Aggregation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "model"), [("sequential", "cnn_small"), ("parallel", BATCH_NORM)])
def test_a_round_by_hand(schedule, model):
    fields = {"num_experts": 2, "schedule": schedule, "clients_per_expert": 3}
    run = after_proxies(fields, model=model)
    algorithm, model = run.parts[1], run.server.model
    groups = algorithm.group(run.server, None)
    rng = np.random.default_rng(stream(0, SERVER, 1))
    expected, uploads = dict(model), []
    for i in (0, 1):
        drawn = algorithm.select(i, groups, 3, rng)
        assert len(drawn) == 3
        start = model.replace(expected) if schedule == "sequential" else model
        # The seed of a call depends on its number in the round, so a client drawn twice shuffles differently.
        sums = [algorithm.specialise(client_of(run, k, call=i), start, i) for k in sorted(drawn)]
        E = {name: sum(s.E[i][name].double() for s in sums) / sum(s.n for s in sums) for name in sums[0].E[i]}
        uploads = sums if schedule == "sequential" else uploads + sums
        n = sum(s.n for s in uploads)
        theta = {name: sum(s.theta[name].double() for s in uploads) / n for name in sums[0].theta}
        expected |= {name: value.float() for name, value in (E | theta).items()}
    run.advance()
    assert run.server.groups == groups
    for name, value in run.server.model.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
        assert not torch.equal(value, model[name])


def test_a_client_may_be_drawn_for_two_experts():
    run = finish(driver(experiment({"num_experts": 2, "clients_per_expert": 6})))  # everybody for both
    assert run.history[1]["metrics"]["bytes/up"] == 12 * 4 * (4800 + 33472)


def test_schedules_agree_on_the_first_expert_and_differ_after_it():
    one, other = (finish(driver(experiment({"schedule": s}))).server.model for s in ("parallel", "sequential"))
    same = [torch.equal(parts_of(one, i)[1].flat, parts_of(other, i)[1].flat) for i in range(3)]
    assert same == [True, False, False]
    assert parts_of(one, 0)[0] != parts_of(other, 0)[0]


# Warm-up -------------------------------------------------------------------------------------------------------------


def test_specialises_at_the_right_round():
    run = driver(experiment({"specialise_from": 0.6}, rounds=5))
    run.advance()
    together = []
    for _ in range(5):
        line = run.advance()
        together.append(line["metrics"]["bytes/up"] == 3 * 4 * (4800 + 3 * 33472))
        assert bool(run.server.groups) != together[-1]
    assert together == [True, True, True, False, False]


@pytest.mark.parametrize("loss_logits", ["mean", "own"])
def test_training_all_experts_together_is_fedavg_on_their_network(loss_logits):
    fields = {"specialise_from": 1.0, "loss_logits": loss_logits}
    one = finish(driver(experiment(fields, rounds=2)))
    other = finish(driver(experiment(rounds=2, algorithm="fedavg", model={"name": "cnn_small", "experts": 3})))
    assert (one.server.model == other.server.model) == (loss_logits == "mean")
    assert (metrics(one) == metrics(other)) == (loss_logits == "mean")


# The whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 4}], ids=["cnn", "resnet"])
@pytest.mark.parametrize("loss_logits", ["mean", "own"])
def test_one_expert_is_fedavg_with_balanced_softmax_and_gpi_bit_for_bit(model, loss_logits):
    one = {"num_experts": 1, "loss_logits": loss_logits, "group_fraction": 1.0}
    runs = [
        finish(driver(experiment(algorithm=chosen, model=model, rounds=3, evaluate={"every": 1}, seed=3)))
        for chosen in ({"ldae": one}, "fedavg")
    ]
    assert runs[0].server.model == runs[1].server.model
    assert metrics(runs[0]) == metrics(runs[1])
    assert "generic/acc" in metrics(runs[0])[-1]
    phases = [[line["phase"].replace("ldae", "fedavg") for line in run.history] for run in runs]
    assert phases[0] == phases[1] == ["gpi.proxy"] + 3 * ["fedavg.train"]
    prints = [fingerprint(run.server.model, run.memory, metrics(run)) for run in runs]
    assert prints[0] == prints[1]


def test_learns():
    run = finish(driver(experiment({"schedule": "sequential"}, rounds=6, evaluate={"every": 6})))
    assert run.history[-1]["metrics"]["generic/acc"] > 0.6
    assert run.history[-1]["metrics"]["train/loss"] < run.history[1]["metrics"]["train/loss"] / 2


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("cnn_small", {"group_fraction": 1.0, "loss_logits": "own", "schedule": "sequential"}),
        (BATCH_NORM, {"num_experts": 2}),
    ],
    ids=["cnn", "resnet"],
)
def test_clients_of_one_sample_or_one_class(model, fields):
    dataset = digits()
    rows = [np.flatnonzero(dataset.y_train == c) for c in range(10)]
    train = (rows[3][:1], rows[5][:20], np.array([r[1] for r in rows]), np.concatenate([r[30:34] for r in rows]))
    counts = np.stack([np.bincount(dataset.y_train[t], minlength=10) for t in train])
    tests = tuple(np.flatnonzero(dataset.y_test == c)[:5] for c in (3, 5, 0, 1))
    parts = Split(train=train, validation=tuple(t[:0] for t in train), test=tests, counts=counts)
    chosen = experiment(fields, data={"name": "digits", "clients": 4}, rounds=2, model=model)
    run = finish(Driver(chosen, dataset, parts, InProcess(Worker(chosen, dataset, parts))))
    assert run.server.model.flat.isfinite().all()
    assert run.server.model.buffers.isfinite().all()
    assert all(not math.isnan(v) for v in run.history[-1]["metrics"].values())


def test_a_network_that_has_no_experts_is_refused():
    with pytest.raises(ValueError, match="'cnn_mupfl' takes no experts; those that do: cnn_small, cnn_ecl, resnet8"):
        driver(experiment(model="cnn_mupfl"))
