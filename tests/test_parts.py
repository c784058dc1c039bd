"""FedPer, LG-FedAvg, FedRep, FedBN and FedBABU: what they exchange, keep and freeze, against plain PyTorch."""

import copy
from functools import reduce
from operator import add

import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny
from torch import nn

from algorithms.base import Sum
from algorithms.params import Params
from algorithms.parts import alone, batch_norms, classifier, joined, layers, modules
from orchestrator.client import CALL, stream

NETS = {"cnn": "cnn_small", "resnet": {"name": "resnet8", "width": 4}}
LOCAL = {"lr": 0.03, "batch": 32, "epochs": 2, "weight_decay": 1e-3, "momentum": 0.9}
DATA = {"name": "digits", "clients": 6, "alpha": 0.5, "imbalance": 100}


def begin(algorithm, net="cnn", **changes):
    """Return a run that has not begun."""
    base = {"model": NETS[net], "data": DATA, "local": LOCAL, "rounds": 2, "algorithm": algorithm}
    return driver(tiny(**base | changes))


def client_of(run, id, lr=LOCAL["lr"], seed=0):
    return run.engine.worker.client(id, run.part, run.memory, run.origin, seed, lr=lr)


def close(a, b):
    """Whether two parts are the same but for rounding, which depends on where in memory a tensor lies."""
    assert set(a) == set(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def plain(run, private, stages):
    """Return the server's weights and every client's own ones as ordinary modules and optimizers get them.

    Tensors whose name is `private` stay with the client; a stage is (epochs, which parameters it trains).
    """
    experiment, split, data = run.experiment, run.split, digits()
    local = experiment.local
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    images = (torch.from_numpy(data.x_train).float() / 255 - mean) / std
    labels = torch.from_numpy(data.y_train)
    network = run.engine.worker.network
    server = first = {k: v.clone() for k, v in network.state_dict().items()}
    own = {}
    for round in range(experiment.rounds):
        total, samples = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in server.items()}, 0
        for k in run._draw(run.plan[round]):
            kept = own.get(k, {name: first[name] for name in first if private(name)})
            model = copy.deepcopy(network)
            model.load_state_dict(server | kept, strict=False)
            x, y = images[split.train[k]], labels[split.train[k]]
            order = torch.Generator().manual_seed(stream(experiment.seed, CALL, round, 0, k))
            for epochs, trains in stages:
                learning = {name: p.requires_grad_(trains(name)) for name, p in model.named_parameters()}
                model.train(any(p.requires_grad for name, p in learning.items() if name.startswith("body.")))
                sgd = torch.optim.SGD(
                    [p for p in learning.values() if p.requires_grad],
                    lr=local.lr,
                    momentum=local.momentum,
                    weight_decay=local.weight_decay,
                )
                for _ in range(epochs):
                    for rows in torch.randperm(len(y), generator=order).split(local.batch):
                        if len(rows) > 1 or not model.training:  # batch norm cannot train on one image
                            sgd.zero_grad()
                            F.cross_entropy(model(x[rows]), y[rows]).backward()
                            sgd.step()
            for name, value in model.state_dict().items():
                total[name] += (len(y) * value).double()
            own[k] = {n: v.clone() for n, v in model.state_dict().items() if private(n)}
            samples += len(y)
        server = {k: (v / samples).float() for k, v in total.items()}
    return server, own


def head(name):
    return name.startswith("head.")


def body(name):
    return name.startswith("body.")


def norm(name):
    return any(part in name for part in (".bn", "shortcut.1"))


def always(name):
    return True


#: Name, fields, what stays with the client, what is trained when, what the server averages.
METHODS = [
    ("fedper", {}, head, [(2, always)], body),
    ("lg_fedavg", {}, body, [(2, always)], head),
    ("fedbn", {}, norm, [(2, always)], always),
    ("fedrep", {"head_epochs": 3, "body_epochs": 1}, head, [(3, head), (1, body)], always),
    ("fedrep", {"head_epochs": 1}, head, [(1, head), (2, body)], always),
    ("fedbabu", {"finetune_epochs": 0}, lambda name: False, [(2, body)], body),
]


@pytest.mark.parametrize(("name", "knobs", "private", "stages", "averaged"), METHODS, ids=[m[0] for m in METHODS])
def test_equals_a_plain_loop(name, knobs, private, stages, averaged):
    # FedRep's classifiers learn from features made at once: the last digits differ, which larger steps make more of.
    local = LOCAL | ({"lr": 0.01} if name == "fedrep" else {})
    run = finish(begin({name: knobs}, "resnet", local=local))
    server, own = plain(run, private, stages)
    close(run.server.model, {key: server[key] if averaged(key) else run.origin[key] for key in server})
    assert set(run.memory) == set(own)
    for k in own:
        close(run.memory[k]["own"] or {}, own[k])


@pytest.mark.parametrize(
    ("name", "private"), [("fedper", head), ("lg_fedavg", body), ("fedbn", norm), ("fedrep", head)]
)
def test_a_client_predicts_with_the_shared_and_its_own_part(name, private):
    """Also one that was never drawn: its own part is still that of the first model."""
    run = finish(begin({name: {"head_epochs": 1} if name == "fedrep" else {}}, "resnet", rounds=1))
    algorithm, view = run.parts[0], run.parts[0].view(run.server)
    assert set(run.memory) < set(run.selectable)
    for k in run.selectable:
        client = client_of(run, k)
        model = copy.deepcopy(run.engine.worker.network).eval()
        kept = run.memory[k]["own"] if k in run.memory else {n: run.origin[n] for n in run.origin if private(n)}
        model.load_state_dict(dict(run.server.model) | dict(kept), strict=False)
        with torch.no_grad():
            torch.testing.assert_close(algorithm.personal(client, *view)(client.x), model(client.x))


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg"])
def test_without_a_common_network_there_is_no_generic_model(name):
    last = finish(begin(name)).history[-1]["metrics"]
    assert not [key for key in last if key.startswith("generic/")]


@pytest.mark.parametrize("name", ["fedrep", "fedbn"])
def test_the_generic_model_has_the_average_of_what_nobody_receives(name):
    run = finish(begin(name, "resnet", clients_per_round=2, rounds=1))
    n = {k: client_of(run, k).n for k in run.memory}
    for key in next(iter(run.memory.values()))["own"]:
        mean = sum(n[k] * memory["own"][key] for k, memory in run.memory.items()) / sum(n.values())
        torch.testing.assert_close(run.server.model[key], mean)
        assert all(not torch.allclose(memory["own"][key], mean, atol=1e-5) for memory in run.memory.values())
    client = client_of(run, 0)
    with torch.no_grad():
        generic = run.parts[0].generic(client, *run.parts[0].view(run.server))(client.x)
        assert torch.equal(generic, client.logits(run.server.model, client.x))
    assert "generic/acc" in run.history[-1]["metrics"]


@pytest.mark.parametrize(("name", "down", "up"), [
    ("fedper", body, body), ("lg_fedavg", head, head), ("fedbn", lambda n: not norm(n), always),
    ("fedrep", body, always), ("fedbabu", always, body),
])  # fmt: skip
def test_what_travels(name, down, up):
    run = begin(name, "resnet", rounds=1)
    metrics = run.advance()["metrics"]
    size = {kind: 3 * 4 * sum(t.numel() for n, t in run.origin.items() if kind(n)) for kind in (down, up)}
    assert (metrics["bytes/down"], metrics["bytes/up"]) == (size[down], size[up])


# Limits --------------------------------------------------------------------------------------------------------------


def test_fedbn_without_batch_norm_is_fedavg():
    run, fedavg = finish(begin("fedbn")), finish(begin("fedavg"))
    assert run.server.model == fedavg.server.model
    scores = [{k: v for k, v in r.history[-1]["metrics"].items() if "/acc" in k} for r in (run, fedavg)]
    assert scores[0] == scores[1]
    assert finish(begin("fedbn", "resnet")).server.model != finish(begin("fedavg", "resnet")).server.model


@pytest.mark.parametrize(("net", "depth"), [("cnn", 4), ("resnet", 10)])
def test_lg_fedavg_that_shares_all_layers_is_fedavg(net, depth):
    run = finish(begin({"lg_fedavg": {"num_layers_keep": depth}}, net))
    assert run.server.model == finish(begin("fedavg", net)).server.model
    with pytest.raises(ValueError, match=f"num_layers_keep is {depth + 1}, but this network has only {depth} layers"):
        begin({"lg_fedavg": {"num_layers_keep": depth + 1}}, net)


def share(run):
    """Do what the method does not: replace every client's own part by the average of this round's."""
    sums = [Sum(n=(n := client_of(run, k).n), w=n * memory["own"]) for k, memory in sorted(run.memory.items())]
    total = reduce(add, sums)
    mean = (total.w / total.n).to(torch.float32)
    run.memory = {k: {"own": mean} for k in run.memory}
    return mean


@pytest.mark.parametrize(
    ("name", "net"), [("fedper", "cnn"), ("fedper", "resnet"), ("lg_fedavg", "cnn"), ("fedbn", "resnet")]
)
def test_with_its_private_part_averaged_too_it_is_fedavg(name, net):
    run, fedavg = (begin(each, net, clients_per_round=6) for each in (name, "fedavg"))
    while not run.done:
        run.advance()
        fedavg.advance()
        shared = run.server.model.replace(share(run))
        close(fedavg.server.model, shared)
        assert name != "fedper" or fedavg.server.model == shared  # the same order in memory: the same bits


def test_lg_fedavg_is_the_mirror_of_fedper():
    """One keeps what the other sends: after a round from a common start, the halves are those of FedAvg's models."""
    per, lg, fedavg = (begin(name, "resnet", rounds=1) for name in ("fedper", "lg_fedavg", "fedavg"))
    for run in per, lg, fedavg:
        run.advance()
    assert set(per.memory) == set(lg.memory)
    assert fedavg.server.model.body == per.server.model.body
    close(fedavg.server.model.head, lg.server.model.head)
    for k in per.memory:
        client = client_of(fedavg, k, seed=stream(0, CALL, 0, 0, k))
        w = client.fit(fedavg.parts[0].objective, w=fedavg.origin).w
        assert w.head == per.memory[k]["own"]
        close(w.body, lg.memory[k]["own"])


def test_a_warm_start_is_a_chain():
    run = begin(["fedavg", "lg_fedavg"], rounds=2)
    run.advance()
    run.advance()
    trained = run.server.model
    run.advance()
    assert run.origin == trained
    stranger = next(k for k in run.selectable if k not in run.memory)
    assert client_of(run, stranger).state.own == trained.body


def test_more_shared_layers_are_the_last_ones():
    run = finish(begin({"lg_fedavg": {"num_layers_keep": 2}}, "cnn"))
    assert {n for n in run.origin if not torch.equal(run.origin[n], run.server.model[n])} == {
        "body.fc.weight", "body.fc.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert set(run.memory[next(iter(run.memory))]["own"]) == {
        f"body.conv{i}.{t}" for i in (1, 2) for t in ("weight", "bias")
    }
    run = begin({"lg_fedavg": {"num_layers_keep": 2}}, "resnet")
    assert run.parts[0].shared(run.origin) == ("head.", "body.stage3.0.shortcut.0.", "body.stage3.0.shortcut.1.")
    own = client_of(run, 0).state.own
    assert "body.stage3.0.bn2.running_mean" in own
    assert "body.stage3.0.shortcut.1.running_mean" not in own


def test_fedrep_without_head_epochs_is_fedbabu():
    rep = finish(begin({"fedrep": {"head_epochs": 0}}, "resnet"))
    babu = finish(begin({"fedbabu": {"finetune_epochs": 0}}, "resnet"))
    close(rep.server.model, babu.server.model)
    assert all(memory["own"] == rep.origin.head for memory in rep.memory.values())


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_a_classifier_on_features_is_one_on_images_unless_these_change(augment):
    run = begin("fedrep", "resnet", local=LOCAL | {"augment": augment})
    on_images = alone(client_of(run, 1), run.parts[0].objective, run.origin.body, run.origin.head, 3)
    client = client_of(run, 1)
    found = classifier(client, run.origin.body, run.origin.head, 3)
    close(found, on_images)
    assert bool(client.losses["features"][1]) == (augment == "none"), "what it was trained on"


def test_fedrep_trains_heads_before_the_body():
    """Each stage has one full batch: by hand, the head steps on the old features and the body under the new head."""
    knobs = {"head_epochs": 1, "body_epochs": 1}
    run = begin({"fedrep": knobs}, local={"lr": 0.1, "momentum": 0.0, "batch": 4096}, clients_per_round=1, rounds=1)
    run.advance()
    (k,) = run.memory
    client = client_of(run, k)
    model = copy.deepcopy(run.engine.worker.network)
    for half in model.head, model.body:
        model.zero_grad()
        F.cross_entropy(model(client.x), client.y).backward()
        with torch.no_grad():
            for p in half.parameters():
                p -= 0.1 * p.grad
    torch.testing.assert_close(run.server.model.flat, Params.of(model).flat)
    torch.testing.assert_close(run.memory[k]["own"]["head.bias"], model.head.bias.detach())


def test_fedreps_last_visit_fits_everyones_head_to_the_final_body():
    """One full batch: by hand, each head takes one step on the features of the last round's body, and nothing else."""
    knobs, local = {"head_epochs": 1, "body_epochs": 1}, {"lr": 0.1, "momentum": 0.0, "batch": 4096}
    before = finish(begin({"fedrep": knobs}, local=local, rounds=1))
    run = finish(begin({"fedrep": knobs | {"final_epochs": 1}}, local=local, rounds=1))
    assert [line["phase"] for line in run.history] == ["fedrep.train", "fedrep.visit"]
    assert run.server.model == before.server.model
    assert set(before.memory) < set(run.memory)
    assert sorted(run.memory) == run.selectable
    for k in run.selectable:
        client = client_of(run, k)
        model = copy.deepcopy(run.engine.worker.network)
        own = before.memory[k]["own"] if k in before.memory else run.origin.head
        model.load_state_dict({**run.server.model.body, **own})
        F.cross_entropy(model(client.x), client.y).backward()
        with torch.no_grad():
            for p in model.head.parameters():
                p -= 0.1 * p.grad
        close(run.memory[k]["own"], {n: v for n, v in model.state_dict().items() if head(n)})


# Fine-tuning of FedBABU ----------------------------------------------------------------------------------------------


def test_fedbabu_fine_tunes_everyone_and_keeps_the_random_classifier():
    run = finish(begin("fedbabu"))
    assert [line["phase"] for line in run.history] == ["fedbabu.train"] * 2 + ["fedbabu.personalize"]
    assert run.server.model.head == run.origin.head
    assert run.server.model == finish(begin({"fedbabu": {"finetune_epochs": 0}})).server.model
    assert sorted(run.memory) == run.selectable
    assert all(memory["own"].head != run.origin.head for memory in run.memory.values())
    before, after = (line["metrics"] for line in run.history[-2:])
    assert before["generic/acc"] == after["generic/acc"]
    assert after["personal/acc_dist"] != before["personal/acc_dist"]


def test_fine_tuning_the_full_model_is_what_finetune_does():
    tuning = {"epochs": 1, "lr": 0.07}
    run = finish(begin({"fedbabu": {f"finetune_{k}": v for k, v in tuning.items()}}, "resnet"))
    chain = finish(begin([{"fedbabu": {"finetune_epochs": 0}}, {"finetune": tuning}], "resnet"))
    assert {k: memory["own"] for k, memory in run.memory.items()} == {k: m["w"] for k, m in chain.memory.items()}
    assert run.history[-1]["metrics"]["personal/acc_owned"] == chain.history[-1]["metrics"]["personal/acc_owned"]


@pytest.mark.parametrize(("part", "tuned"), [("head", head), ("body", body)])
def test_fine_tuning_a_part_leaves_the_rest_as_it_was(part, tuned):
    knobs = {"finetune_part": part, "finetune_epochs": 1}
    run = finish(begin({"fedbabu": knobs}, local={"lr": 0.1, "momentum": 0.0, "batch": 4096}, rounds=1))
    for k in run.selectable:
        client = client_of(run, k)
        model = copy.deepcopy(run.engine.worker.network)
        model.load_state_dict(dict(run.server.model))
        F.cross_entropy(model(client.x), client.y).backward()
        by_hand = {n: (p - 0.1 * p.grad if tuned(n) else p).detach() for n, p in model.named_parameters()}
        assert set(run.memory[k]["own"]) == {n for n in by_hand if tuned(n)}
        for n, value in run.memory[k]["own"].items():
            torch.testing.assert_close(value, by_hand[n])
        with torch.no_grad():
            model.load_state_dict(by_hand)
            predicted = run.parts[0].personal(client, run.server.model)(client.x)
            torch.testing.assert_close(predicted, model(client.x))


# Parts of a model ----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A convolution with batch norm, and a linear head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Linear(2, 3))
        self.head = nn.Linear(3, 2)


def test_layers_and_batch_norms_are_read_off_the_layout():
    model = Params.of(Small())
    assert layers(model) == [
        ["body.0.weight", "body.1.weight", "body.1.bias"],
        ["body.2.weight", "body.2.bias"],
        ["head.weight", "head.bias"],
    ]
    assert modules(layers(model)[0]) == ("body.0.", "body.1.")
    assert batch_norms(model) == ("body.1.",)
    assert batch_norms(model.head) == ()
    resnet = begin("fedbn", "resnet").origin
    names = {n for n in resnet if norm(n)}
    assert set(resnet.under(*batch_norms(resnet))) == names
    assert len(names) == 4 * len(batch_norms(resnet))


def test_joined_parts_are_the_model():
    model = Params.of(Small())
    assert joined(model.body, model.head) == model
    mixed = joined(model.head, model.body)
    assert dict(mixed).keys() == dict(model).keys()
    assert model.replace(mixed) == model
    nothing = model.where(lambda name: False)
    assert joined(model, nothing) == joined(nothing, model) == model


def test_what_is_frozen_does_not_move_and_gives_no_gradient():
    run = begin("fedavg", "resnet")
    client = client_of(run, 0)
    w = run.server.model
    before = w.clone()
    tuned = alone(client, run.parts[0].objective, w, w.head, epochs=1, lr=0.1)
    assert set(tuned) == {"head.weight", "head.bias"}
    assert w == before
    assert tuned != w.head
    assert alone(client, run.parts[0].objective, w, w.head, epochs=0) == w.head
