"""FedLoGe: each stage against the paper's equations written out, every switch, and clients with next to no data."""

import math
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import arrived, digits, driver, finish, tiny
from torch import nn

from algorithms import heads
from algorithms.fedloge import FedLoGe
from algorithms.params import Params
from orchestrator.client import CALL, Client, stream
from orchestrator.data import Split
from orchestrator.driver import Driver, InProcess, Worker
from orchestrator.worker import network

W, B, P = "head.weight", "head.bias", "projection"
NETS = {"cnn_small": {"name": "cnn_small"}, "resnet8": {"name": "resnet8", "width": 4}}
STEPS = 20  # of the fixed head, whose angles do not matter here
EQ_7 = {"ssec_steps": STEPS, "pm_logits": "realigned"}  # the personal model as the text has it, without the own head


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Leave the user's stored heads alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def start(net: str = "cnn_small", knobs: dict | None = None, **changes: object) -> Driver:
    """Return a run of FedLoGe that has not begun."""
    return driver(tiny(model=NETS[net], algorithm={"fedloge": EQ_7 | (knobs or {})}, **changes))


def run(net: str = "cnn_small", **knobs: object) -> Driver:
    return finish(start(net, knobs))


def client_of(run: Driver, id: int, seed: int = 0, lr: float = 0.05) -> Client:
    return run.engine.worker.client(id, run.part, run.memory, run.origin, seed, lr=lr)


def same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def base() -> Driver:
    """The method with everything at its default, to the end."""
    return run()


@pytest.fixture(scope="module")
def trained() -> Driver:
    """The same after training, before anything is realigned."""
    run = start()
    run.advance()
    run.advance()
    return run


# Stage 1 -------------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """A body and its heads as an ordinary module, to be trained by ordinary optimizers."""

    def __init__(self, run: Driver, phi: Params, bias: bool, projection: bool) -> None:
        super().__init__()
        self.body = network(run.experiment, digits()).body.train()
        classes, dim = run.origin[W].shape
        self.psi, self.phi = (nn.Linear(dim, classes, bias=bias) for _ in range(2))
        self.P = nn.Linear(dim, dim, bias=False)
        with torch.no_grad():
            self.P.weight.copy_(torch.eye(dim))
            for head, values in ((self.psi, run.server.psi), (self.phi, phi)):
                head.weight.copy_(values[W])
                if bias:
                    head.bias.copy_(values[B])
        self.of_theta = [*self.body.parameters(), *(self.P.parameters() if projection else ())]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"heads_bias": True},
        {"projection": True},
        {"dot_regression": True, "fixed_head": "etf"},
        {"projection": True, "dot_regression": True, "target_norm": 1.0},
    ],
    ids=lambda k: "+".join(k) or "paper",
)
def test_a_clients_epochs_are_three_optimizers_on_one_forward_pass(net, knobs):
    local = {"lr": 0.05, "batch": 16, "momentum": 0.9, "weight_decay": 1e-3, "epochs": 2}
    run = start(net, knobs, local=local)
    algorithm, fixed = run.parts[0], run.server.fixed
    client, twin = (client_of(run, 1, seed=7) for _ in range(2))
    phi = client.state.phi
    total = algorithm.local(client, run.server.model.body, run.server.psi, fixed)

    written = Written(run, phi, algorithm.heads_bias, algorithm.projection)
    parts = written.of_theta, written.psi.parameters(), written.phi.parameters()
    optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9, weight_decay=1e-3) for part in parts]
    for x, y in twin.batches(2):
        h = written.body(x)
        projected = written.P(h)
        if algorithm.dot_regression:
            m = fixed[W][y]
            unit = projected / projected.norm(dim=1, keepdim=True)
            loss = (((m * unit).sum(1) - m.norm(dim=1)) ** 2 / 2).mean()
        else:
            loss = F.cross_entropy(projected @ fixed[W].T + fixed[B], y)
        losses = [loss, *(F.cross_entropy(head(h.detach()), y) for head in (written.psi, written.phi))]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    n = client.n
    expected = Params.of(nn.ModuleDict({"body": written.body}))
    theta, before = total.theta / n, run.server.model.body
    within = 0.01 if run.engine.worker.norms else 1e-4
    arrived([theta.flat], [expected.flat], [before.flat], within)
    assert torch.allclose(theta.buffers, expected.buffers, rtol=0.01, atol=1e-3)
    for sent, head, first in (
        (total.psi / n, written.psi, run.server.psi),
        (client.state.phi, written.phi, phi),
    ):
        assert algorithm.heads_bias == (B in sent)
        names = {W: head.weight} | ({B: head.bias} if algorithm.heads_bias else {})
        arrived([sent[k] for k in names], list(names.values()), [first[k] for k in names], within)
    if algorithm.projection:
        assert not torch.allclose(total.psi[P] / n, torch.eye(len(total.psi[P])), atol=1e-4)
        arrived([total.psi[P] / n], [written.P.weight], [run.server.psi[P]], within)


def test_the_server_averages_theta_and_psi_by_samples():
    run, before = start(), start()
    run.advance()
    algorithm, sums = before.parts[0], []
    for id in sorted(run.memory):
        client = client_of(before, id, seed=stream(0, CALL, 0, 0, id))
        sums.append(algorithm.local(client, before.server.model.body, before.server.psi, before.server.fixed))
        assert same(client.state.phi, run.memory[id]["phi"])
    assert len(sums) == 3
    n = sum(s.n for s in sums)
    theta = sum(s.theta.flat.double() for s in sums) / n
    psi = sum(s.psi.flat.double() for s in sums) / n
    assert torch.allclose(run.server.model.body.flat, theta.float(), atol=1e-7)
    assert torch.allclose(run.server.psi.flat, psi.float(), atol=1e-7)
    assert same(run.server.fixed, before.server.fixed)


def test_only_theta_and_psi_are_sent(base):
    sent = len(base.server.model.body.flat) + len(base.server.psi.flat)
    sizes = [line["metrics"]["bytes/up"] for line in base.history]
    assert sizes == [3 * 4 * sent, 3 * 4 * sent, 0, 0]
    client = client_of(base, 0)
    total = base.parts[0].local(client, base.server.model.body, base.server.psi, base.server.fixed)
    assert set(total.terms()) == {"n", "theta", "psi"}


def test_phi_stays_as_it_is_while_its_client_is_not_drawn():
    run, seen = start(rounds=4), {}
    for _ in range(4):
        drawn = run._draw(run.plan[run.round])
        run.advance()
        for id, memory in run.memory.items():
            assert (id in seen and same(memory["phi"], seen[id])) == (id not in drawn)
        seen = {id: memory["phi"] for id, memory in run.memory.items()}
    assert len(seen) > 3


def test_every_client_is_born_with_a_head_of_its_own():
    run = start()
    first, again, second = (client_of(run, id, seed).state.phi for id, seed in ((0, 1), (0, 2), (1, 1)))
    assert same(first, again)
    assert not torch.allclose(first[W], second[W])
    bound = 1 / math.sqrt(first[W].shape[1])
    assert first[W].abs().max() <= bound
    assert first[W].std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


# Stages 2 and 3 ------------------------------------------------------------------------------------------------------


def test_ga_fr_makes_rows_of_length_one(base, trained):
    head, psi = base.server.model[W], trained.server.psi[W]
    assert torch.allclose(head.norm(dim=1), torch.ones(10), atol=1e-6)
    for c in range(10):
        assert torch.allclose(head[c], psi[c] / psi[c].norm(), atol=1e-6)
    assert same(base.server.psi, trained.server.psi)
    assert same(base.server.model.body, trained.server.model.body)


def test_la_fr_gives_psi_the_norms_of_phi(base, trained):
    assert set(base.memory) == set(range(6)) > set(trained.memory)  # some client was never drawn
    psi = base.server.psi[W]
    for id in base.memory:
        phi, aligned = client_of(trained, id).state.phi[W], base.memory[id]["phi"][W]
        assert torch.allclose(aligned.norm(dim=1), psi.norm(dim=1) * phi.norm(dim=1), atol=1e-6)
        for c in range(10):
            assert torch.allclose(aligned[c], psi[c] * phi[c].norm(), atol=1e-6)


def logits(run: Driver, id: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, generic logits and personal logits as the driver would have them made."""
    client, algorithm = client_of(run, id), run.parts[run.part]
    view = algorithm.view(run.server)
    with torch.no_grad():
        h = client.features(run.server.model, x)
        return h, algorithm.generic(client, *view)(x), algorithm.personal(client, *view)(x)


def test_which_model_is_scored_when(base, trained):
    x = client_of(base, 0).x[:30]
    h, generic, personal = logits(trained, 0, x)
    assert torch.allclose(generic, h @ trained.server.fixed[W].T, atol=1e-5)
    assert torch.allclose(personal, h @ client_of(trained, 0).state.phi[W].T, atol=1e-5)
    h, generic, personal = logits(base, 0, x)
    assert torch.allclose(generic, h @ F.normalize(base.server.psi[W]).T, atol=1e-5)
    assert torch.allclose(personal, h @ base.memory[0]["phi"][W].T, atol=1e-5)
    phases = [line["phase"] for line in base.history]
    assert phases == ["fedloge.train"] * 2 + ["fedloge.realign_generic", "fedloge.realign_personal"]
    scores = [line["metrics"] for line in base.history]
    assert scores[2]["personal/acc_owned"] == scores[1]["personal/acc_owned"]  # GA-FR is not about clients
    assert scores[3]["generic/acc"] == scores[2]["generic/acc"]  # nor LA-FR about the generic model


@pytest.mark.parametrize("bias", [False, True])
def test_fine_tuning_moves_phi_on_frozen_features(bias):
    knobs = {"heads_bias": bias, "finetune_epochs": 2, "finetune_lr": 0.3}
    run = start("resnet8", knobs, local={"lr": 0.05, "batch": 4096, "momentum": 0.9})
    algorithm, client = run.parts[0], client_of(run, 2)
    theta, psi, phi = run.server.model.body, run.server.psi, client.state.phi
    algorithm.localise(client, theta, psi)
    with torch.no_grad():
        h = client.features(theta, client.x)  # in evaluation mode: batch norm does not train either
    weight = (psi[W] * phi[W].norm(dim=1, keepdim=True)).requires_grad_()
    offset = phi[B].clone().requires_grad_() if bias else torch.zeros(10).requires_grad_()
    optimizer = torch.optim.SGD([weight, *([offset] if bias else [])], lr=0.3, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(h @ weight.T + offset, client.y).backward()
        optimizer.step()
    assert torch.allclose(client.state.phi[W], weight, atol=1e-5)
    assert not torch.allclose(client.state.phi[W], psi[W] * phi[W].norm(dim=1, keepdim=True), atol=1e-3)
    if bias:
        assert torch.allclose(client.state.phi[B], offset, atol=1e-5)


# Switches: what each changes, and that it changes nothing else -------------------------------------------------------


def phis(run: Driver) -> dict[int, Params]:
    return {id: client_of(run, id).state.phi for id in range(6)}


def test_without_ga_fr_the_generic_classifier_stays_fixed(base):
    off = run(ga_fr=False)
    assert [line["phase"] for line in off.history] == ["fedloge.train"] * 2 + ["fedloge.realign_personal"]
    assert torch.equal(off.server.model[W], off.server.fixed[W])
    assert same(off.server.model.body, base.server.model.body)
    # The last stage has random numbers of its own, but uses none of them.
    assert same(phis(off), phis(base))


def test_without_la_fr_clients_keep_what_they_trained(base, trained):
    off = run(la_fr=False)
    assert [line["phase"] for line in off.history] == ["fedloge.train"] * 2 + ["fedloge.realign_generic"]
    assert same(off.server.fields(), base.server.fields())
    assert same(phis(off), phis(trained))


def test_without_either_there_is_one_stage(trained):
    off = run(ga_fr=False, la_fr=False)
    assert same(off.server.fields(), trained.server.fields())
    assert off.fingerprint() != start().fingerprint()
    assert len(off.history) == 2


def localised(run: Driver, id: int, **knobs: object) -> Params:
    """Return what the last stage with these knobs makes of a client's phi."""
    client = client_of(run, id, lr=0.05)
    FedLoGe(**EQ_7 | knobs).localise(client, run.server.model.body, run.server.psi)
    return client.state.phi


def test_fine_tuning_without_la_fr_starts_from_phi(trained):
    stages = [phase.step.__name__ for phase in FedLoGe(la_fr=False, ga_fr=False, finetune_epochs=1).phases()]
    assert stages == ["train", "realign_personal"]
    phi = client_of(trained, 0).state.phi
    barely, tuned = (localised(trained, 0, la_fr=False, finetune_epochs=1, finetune_lr=lr) for lr in (1e-9, 0.1))
    assert torch.allclose(barely.flat, phi.flat, atol=1e-6)
    assert not torch.allclose(tuned.flat, phi.flat, atol=1e-4)


def test_the_rate_of_fine_tuning_is_the_experiments_unless_given(trained):
    none, given, other = (localised(trained, 0, finetune_epochs=1, finetune_lr=lr) for lr in (None, 0.05, 0.06))
    assert same(none, given)
    assert not same(none, other)


@pytest.mark.parametrize(
    ("knob", "value"), [("lafr_base", "unit"), ("lafr_scale", "counts"), ("pm_logits", "realigned_plus_local")]
)
def test_variants_of_eq_7_change_phi_alone(knob, value, base, trained):
    other = run(**{knob: value})
    assert same(other.server.fields(), base.server.fields())
    psi = base.server.psi[W]
    for id, phi in phis(trained).items():
        norms = phi[W].norm(dim=1, keepdim=True)
        counts = client_of(base, id).counts[:, None]
        expected = {
            "lafr_base": psi / psi.norm(dim=1, keepdim=True) * norms,
            "lafr_scale": psi * counts / counts.sum(),
            "pm_logits": psi * norms + phi[W],
        }[knob]
        assert torch.allclose(phis(other)[id][W], expected, atol=1e-6)
        assert not torch.allclose(phis(other)[id][W], phis(base)[id][W], atol=1e-4)


def test_added_heads_are_added_logits(base, trained):
    x = client_of(base, 0).x[:30]
    h, _, both = logits(run(pm_logits=FedLoGe().pm_logits), 0, x)  # which is the default
    assert torch.allclose(both, logits(base, 0, x)[2] + h @ client_of(trained, 0).state.phi[W].T, atol=1e-4)


def test_biases_are_trained_but_never_realigned():
    done, trained = start(knobs={"heads_bias": True}), start(knobs={"heads_bias": True})
    assert torch.equal(done.server.fixed[B], done.origin[B])
    assert done.origin[B].abs().min() > 0
    finish(done)
    trained.advance()
    trained.advance()
    assert torch.equal(trained.server.model[B], trained.origin[B])  # Psi* keeps the random one
    assert not torch.allclose(done.server.psi[B], done.origin[B], atol=1e-3)
    assert torch.equal(done.server.model[B], done.server.psi[B])
    for id, phi in phis(trained).items():
        assert torch.equal(phis(done)[id][B], phi[B])


def test_without_biases_there_are_none(base, trained):
    assert not trained.server.model[B].any()
    assert not base.server.model[B].any()
    assert list(base.server.psi) == list(base.memory[0]["phi"]) == [W]


def test_a_projection_is_folded_into_the_generic_classifier():
    begun = start(knobs={"projection": True, "target_norm": 1.0})
    assert torch.equal(begun.server.model[W], begun.server.fixed[W])
    assert torch.equal(begun.server.psi[P], torch.eye(64))
    begun.advance()
    moved, fixed = begun.server.psi[P], begun.server.fixed[W]
    assert not torch.allclose(moved, torch.eye(64), atol=1e-4)
    x = client_of(begun, 0).x[:30]
    h, generic, personal = logits(begun, 0, x)
    assert torch.allclose(generic, (h @ moved.T) @ fixed.T, atol=1e-4)
    assert torch.allclose(personal, h @ client_of(begun, 0).state.phi[W].T, atol=1e-5)
    finish(begun)
    assert torch.allclose(begun.server.model[W], F.normalize(begun.server.psi[W]), atol=1e-6)
    assert list(begun.memory[0]["phi"]) == [W]


@pytest.mark.parametrize("kind", typing.get_args(heads.Kind))
def test_the_fixed_head_is_the_one_that_is_named_and_stays(kind):
    knobs = {"sparsity": 0.5, "target_norm": 0.2, "ssec_lr": 1e-3, "ssec_optimizer": "sgd", "ssec_seed": 3}
    begun = start(knobs=knobs | {"fixed_head": kind}, rounds=1)
    expected = heads.fixed_head(kind, 10, 64, sparsity=0.5, norm=0.2, steps=STEPS, lr=1e-3, optimizer="sgd", seed=3)
    plain = start()
    assert torch.equal(begun.server.fixed[W], expected)
    assert torch.equal(begun.server.model[W], expected)
    assert not torch.equal(plain.server.fixed[W], expected)
    assert same(begun.server.psi, plain.server.psi)
    assert same(begun.server.model.body, plain.server.model.body)
    assert same(phis(begun), phis(plain))
    begun.advance()
    assert torch.equal(begun.server.fixed[W], expected)
    assert torch.equal(begun.server.model[W], expected)


# In a chain, in the engine, and with next to no data -----------------------------------------------------------------


def test_it_continues_from_a_model_and_is_continued_from():
    chain = ["fedavg", {"fedloge": {"ssec_steps": STEPS}}, {"finetune": {"epochs": 0}}]
    run = driver(tiny(rounds=1, algorithm=chain, evaluate={"what": ["generic"]}))
    run.advance()
    averaged = run.server.model
    run.advance()
    assert same(run.origin, averaged)
    while run.part < 2:
        before = run.server
        run.advance()
    assert torch.allclose(before.model[W].norm(dim=1), torch.ones(10), atol=1e-6)
    assert same(run.server.model, before.model)
    assert run.history[-1]["metrics"]["generic/acc"] == run.history[-2]["metrics"]["generic/acc"]


def test_it_learns_and_realigning_helps_the_clients():
    local = {"lr": 0.05, "batch": 16, "momentum": 0.9, "epochs": 2}
    done = finish(start(knobs={"fixed_head": "etf"}, rounds=8, clients_per_round=6, local=local, evaluate={"every": 8}))
    trained, _, realigned = (line["metrics"] for line in done.history[-3:])
    assert trained["generic/acc"] > 0.8
    assert realigned["personal/acc_dist"] > trained["personal/acc_dist"] > 0.7


SEEDS = (0, 4)  # one draws the second and the last client, the other the first and the third
VARIANTS = [
    {"finetune_epochs": 1},
    {"projection": True, "dot_regression": True, "pm_logits": "realigned_plus_local"},
    {"heads_bias": True, "lafr_base": "unit", "lafr_scale": "counts", "fixed_head": "sparse_uniform"},
]


def test_the_same_twice(base):
    assert run().fingerprint() == base.fingerprint()


@pytest.mark.parametrize("knobs", VARIANTS, ids=lambda k: "+".join(k))
@pytest.mark.parametrize("net", NETS)
def test_clients_with_next_to_no_data(net, knobs):
    """One sample; one class; one sample of each class; plenty. Two of the four are drawn, others in each run."""
    dataset = digits()
    rows = [np.flatnonzero(dataset.y_train == c) for c in range(10)]
    train = (rows[3][:1], rows[5][:20], np.array([r[1] for r in rows]), np.concatenate([r[30:40] for r in rows]))
    counts = np.stack([np.bincount(dataset.y_train[t], minlength=10) for t in train])
    tests = tuple(np.flatnonzero(dataset.y_test == c)[:5] for c in (3, 5, 0, 1))
    parts = Split(train=train, validation=tuple(t[:0] for t in train), test=tests, counts=counts)
    for seed in SEEDS:
        chosen = tiny(
            data={"name": "digits", "clients": 4},
            clients_per_round=2,
            rounds=1,
            seed=seed,
            model=NETS[net],
            algorithm={"fedloge": {"ssec_steps": STEPS} | knobs},
        )
        run = finish(Driver(chosen, dataset, parts, InProcess(Worker(chosen, dataset, parts))))
        assert set(run.memory) == {0, 1, 2, 3}
        for tree in (run.server.model, run.server.psi, *(memory["phi"] for memory in run.memory.values())):
            assert tree.flat.isfinite().all()
            assert tree.buffers.isfinite().all()
        assert not any(math.isnan(v) for line in run.history for v in line["metrics"].values())


def test_a_class_nobody_has_learnt_is_no_division_by_zero():
    algorithm, begun = FedLoGe(**EQ_7), start()
    client, nothing = client_of(begun, 0), begun.server.psi.zeros()
    begun.server.psi = nothing
    algorithm.realign_generic(begun.server, None)
    assert begun.server.model.flat.isfinite().all()
    algorithm.localise(client, begun.server.model.body, nothing)
    assert not client.state.phi.flat.any()
