"""MuPFL: each module by hand and by switch; with all of them off it is FedAvg."""

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny
from torch import tensor

from algorithms import federated_features as ff
from algorithms.mupfl import MuPFL
from algorithms.params import Params
from orchestrator.checkpoint import fingerprint
from orchestrator.client import CALL, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

OFF = {"bavd": False, "acmu": False, "pkcf": False}
QUICK = {"classifier_epochs": 1, "match_steps": 3, "features_per_class": 4, "grad_repeats": 1}
BATCH_NORM = {"name": "resnet8", "width": 4}


def mupfl(rounds=2, **fields):
    """Return a run of MuPFL; `clients_per_round` and the like go to the experiment."""
    own = {k: fields.pop(k) for k in list(fields) if k in MuPFL.__dataclass_fields__}
    return driver(tiny(algorithm={"mupfl": QUICK | own}, rounds=rounds, **fields))


def only(*modules, **fields):
    return mupfl(**(OFF | dict.fromkeys(modules, True) | fields))


_models = {}


def trained(*modules, **fields):
    """Return the global model after two rounds of these modules; the same is trained only once."""
    key = repr((sorted(modules), sorted(fields.items())))
    if key not in _models:
        run = only(*modules, evaluate={"what": ["generic"]}, **fields)
        run.advance()
        run.advance()
        _models[key] = run.server.model
    return _models[key]


def computed(run):
    """Return a hash of all that a run computed, without the names of its phases."""
    metrics = [{k: v for k, v in line["metrics"].items() if not k.startswith("time/")} for line in run.history]
    return fingerprint(run.server.fields(), run.memory, metrics)


def visitor(run, id, round=0, call=0):
    """Return the client as it is in a call of a round."""
    seed = stream(run.experiment.seed, CALL, round, call, id)
    return run.engine.worker.client(id, 0, run.memory, run.origin, seed, lr=run.experiment.local.lr)


def personal(run, id):
    """Return the logits of the client's own model on its images."""
    client = visitor(run, id)
    return run.parts[0].personal(client, *run.parts[0].view(run.server))(client.x)


# All off -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["cnn_small", BATCH_NORM], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("eval_model", ["local", "head_only"])
def test_without_its_modules_it_is_fedavg_bit_for_bit(model, eval_model):
    plain = finish(driver(tiny(model=model)))
    off = finish(only(model=model, eval_model=eval_model, map_life="persistent"))
    assert off.server.model == plain.server.model
    assert computed(off) == computed(plain)
    assert [line["phase"] for line in off.history] == ["mupfl.train"] * 2


def test_no_features_is_no_pkcf():
    assert computed(finish(mupfl(features_per_class=0))) == computed(finish(only("bavd", "acmu")))
    assert computed(finish(only("pkcf", features_per_class=0))) == computed(finish(driver(tiny())))


# ACMU ----------------------------------------------------------------------------------------------------------------


def sent(deltas, maps=None, n=None, start=0.0):
    """Return what clients would send that began at the same point and moved by these."""
    n, maps = n or [1] * len(deltas), maps or [[]] * len(deltas)
    return {
        10 * i: {"n": n[i], "w": Params.pack({"a": start + tensor(d)}), "v": {}, "maps": tensor(maps[i]), "z": {}}
        for i, d in enumerate(deltas)
    }


def test_effective_weights_are_those_of_the_formula():
    """From a common start, client j of cluster C_l counts (sum_{i in C_l} n_i) / (n |C_l|)."""
    run = only("acmu", rounds=1, clients_per_round=5, data={"name": "digits", "clients": 8, "alpha": 0.5})
    w, ids = run.server.model, run._draw(run.plan[0])
    visitors = {i: visitor(run, i) for i in ids}
    delta = {i: c.fit(run.parts[0].objective, w=w).w - w for i, c in visitors.items()}
    run.advance()
    similarity = ff.cosines([d.flat for d in delta.values()])
    seed = np.random.default_rng(stream(0, 3, 0)).integers(2**31)
    cluster = dict(zip(ids, ff.clusters(similarity, 2, 6, int(seed)), strict=True))
    assert 1 < len(set(cluster.values())) < 5
    n = {i: c.n for i, c in visitors.items()}
    expected = w.to(torch.float64)
    for j in ids:
        mates = [i for i in ids if cluster[i] == cluster[j]]
        expected = expected + delta[j] * (sum(n[i] for i in mates) / (sum(n.values()) * len(mates)))
    torch.testing.assert_close(run.server.model.flat.double(), expected.flat, rtol=1e-5, atol=1e-7)
    fedavg = driver(tiny(clients_per_round=5, rounds=1, data={"name": "digits", "clients": 8, "alpha": 0.5}))
    fedavg.advance()
    assert (run.server.model - fedavg.server.model).norm() > 1e-3


def test_with_equal_sizes_clusters_leave_the_average_alone():
    deltas = [[1.0, 0.0], [2.0, 0.1], [0.0, 3.0], [0.2, 5.0], [1.0, -0.1]]
    w_tilde = MuPFL(bavd=False).interface(Params.pack({"a": torch.zeros(2)}), sent(deltas), seed=0)
    mean = sum(w["a"] for w in w_tilde.values()) / 5
    torch.testing.assert_close(mean, tensor(deltas).double().mean(0))
    assert torch.equal(w_tilde[0]["a"], w_tilde[10]["a"])
    torch.testing.assert_close(w_tilde[20]["a"], tensor([0.1, 4.0]).double())


def test_a_client_moves_from_its_own_start():
    """PKCF gives every client another classifier to begin with, and clusters share updates, not models."""
    w = Params.pack({"body.a": torch.zeros(2), "head.weight": torch.zeros(1)})
    ups = sent([[0.0, 0.0]] * 2)
    for up, (u, v, start) in zip(ups.values(), (([1.0, 0.0], 7.0, 5.0), ([3.0, 0.0], 2.0, -2.0)), strict=True):
        up["w"] = Params.pack({"body.a": tensor(u), "head.weight": tensor([v])})
        up["v"] = Params.pack({"head.weight": tensor([start])})
    first, second = MuPFL().interface(w, ups, seed=0).values()  # two clients are one cluster
    assert (first["body.a"].tolist(), first["head.weight"].item()) == ([2.0, 0.0], 5 + (2 + 4) / 2)
    assert (second["body.a"].tolist(), second["head.weight"].item()) == ([2.0, 0.0], -2 + (2 + 4) / 2)


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"update_similarity_weight": 1.0}, [[0, 1], [2, 3]]),
        ({"update_similarity_weight": 0.0}, [[0, 2], [1, 3]]),
        ({"update_similarity_weight": 0.0, "bavd": False}, [[0, 1], [2, 3]]),  # without maps there are only updates
    ],
)
def test_alpha_weighs_updates_against_maps(fields, groups):
    deltas, maps = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]]
    w_tilde = MuPFL(kappa_max=2, **fields).interface(Params.pack({"a": torch.zeros(2)}), sent(deltas, maps), seed=0)
    for one, other in groups:
        expected = (tensor(deltas[one]) + tensor(deltas[other])).double() / 2
        torch.testing.assert_close(w_tilde[10 * one]["a"], expected)
        assert torch.equal(w_tilde[10 * one]["a"], w_tilde[10 * other]["a"])


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients_in_a_round(clients):
    run = mupfl(clients_per_round=clients)
    run.advance()
    run.advance()
    assert all(t.isfinite().all() for t in (run.server.model.flat, run.server.h))
    one = only("acmu", clients_per_round=clients, rounds=1)
    w, ids = one.server.model, one._draw(one.plan[0])
    fits = [visitor(one, i).fit(one.parts[0].objective, w=w).w.flat for i in ids]
    one.advance()
    if clients < 3:  # one cluster, and so the plain mean
        torch.testing.assert_close(one.server.model.flat, torch.stack(fits).mean(0), rtol=1e-5, atol=1e-7)


# BAVD ----------------------------------------------------------------------------------------------------------------


def kept(mode, h, M):
    """Return what BAVD lets through, per channel: values above the mean of the map in [0, 1], or high places of it."""
    if mode == "mean":  # to normalise the map moves its mean along
        return h * (M.mean((1, 2), keepdim=True) <= M)
    low, high = M.amin((1, 2), keepdim=True), M.amax((1, 2), keepdim=True)
    return h * (h >= ((M - low) / (high - low).clamp_min(1e-30)).mean((1, 2), keepdim=True))


@pytest.mark.parametrize("mode", ["value", "mean"])
def test_two_steps_by_hand(mode):
    """Two batches: masked by the first batch's own means, then by the map that the first has left."""
    half = (int(only("bavd").split.counts[0].sum()) + 1) // 2
    run = only("bavd", bavd_mode=mode, local={"lr": 0.1, "momentum": 0.0, "batch": half, "weight_decay": 0.0})
    w, client, A = run.server.model, visitor(run, 0), {}
    got, maps = run.parts[0].descend(client, w)

    def tap(name, h):
        seen[name] = h.detach().mean(0)
        return kept(mode, h, A.get(name, seen[name]))

    flat, before = w.flat, None
    for x, y in visitor(run, 0).batches(1):
        step, seen = Params(w.layout, flat.clone().requires_grad_(), w.buffers), {}
        loss = client.loss(client.logits(step, x, tap=tap), y)
        flat = flat - 0.1 * torch.autograd.grad(loss, step.flat)[0]
        A = {name: h if before is None else A[name] + (before - loss.detach()) * h for name, h in seen.items()}
        before = loss.detach()
    torch.testing.assert_close(got.flat, flat)
    torch.testing.assert_close(maps, torch.cat([A["body.relu1"].flatten(), A["body.relu2"].flatten()]))
    assert not torch.equal(got.flat, visitor(run, 0).fit(run.parts[0].objective, w=w).w.flat)


def test_the_mask_is_off_at_evaluation():
    run = finish(only("bavd", eval_model="local"))
    for id in run.selectable:
        client = visitor(run, id)
        assert torch.equal(personal(run, id), client.logits(run.memory[id]["w"], client.x))
    worker = run.engine.worker
    assert not any(module._forward_hooks for module in worker.network.modules())


def test_keeping_everything_is_no_dropout():
    everything = trained("bavd", bavd_mode="topk", topk_share=1.0)
    assert everything == trained()
    assert trained("bavd", bavd_mode="topk", topk_share=0.3) != everything


@pytest.mark.parametrize(
    "change",
    [
        {"psi_sign": "formula"},
        {"map_shape": "hw"},
        {"bavd_mode": "mean"},
        {"bavd_mode": "topk"},
        {"map_life": "epoch"},
        {"bavd": False},
    ],
    ids=str,
)
def test_each_choice_of_bavd_changes_the_model(change):
    local = {"lr": 0.05, "batch": 16, "epochs": 2}
    assert trained("bavd", local=local, **change) != trained("bavd", local=local)


def test_values_are_dropped_for_each_image_by_itself_and_places_for_all_alike():
    h = tensor([[[[0.1, 0.9], [0.2, 2.0]]], [[[0.9, 0.1], [2.0, 0.2]]]])  # two images that mirror each other
    M = tensor([[[0.0, 1.0], [0.0, 1.0]]])  # mu = 1/2: the right column is high
    by_value, by_place = (
        ff.ActivationMaps({"layer": M.clone()}, "text", "chw", mode, 0.5).drop("layer", h) for mode in ("value", "mean")
    )
    assert by_value.tolist() == tensor([[[[0.0, 0.9], [0.0, 2.0]]], [[[0.9, 0.0], [2.0, 0.0]]]]).tolist()
    assert by_place.tolist() == tensor([[[[0.0, 0.9], [0.0, 2.0]]], [[[0.0, 0.1], [0.0, 0.2]]]]).tolist()


def test_a_map_lives_for_a_visit_an_epoch_or_for_ever():
    assert trained("bavd", map_life="epoch") == trained("bavd")  # a visit of one epoch
    run = only("bavd", map_life="persistent", clients_per_round=6)
    run.advance()
    first = run.server.model
    run.advance()
    for_a_visit = only("bavd", clients_per_round=6)
    for_a_visit.advance()
    assert for_a_visit.server.model == first
    assert run.server.model != trained("bavd", clients_per_round=6)
    assert for_a_visit.memory[0]["maps"] == {}
    assert set(run.memory[0]["maps"]) == {"body.relu1", "body.relu2"}
    assert run.memory[0]["maps"]["body.relu2"].shape == (32, 8, 8)


# PKCF ----------------------------------------------------------------------------------------------------------------


def test_a_round_of_pkcf_by_hand():
    run = only("pkcf", rounds=2, clients_per_round=6, **{"grad_batch": 5, "match_steps": 7})
    w0 = run.server.model
    run.advance()
    plain = driver(tiny(clients_per_round=6))
    plain.advance()
    assert run.server.model == plain.server.model  # nothing is tuned before there are features
    z = {}
    for id in run.selectable:
        client = visitor(run, id)
        w = client.fit(run.parts[0].objective, w=w0).w
        assert run.memory[id]["v"] == w.head
        for k, z_k in ff.class_gradients(client, w0, 5, 1).items():  # at the model that was received
            z.setdefault(k, []).append(z_k)
    z_glo = {k: torch.stack(sent).double().mean(0) for k, sent in z.items()}
    h = ff.noise(w0, 4, np.random.default_rng(stream(0, 3, 0)))
    expected = ff.match(h, w0, z_glo, 7, 0.1)
    torch.testing.assert_close(run.server.h, expected)

    # The second round begins with the client's own classifier, tuned, on the shared extractor.
    w1, v = run.server.model, run.memory[2]["v"]
    client = visitor(run, 2, round=1)
    up = MuPFL(bavd=False, **(QUICK | {"grad_batch": 5})).update(client, w1, run.server.h)
    again = visitor(run, 2, round=1)
    tuned = ff.tuned(again, v, run.server.h, 1)
    assert up["v"] == tuned != v
    assert up["w"] == again.fit(run.parts[0].objective, w=w1.replace(tuned)).w
    assert client.state.v != v
    run.advance()
    assert run.memory[2]["v"] == up["w"].head


@pytest.mark.parametrize(
    "change",
    [
        {"features_per_class": 3},
        {"match_steps": 5},
        {"match_lr": 0.2},
        {"grad_batch": 1},
        {"grad_repeats": 2, "grad_batch": 1},
        {"grad_at": "local"},
    ],
    ids=str,
)
def test_each_choice_of_pkcf_changes_the_features(change):
    base = {"grad_batch": 1} if "grad_repeats" in change else {}
    run, other = only("pkcf", rounds=1, **base), only("pkcf", rounds=1, **change)
    run.advance()
    other.advance()
    assert run.server.model == other.server.model
    assert run.server.h.shape != other.server.h.shape or not torch.equal(run.server.h, other.server.h)


def test_tau_changes_the_second_round():
    models = [trained("pkcf", classifier_epochs=tau) for tau in (0, 1, 2)]
    assert models[0] != models[1] != models[2]


def test_features_come_to_look_like_the_clients():
    run = only("pkcf", rounds=3, features_per_class=20, match_steps=100, classifier_epochs=0, clients_per_round=6)
    distance = []
    for _ in range(3):
        w, before = run.server.model, run.server.h
        run.advance()
        sent = [ff.class_gradients(visitor(run, i), w) for i in run.selectable]
        z = {k: torch.stack([s[k] for s in sent if k in s]).mean(0) for k in range(10)}
        share, k = torch.full((20,), 1 / 20), torch.arange(10)
        for h in (before, run.server.h):
            if h is not None:
                distance.append(
                    ff.mismatch(ff.gradient(h, k, ff.linear(w), share), torch.stack(list(z.values()))).mean()
                )
    assert distance[-1] < distance[0] < 6  # of about 11 at first
    assert all(after < before for before, after in zip(distance[1::2], distance[2::2], strict=True))


def test_needs_a_linear_classifier():
    experts = {"name": "resnet32", "experts": 2}
    with pytest.raises(ValueError, match=r"class gradients need a classifier of head\.weight and head\.bias"):
        only("pkcf", model=experts)
    assert only("bavd", "acmu", model=experts).server.model


# What is tested ------------------------------------------------------------------------------------------------------


def test_local_trains_once_more_on_everyone():
    run = finish(mupfl(eval_model="local"))
    assert [line["phase"] for line in run.history] == ["mupfl.train", "mupfl.train", "mupfl.personalize"]
    assert sorted(run.memory) == run.selectable
    assert all(run.memory[id]["w"] is not None for id in run.selectable)
    assert run.history[-1]["metrics"]["bytes/up"] == 0
    before = mupfl(eval_model="local")
    before.advance()
    before.advance()
    assert before.server.model == run.server.model
    id = run.selectable[0]
    client = visitor(before, id, round=2)
    w = run.parts[0].descend(client, run.parts[0].tune(client, before.server.model, before.server.h))[0]
    assert run.memory[id]["w"] == w
    assert torch.equal(personal(run, id), client.logits(w, client.x))


def test_head_only_tunes_every_classifier_on_the_last_features():
    run = mupfl(eval_model="head_only")
    run.advance()
    run.advance()
    id, model, h = run.selectable[0], run.server.model, run.server.h
    v = ff.tuned(visitor(run, id, round=2), run.memory.get(id, {}).get("v") or model.head, h, 1)
    finish(run)
    assert run.history[-1]["phase"] == "mupfl.personalize"
    assert run.memory[id]["v"] == v
    client = visitor(run, id)
    assert torch.equal(personal(run, id), client.logits(model | v, client.x))


def test_cluster_keeps_the_model_of_the_last_visit():
    run = mupfl(eval_model="cluster", rounds=1, clients_per_round=3)
    w, ids = run.server.model, run._draw(run.plan[0])
    ups = {i: run.parts[0].update(visitor(run, i), w, None) for i in ids}
    run.advance()
    assert run.done
    seed = np.random.default_rng(stream(0, 3, 0)).integers(2**31)
    w_tilde = run.parts[0].interface(w, ups, seed=int(seed))
    assert sorted(run.memory) == ids
    for id in ids:
        assert run.memory[id]["w"] == w_tilde[id].to(torch.float32)
    stranger = next(i for i in run.selectable if i not in ids)
    client = visitor(run, stranger)
    assert torch.equal(personal(run, stranger), client.logits(run.server.model, client.x))


def test_during_training_a_client_has_the_shared_extractor_and_its_own_classifier():
    run = mupfl(clients_per_round=3)
    run.advance()
    for id in run.selectable:
        client, own = visitor(run, id), run.memory.get(id, {}).get("v")
        assert torch.equal(personal(run, id), client.logits(run.server.model | (own or {}), client.x))
    assert any(id not in run.memory for id in run.selectable)
    generic = run.parts[0].generic(visitor(run, 0), *run.parts[0].view(run.server))
    assert torch.equal(generic(visitor(run, 0).x), visitor(run, 0).logits(run.server.model, visitor(run, 0).x))


# The whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["bavd", "acmu", "pkcf"])
@pytest.mark.parametrize("beside", [(), ("bavd",), ("acmu",), ("pkcf",), ("bavd", "acmu", "pkcf")], ids="+".join)
def test_each_switch_matters(module, beside):
    assert trained(*{module, *beside}) != trained(*({*beside} - {module}))


def test_the_result_is_repeatable():
    assert finish(mupfl(map_life="persistent")).fingerprint() == finish(mupfl(map_life="persistent")).fingerprint()


@pytest.mark.parametrize("model", ["cnn_small", BATCH_NORM], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("eval_model", ["local", "cluster", "head_only"])
def test_odd_clients_neither_fail_nor_spoil(model, eval_model):
    """One client has one sample, one has one class, one has one sample of each class."""
    data = digits()
    rows = [np.flatnonzero(data.y_train == c) for c in range(10)]
    train = (rows[3][:1], rows[5][:20], np.array([r[1] for r in rows]), np.concatenate([r[30:40] for r in rows]))
    counts = np.stack([np.bincount(data.y_train[t], minlength=10) for t in train])
    tests = tuple(np.flatnonzero(data.y_test == c)[:5] for c in (3, 5, 0, 1))
    parts = Split(train=train, validation=tuple(t[:0] for t in train), test=tests, counts=counts)
    fields = QUICK | {"eval_model": eval_model, "map_life": "persistent", "grad_at": "local"}
    data_part = {"name": "digits", "clients": 4}
    experiment = tiny(algorithm={"mupfl": fields}, data=data_part, clients_per_round=3, model=model)
    run = finish(Driver(experiment, data, parts, InProcess(Worker(experiment, data, parts))))
    assert run.server.model.flat.isfinite().all()
    assert run.server.h.isfinite().all()
    assert all(personal(run, id).isfinite().all() for id in run.selectable)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kappa_min": 5, "kappa_max": 3}, "kappa_min 5 is above kappa_max 3"),
        ({"eval_model": "cluster", "acmu": False}, "eval_model 'cluster' is made by ACMU"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(algorithm={"mupfl": fields})
