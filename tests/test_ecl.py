"""ECL: its laws, its equations computed by hand, and clients with next to no data."""

import math

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.base import State
from algorithms.ecl import ECL, classifier, grouping
from algorithms.params import Params
from orchestrator.checkpoint import fingerprint
from orchestrator.client import Client
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess
from orchestrator.worker import Worker

NETS = {"cnn_small": {"name": "cnn_small"}, "resnet8": {"name": "resnet8", "width": 8}}


def run(net: str = "cnn_small", **knobs: object) -> Driver:
    """Run FedAvg and then ECL to the end."""
    return finish(driver(tiny(model=NETS[net], algorithm=[{"fedavg": {}}, {"ecl": {"epochs": 2, **knobs}}])))


def client_of(done: Driver, id: int) -> Client:
    return done.engine.worker.client(id, done.part, done.memory, done.origin, 0)


def personal(done: Driver, id: int, x: torch.Tensor, **knobs: object) -> torch.Tensor:
    """Return the logits that ECL with these prediction-time knobs makes of what a client remembers."""
    client = client_of(done, id)
    with torch.no_grad():
        return ECL(**knobs).personal(client, done.server.model)(x)


@pytest.fixture(scope="module", params=NETS)
def done(request: pytest.FixtureRequest) -> Driver:
    return run(request.param)


# Grouping ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any), st.integers(1, 8))
def test_groups_are_even_and_ordered_by_count_then_class(counts, experts):
    owner = grouping(torch.tensor(counts, dtype=torch.float32), experts).tolist()
    owned = [c for c, n in enumerate(counts) if n]
    assert [c for c, m in enumerate(owner) if m >= 0] == owned
    sizes = [owner.count(m) for m in range(max(owner) + 1)]
    assert len(sizes) == min(experts, len(owned))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    by_size = sorted(owned, key=lambda c: (-counts[c], c))
    assert [owner[c] for c in by_size] == sorted(owner[c] for c in owned)


def test_grouping_of_the_papers_client():
    assert grouping(torch.tensor([1.0, 823, 0, 1, 1]), 2).tolist() == [0, 0, -1, 1, 1]  # Fig. 2b, a class added
    assert grouping(torch.tensor([3.0, 5, 4]), 2).tolist() == [1, 0, 0]


# Aggregation ---------------------------------------------------------------------------------------------------------

U_0 = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 12.0]])  # norms 5, 0, 12; together 13
U = torch.tensor([[6.0, 8.0], [0.0, 1.0], [0.0, math.sqrt(575.0)]])  # norms 10, 1, sqrt(575); together 26
Z_0 = torch.tensor([[1.0, 2.0, 3.0]])
Z = torch.tensor([[[10.0, 20.0, 30.0]], [[-4.0, -5.0, -6.0]]])
OWNER = torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("knobs", "factor"),
    [
        ({}, 4.0),
        ({"norm_power": 1}, 2.0),
        ({"norm_ratio": "global_over_expert"}, 0.25),
        ({"norm_ratio": "global_over_expert", "norm_power": 1}, 0.5),
        ({"scaling": "none"}, 1.0),
        ({"scaling": "none", "norm_ratio": "global_over_expert", "norm_power": 1}, 1.0),
    ],
)
def test_an_expert_is_scaled_by_the_norms_of_whole_classifiers(knobs, factor):
    ecl = ECL(**knobs)
    scale = ecl.scale(U, U_0)
    assert scale.shape == ()
    assert float(scale) == pytest.approx(factor)
    # Expert 0 owns classes 0 and 2 and has norm 26; expert 1 owns class 1 and has the global norm.
    zbar = [scale * Z[0], ecl.scale(U_0, U_0) * Z[1]]
    expected = [0.5 * factor * 10 + 0.5 * 1, 0.5 * -5 + 0.5 * 2, 0.5 * factor * 30 + 0.5 * 3]
    assert ecl.aggregate(Z_0, zbar, OWNER)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("knobs", "factors"),
    [
        ({}, [4.0, 575 / 144]),
        ({"norm_power": 1}, [2.0, math.sqrt(575) / 12]),
        ({"norm_ratio": "global_over_expert"}, [0.25, 144 / 575]),
        ({"norm_ratio": "global_over_expert", "norm_power": 1}, [0.5, 12 / math.sqrt(575)]),
    ],
)
def test_or_class_by_class(knobs, factors):
    ecl = ECL(scaling="per_class", expert_logit_weight=0.25, **knobs)
    scale = ecl.scale(U, U_0)
    assert scale.isfinite().all()  # although the global row of class 1 is zero
    o = ecl.aggregate(Z_0, [scale * Z[0], Z[1]], OWNER)[0].tolist()
    expected = [0.25 * factors[0] * 10 + 0.75, 0.25 * -5 + 0.75 * 2, 0.25 * factors[1] * 30 + 0.75 * 3]
    assert o == pytest.approx(expected)


def test_lambda_goes_from_the_global_model_to_the_owning_expert():
    assert torch.equal(ECL(expert_logit_weight=0.0).aggregate(Z_0, Z, OWNER), Z_0)
    for z_0 in (Z_0, 100 * Z_0):
        assert ECL(expert_logit_weight=1.0).aggregate(z_0, Z, OWNER)[0].tolist() == [10, -5, 30]


def test_a_class_without_samples_is_masked_or_left_to_the_global_model():
    owner = torch.tensor([0, -1, 1])
    assert ECL().aggregate(Z_0, Z, owner)[0].tolist() == [5.5, -math.inf, -1.5]
    assert ECL(mask_unowned=False).aggregate(Z_0, Z, owner)[0].tolist() == [5.5, 2.0, -1.5]


# What is trained -----------------------------------------------------------------------------------------------------


def test_the_body_stays_and_each_expert_holds_only_what_it_may_train(done):
    before = driver(done.experiment)
    while before.part == 0 and before.round < done.experiment.rounds:
        before.advance()
    assert done.server.model == before.server.model  # weights and batch-norm buffers, bit by bit
    assert set(done.memory) == set(done.selectable)
    for id, memory in done.memory.items():
        client = client_of(done, id)
        deep, tail = memory["experts"]
        assert set(deep) == set(done.server.model.under(client.last_stage, "head."))
        assert set(tail) == set(memory["head"]) == set(done.server.model.head)
        assert all(t.isfinite().all() for v in (deep, tail, memory["head"]) for t in (v.flat, v.buffers))
        last = done.server.model.under(client.last_stage)
        assert deep.under(client.last_stage).flat.ne(last.flat).any()
        assert not len(last.buffers) or deep.under(client.last_stage).buffers.ne(last.buffers).all()
        assert memory["head"] != done.server.model.head


def test_last_block_trains_less_than_the_last_stage():
    model = {"name": "resnet20", "width": 4}
    chain = [{"ecl": {"epochs": 1, "finetune_part": "last_block"}}]
    done = finish(driver(tiny(model=model, algorithm=chain, rounds=1, clients_per_round=1)))
    names = set(done.memory[0]["experts"][0])
    assert names
    assert all(name.startswith(("body.stage3.2.", "head.")) for name in names)


def test_the_head_learns_by_balanced_softmax_of_the_local_counts():
    """One step of plain gradient descent from zero weights, by hand."""
    done = driver(tiny(algorithm=[{"ecl": {}}]))
    worker = done.engine.worker
    part, id = 1, done.selectable[0]
    client = worker.client(id, part, {}, done.origin, 0, lr=0.05)
    w = done.origin.replace(done.origin.head.zeros())
    ECL(epochs=1, lr=0.5, momentum=0.0, weight_decay=0.0, batch=10_000, num_experts=1, expert_head_init="global").local(
        client, w
    )
    p = client.counts / client.n  # the softmax of zero logits plus log counts
    h = client.features(w, client.x)
    error = p - torch.nn.functional.one_hot(client.y, 10)
    assert torch.allclose(client.state.head["head.weight"], -0.5 * error.T @ h / client.n, atol=1e-5)
    assert torch.allclose(client.state.head["head.bias"], -0.5 * error.mean(0), atol=1e-6)
    # The expert's classes are drawn evenly and compete with all ten: CE of zero logits.
    bias = client.state.experts[0]["head.bias"]
    assert torch.allclose(bias[client.counts == 0], torch.tensor(-0.5 / 10), atol=1e-6)
    assert float(bias.sum()) == pytest.approx(0, abs=1e-5)


def test_a_new_head_is_uniform_and_the_global_one_is_kept_on_demand():
    done = driver(tiny(algorithm=[{"ecl": {}}]))
    made = []
    for init in ("reinit", "reinit", "global"):
        client = done.engine.worker.client(0, 1, {}, done.origin, 7, lr=0.05)
        ECL(epochs=0, expert_head_init=init).local(client, done.origin)
        made.append(client.state.experts)
    assert made[0] == made[1]  # drawn from the client's stream
    assert made[0][0].head != made[0][1]
    bound = 1 / math.sqrt(64)
    assert 0.95 * bound < float(made[0][1].flat.abs().max()) <= bound
    assert all(v.head == done.origin.head for v in made[2])
    assert made[0][0].body == made[2][0].body == done.origin.under("body.fc.")
    assert client.state.head == done.origin.head


# What is predicted ---------------------------------------------------------------------------------------------------


def test_only_the_owning_expert_and_the_retrained_head_speak(done):
    id = done.selectable[0]
    client, own, w = client_of(done, id), done.memory[id], done.server.model
    x = client.x[:20]
    z_0 = client.logits(w | own["head"], x)
    z = [client.logits(w | v, x) for v in own["experts"]]
    s = [float((classifier(v).norm() / classifier(own["head"]).norm()) ** 2) for v in own["experts"]]
    o = personal(done, id, x, expert_logit_weight=0.3)
    for c, m in enumerate(own["owner"].tolist()):
        expected = 0.3 * s[m] * z[m][:, c] + 0.7 * z_0[:, c] if m >= 0 else torch.full((20,), -math.inf)
        assert torch.allclose(o[:, c], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(personal(done, id, x, expert_logit_weight=0.0, mask_unowned=False), z_0)


def test_one_expert_with_full_weight_is_one_fine_tuned_model():
    done = run(num_experts=1, expert_logit_weight=1.0, scaling="none")
    for id in done.selectable[:3]:
        client = client_of(done, id)
        owned = client.owned
        tuned = client.logits(done.server.model | done.memory[id]["experts"][0], client.x)
        got = personal(done, id, client.x, num_experts=1, expert_logit_weight=1.0, scaling="none")
        assert torch.equal(got[:, owned], tuned[:, owned])


def test_experts_like_the_global_head_change_nothing_whatever_the_scaling():
    done = driver(tiny(algorithm=[{"ecl": {}}]))
    client = done.engine.worker.client(0, 1, {}, done.origin, 0, lr=0.05)
    ECL(epochs=0, expert_head_init="global", num_experts=3).local(client, done.origin)
    z = client.logits(done.origin, client.x)[:, client.owned]
    for scaling in ("scalar", "per_class", "none"):
        got = ECL(scaling=scaling, expert_logit_weight=0.7).personal(client, done.origin)(client.x)
        assert torch.allclose(got[:, client.owned], z, atol=1e-5)


def test_a_client_never_visited_predicts_with_the_global_model(done):
    client = done.engine.worker.client(0, done.part, {}, done.origin, 0)
    assert torch.equal(ECL().personal(client, done.origin)(client.x), client.logits(done.origin, client.x))


def test_predicting_otherwise_costs_no_training():
    first = run()
    other = run(
        expert_logit_weight=0.9,
        norm_ratio="global_over_expert",
        norm_power=1,
        scaling="per_class",
        mask_unowned=False,
    )
    assert fingerprint(first.memory) == fingerprint(other.memory)
    assert first.fingerprint() != other.fingerprint()
    assert first.fingerprint() == run().fingerprint()


def test_a_finished_run_is_read_back_from_its_directory(tmp_path):
    experiment = tiny(algorithm=[{"fedprox": {}}, {"ecl": {"epochs": 1}}], rounds=1)
    done = finish(driver(experiment, tmp_path))
    again = driver(experiment, tmp_path)
    assert again.done
    assert again.fingerprint() == done.fingerprint()


def test_ecl_learns():
    done = run(epochs=10)
    federated, personalised = (line["metrics"]["personal/acc_owned"] for line in done.history[1:])
    assert personalised > federated + 0.05


# Clients with next to nothing ----------------------------------------------------------------------------------------


def by_hand(*wanted: dict[int, int]) -> Split:
    """Give each client so many samples of each class."""
    data = digits()
    pools = {c: iter(np.flatnonzero(data.y_train == c)) for c in range(10)}
    train = tuple(np.sort([next(pools[c]) for c, n in w.items() for _ in range(n)]).astype(np.int64) for w in wanted)
    counts = np.stack([np.bincount(data.y_train[rows], minlength=10) for rows in train])
    nothing = tuple(np.zeros(0, np.int64) for _ in wanted)
    tests = tuple(np.flatnonzero(np.isin(data.y_test, list(w)))[:5] for w in wanted)
    return Split(train, nothing, tests, counts)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("experts", [1, 3])
def test_degenerate_clients(net, experts):
    split = by_hand({3: 1}, {3: 17}, {1: 1, 2: 1}, {4: 2, 5: 1, 6: 1}, {0: 17, 9: 1}, {}, dict.fromkeys(range(10), 4))
    experiment = tiny(
        data={"name": "digits", "clients": 7},
        model=NETS[net],
        algorithm=[{"ecl": {"num_experts": experts, "epochs": 3, "batch": 16}}],
        rounds=1,
        clients_per_round=1,  # so most clients see the global model for the first time
    )
    done = finish(Driver(experiment, digits(), split, InProcess(Worker(experiment, digits(), split))))
    assert sorted(done.memory) == [0, 1, 2, 3, 4, 6]
    sizes = {id: len(memory["experts"]) for id, memory in done.memory.items()}
    assert sizes == {id: min(experts, n) for id, n in {0: 1, 1: 1, 2: 2, 3: 3, 4: 2, 6: 10}.items()}
    for id, memory in done.memory.items():
        for scaling in ("scalar", "per_class", "none"):
            o = personal(done, id, client_of(done, id).x, scaling=scaling)
            assert o[:, split.owned(id)].isfinite().all()
            assert not o.isnan().any()
        assert all(v.flat.isfinite().all() and v.buffers.isfinite().all() for v in memory["experts"])
    assert all(math.isfinite(v) for line in done.history for v in line["metrics"].values())


def test_a_lone_image_teaches_its_expert_its_class():
    experiment = tiny(data={"name": "digits", "clients": 1}, model=NETS["resnet8"], clients_per_round=1)
    worker = Worker(experiment, digits(), by_hand({1: 1, 2: 1}))
    w = Params.of(worker.network)
    client = Client(worker, 0, seed=0)
    client.state = State(ECL().client_state(client, w))
    ECL(expert_head_init="global").local(client, w)
    for v, c in zip(client.state.experts, (1, 2), strict=True):
        x = client.x[client.y == c]
        before, after = (client.logits(model, x).softmax(1)[0, c] for model in (w, w | v))
        assert after > before


def test_experts_see_their_own_classes_and_the_tail_sees_them_evenly():
    """One step of plain gradient descent from a zero head moves each bias by lr (frequency - 1/10)."""
    experiment = tiny(data={"name": "digits", "clients": 1}, clients_per_round=1)
    worker = Worker(experiment, digits(), by_hand({5: 60, 6: 40, 7: 39, 8: 1}))
    w = Params.of(worker.network)
    w = w.replace(w.head.zeros())
    client = Client(worker, 0, seed=0)
    client.state = State(ECL().client_state(client, w))
    once = {"epochs": 1, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "batch": 1000}
    ECL(expert_head_init="global", **once).local(client, w)
    head, tail = (v["head.bias"] + 0.1 for v in client.state.experts)
    assert head.tolist() == pytest.approx([0] * 5 + [0.6, 0.4] + [0] * 3, abs=1e-6)
    assert [*tail[:7].tolist(), float(tail[9])] == pytest.approx([0] * 8, abs=1e-6)
    assert 0.25 < float(tail[8]) < 0.75
    assert float(tail[7] + tail[8]) == pytest.approx(1)
