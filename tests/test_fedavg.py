"""FedAvg and its kin against plain PyTorch and against each other."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import digits, driver, finish, tiny

from algorithms.base import Sum
from algorithms.losses import BalancedSoftmax, CrossEntropy, Focal
from algorithms.params import Params
from algorithms.priors import PRIORS
from orchestrator.client import CALL, SAMPLING, stream


def plain_fedavg(run, experiment):
    """Return the weights that an ordinary PyTorch loop gets from the same samples in the same order."""
    local, split = experiment.local, run.split
    data = digits()
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    images = (torch.from_numpy(data.x_train).float() / 255 - mean) / std
    labels = torch.from_numpy(data.y_train)
    network = run.engine.worker.network
    server = {k: v.clone() for k, v in network.state_dict().items()}
    for round in range(experiment.rounds):
        rng = np.random.default_rng(stream(experiment.seed, SAMPLING, round))
        chosen = sorted(rng.choice(run.selectable, experiment.clients_per_round, replace=False).tolist())
        total, samples = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in server.items()}, 0
        for k in chosen:
            model = copy.deepcopy(network).train().to(memory_format=torch.channels_last)
            model.load_state_dict(server, strict=False)  # batch norm here counts no batches
            optimizer = torch.optim.SGD(
                model.parameters(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay
            )
            x, y = images[split.train[k]].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), labels[split.train[k]]
            order = torch.Generator().manual_seed(stream(experiment.seed, CALL, round, 0, k))
            for _ in range(local.epochs):
                for rows in torch.randperm(len(y), generator=order).split(local.batch):
                    if len(rows) > 1 or not run.engine.worker.norms:
                        optimizer.zero_grad()
                        F.cross_entropy(model(x[rows]), y[rows]).backward()
                        optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += (len(y) * value).double()
            samples += len(y)
        server = {k: (v / samples).float() for k, v in total.items()}
    return server


@pytest.mark.parametrize("model", ["cnn_small", {"name": "resnet8", "width": 8}])
def test_equals_a_plain_loop_weight_for_weight(model):
    experiment = tiny(model=model, local={"lr": 0.03, "batch": 20, "epochs": 2, "weight_decay": 1e-3}, rounds=3)
    run = finish(driver(experiment))
    expected = plain_fedavg(run, experiment)
    assert set(run.server.model) == set(expected)
    for name, value in run.server.model.items():
        assert torch.equal(value, expected[name]), name


def test_learns():
    run = finish(driver(tiny(rounds=25, clients_per_round=6)))
    first, last = run.history[1]["metrics"], run.history[-1]["metrics"]
    assert last["train/loss"] < first["train/loss"] / 2
    assert last["generic/acc"] > 0.6


def test_one_client_alone_is_ordinary_training():
    experiment = tiny(data={"name": "digits", "clients": 1, "imbalance": 1}, clients_per_round=1, rounds=1)
    run = driver(experiment)
    start = run.server.model
    run.advance()
    client = run.engine.worker.client(0, 0, {}, start, stream(0, CALL, 0, 0, 0), lr=experiment.local.lr)
    alone = client.fit(run.parts[0].objective, w=start).w
    # The average of one is itself: n * w / n in double precision rounds back to the same single-precision number.
    torch.testing.assert_close(run.server.model.flat, alone.flat, rtol=2e-7, atol=0)


def test_fedprox_without_its_term_is_fedavg():
    zero = finish(driver(tiny(algorithm={"fedprox": {"mu": 0.0}})))
    assert zero.server.model == finish(driver(tiny())).server.model


def test_fedprox_step_by_hand():
    """With one full batch twice, the second step adds mu (w1 - w0) to the gradient."""
    local = {"lr": 0.1, "momentum": 0.0, "batch": 4096, "epochs": 2}
    base = tiny(local=local, clients_per_round=1, rounds=1)
    run = driver(tiny(local=local, clients_per_round=1, rounds=1, algorithm={"fedprox": {"mu": 0.5}}))
    plain = driver(base)
    w0 = run.server.model

    def gradient(w):
        client = plain.engine.worker.client(k, 0, {}, w0, 0)
        flat = w.flat.clone().requires_grad_()
        loss = plain.parts[0].objective(client, client.x, client.y, w=Params(w.layout, flat, w.buffers))
        return torch.autograd.grad(loss, flat)[0]

    (k,) = run._draw(run.plan[0])
    run.advance()
    w1 = w0.flat - 0.1 * gradient(w0)
    w2 = w1 - 0.1 * (gradient(Params(w0.layout, w1, w0.buffers)) + 0.5 * (w1 - w0.flat))
    torch.testing.assert_close(run.server.model.flat, w2, rtol=1e-4, atol=1e-6)


def test_finetune_leaves_the_global_model_alone_and_visits_everyone():
    run = finish(driver(tiny(algorithm=["fedavg", {"finetune": {"epochs": 2}}])))
    assert run.server.model == finish(driver(tiny())).server.model
    assert sorted(run.memory) == run.selectable
    assert all(run.memory[k]["w"] != run.server.model for k in run.selectable)
    assert [line["phase"] for line in run.history] == ["fedavg.train", "fedavg.train", "finetune.tune"]
    assert finish(driver(tiny(algorithm="finetune"))).plan[0].name == "fedavg.train"


def test_finetune_without_epochs_is_the_global_model():
    run = finish(driver(tiny(algorithm={"finetune": {"epochs": 0}})))
    before, after = run.history[-2]["metrics"], run.history[-1]["metrics"]
    assert all(before[k] == after[k] for k in after if k.startswith("personal/"))


def test_local_exchanges_nothing_and_has_no_generic_model():
    run = finish(driver(tiny(algorithm="local")))
    last = run.history[-1]["metrics"]
    assert last["bytes/up"] == last["bytes/down"] == 0
    assert not [k for k in last if k.startswith("generic/")]
    visited = {k for r in range(2) for k in run_ids(run, r)}
    assert set(run.memory) == visited


def run_ids(run, round):
    rng = np.random.default_rng(stream(0, SAMPLING, round))
    return rng.choice(run.selectable, 3, replace=False).tolist()


def test_learning_rates_follow_the_schedule():
    """Two rounds of one full-batch step: the second one's change is scaled by the schedule's factor."""
    local = {"lr": 0.1, "momentum": 0.0, "batch": 4096}
    plain = driver(tiny(local=local, clients_per_round=6))
    slow = driver(tiny(local=local | {"schedule": {"at": [1], "factor": 0.01}}, clients_per_round=6))
    for run in plain, slow:
        run.advance()
    assert plain.server.model == slow.server.model
    middle = plain.server.model
    for run in plain, slow:
        run.advance()
    ratio = (slow.server.model - middle).norm() / (plain.server.model - middle).norm()
    assert float(ratio) == pytest.approx(0.01, rel=1e-3)


# Losses and priors ------------------------------------------------------------------------------------------------


def test_losses_by_hand():
    z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    ce = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(1))]
    uniform, skewed = torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2])
    assert float(CrossEntropy()(z, y, uniform)) == pytest.approx(sum(ce) / 2)
    p = [math.exp(-c) for c in ce]
    focal = sum((1 - q) ** 2 * c for q, c in zip(p, ce, strict=True)) / 2
    assert float(Focal(2.0)(z, y, uniform)) == pytest.approx(focal)
    assert float(Focal(0.0)(z, y, uniform)) == pytest.approx(sum(ce) / 2)
    balanced = [math.log(1 + math.exp(-2) / 4), math.log(1 + math.exp(1) / 4)]
    assert float(BalancedSoftmax()(z, y, skewed)) == pytest.approx(sum(balanced) / 2)
    assert float(BalancedSoftmax()(z, y, 100 * skewed)) == pytest.approx(sum(balanced) / 2)
    assert float(BalancedSoftmax()(z, y, uniform)) == pytest.approx(sum(ce) / 2)


def test_a_class_of_prior_zero_drops_out_of_the_balanced_softmax():
    z = torch.tensor([[1.0, 5.0, 1.0]], requires_grad=True)
    loss = BalancedSoftmax()(z, torch.tensor([0]), torch.tensor([0.5, 0.0, 0.5]))
    assert loss.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(loss, z)
    assert grad.tolist() == [[-0.5, 0.0, 0.5]]


def test_priors_by_hand():
    local, everywhere = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([6.0, 3.0, 1.0])
    assert PRIORS["none"](local, everywhere, None).tolist() == pytest.approx([1 / 3] * 3)
    assert PRIORS["local"](local, everywhere, None).tolist() == pytest.approx([3 / 4.1, 1 / 4.1, 0.1 / 4.1])
    assert PRIORS["global"](local, everywhere, None).tolist() == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize("loss", ["focal", "balanced_softmax"])
def test_the_chosen_loss_is_the_one_that_trains(loss):
    local = {"lr": 0.05, "batch": 16, "loss": loss} | ({"prior": "global"} if loss == "balanced_softmax" else {})
    assert finish(driver(tiny(local=local))).server.model != finish(driver(tiny())).server.model


def test_what_a_client_sends_is_checked():
    experiment = tiny(local={"lr": 1e30, "batch": 16})
    with pytest.raises(RuntimeError, match=r"client \d+, round 0: 'w.weights' is not finite; lower the learning rate"):
        finish(driver(experiment))


def test_a_bad_update_may_be_left_out(monkeypatch):
    from algorithms.fedavg import FedAvg

    honest = FedAvg.local

    def local(self, client, w):
        sent = honest(self, client, w)
        return Sum(n=client.n, w=sent.w * float("nan")) if client.id == bad else sent

    experiment = tiny(failures={"bad_update": "skip"}, rounds=1)
    run = driver(experiment)
    chosen = run._draw(run.plan[0])
    bad = chosen[0]
    monkeypatch.setattr(FedAvg, "local", local)
    line = run.advance()
    assert line["metrics"]["clients/rejected"] == 1
    assert line["rejected"] == [f"client {bad}, round 0: 'w.weights' is not finite"]
    assert torch.isfinite(run.server.model.flat).all()


# Augmentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_crops_are_mirrored_windows_of_the_padded_image(channels):
    worker = driver(tiny(local={"lr": 0.05, "batch": 16, "augment": "crop_flip"})).engine.worker
    x = torch.randn(12, channels, 8, 8, generator=torch.Generator().manual_seed(1))
    worker.mean, worker.std = (t.expand(channels, 1, 1) for t in (worker.mean, worker.std))
    black = -worker.mean / worker.std
    padded = black.expand(12, channels, 16, 16).clone()
    padded[:, :, 4:12, 4:12] = x
    made = worker.augment(x, torch.Generator().manual_seed(2))
    # Where there is one channel, other strides pass for contiguous too, with which convolutions corrupt memory.
    assert made.stride() == torch.empty(12, channels, 8, 8).stride()
    found = []
    for image, around in zip(made, padded, strict=True):
        windows = {(t, s): around[:, t : t + 8, s : s + 8] for t in range(9) for s in range(9)}
        found += [(k, m) for k, w in windows.items() for m in (0, 1) if torch.equal(image, w.flip(2) if m else w)]
    assert len(found) == 12
    assert len({place for place, _ in found}) > 6
    assert {mirrored for _, mirrored in found} == {0, 1}


def test_grey_images_are_augmented_for_a_network_with_batch_norm():
    local = {"lr": 0.05, "batch": 16, "augment": "crop_flip"}
    run = finish(driver(tiny(local=local, model={"name": "resnet8", "width": 4})))
    assert run.server.model.flat.isfinite().all()
