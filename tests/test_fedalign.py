"""FedAlign against SVDs, a narrow network built of modules, and a whole step by hand."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import driver, finish, tiny
from test_stages import client_with, trained

from algorithms.fedalign import FedAlign, clipped, slim, spectral, through
from algorithms.params import Params
from orchestrator.client import Client
from orchestrator.models import build
from orchestrator.models.resnet import BasicBlock, Pad, project

SMALL = {"resnet8": {"name": "resnet8", "width": 8}, "resnet20": {"name": "resnet20", "width": 8}}
nets = pytest.mark.parametrize("net", SMALL)


def run(net="resnet8", knobs=None, **changes):
    algorithm = "fedavg" if knobs is None else {"fedalign": knobs}
    return driver(tiny(model=SMALL[net], algorithm=algorithm, **changes))


@nets
def test_without_distillation_it_is_fedavg(net):
    short = {"rounds": 2 if net == "resnet8" else 1, "clients_per_round": 2, "evaluate": {"every": 2}}
    plain, aligned = finish(run(net, **short)), finish(run(net, {"mu": 0, "clip": None}, **short))
    assert aligned.server.model == plain.server.model
    for a, b in zip(aligned.history, plain.history, strict=True):
        assert all(a["metrics"][k] == v for k, v in b["metrics"].items() if not k.startswith("time/"))
    assert finish(run(net, {"mu": 0.1, "clip": None}, **short)).server.model != plain.server.model


# The Lipschitz constants ---------------------------------------------------------------------------------------------


def transmission(A, B):
    """T of one sample, A's map being shrunk twofold by hand."""
    A = A.reshape(A.shape[0], A.shape[1] // 2, 2, A.shape[2] // 2, 2).mean((2, 4))
    return A.reshape(len(A), -1) @ B.reshape(len(B), -1).T / (B.shape[1] * B.shape[2])


def test_the_constant_is_the_largest_singular_value():
    rng = np.random.default_rng(0)
    A, B = rng.random((4, 5, 6, 8)), rng.random((4, 7, 3, 4))  # as after a ReLU
    expected = [np.linalg.svd(transmission(a, b), compute_uv=False)[0] for a, b in zip(A, B, strict=True)]
    s = spectral(torch.tensor(A, dtype=torch.float32), torch.tensor(B, dtype=torch.float32))
    np.testing.assert_allclose(s.flatten().numpy(), expected, rtol=1e-5)


def test_ten_iterations_where_that_is_not_yet_enough():
    rng = np.random.default_rng(1)
    A, B = rng.standard_normal((3, 5, 4, 4)), rng.standard_normal((3, 6, 2, 2))
    s = spectral(torch.tensor(A), torch.tensor(B)).flatten().numpy()
    for a, b, got in zip(A, B, s, strict=True):
        T = transmission(a, b)
        K, v = T @ T.T, np.ones(5)
        before, after = np.linalg.matrix_power(K, 9) @ v, np.linalg.matrix_power(K, 10) @ v
        assert got == pytest.approx(math.sqrt(np.linalg.norm(after) / np.linalg.norm(before)), rel=1e-9)
        assert got <= np.linalg.svd(T, compute_uv=False)[0] * (1 + 1e-9)


def test_vectors_are_maps_of_one_pixel():
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[2.0, 1.0, 2.0], [0.0, 7.0, 0.0]])
    torch.testing.assert_close(spectral(a, b).flatten(), torch.tensor([5.0 * 3.0, 7.0]))
    torch.testing.assert_close(spectral(a[..., None, None], b), spectral(a, b))


def test_features_that_have_died_out_have_gradients():
    b = torch.zeros(2, 3, 2, 2, requires_grad=True)
    spectral(torch.rand(2, 4, 2, 2), b).sum().backward()
    assert torch.equal(b.grad, torch.zeros_like(b))


# The slim stage ------------------------------------------------------------------------------------------------------


def test_slim_tensors_by_hand():
    conv = torch.arange(8 * 3.0).view(8, 3, 1, 1)
    inner = torch.arange(64.0).view(8, 8, 1, 1)
    stage = Params.pack({"a": conv, "b": inner, "c": torch.arange(5.0)}, {"d": torch.arange(8.0)})
    thin = slim(stage, 3, 0.25)
    assert thin["a"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert thin["b"].flatten().tolist() == [0, 1, 8, 9]
    assert thin["c"].tolist() == [0, 1]  # no fewer than a quarter
    assert thin["d"].tolist() == [0, 1]
    thin["d"] += 1
    assert stage["d"].tolist() == list(range(8))


@nets
@pytest.mark.parametrize(("omega", "k"), [(0.25, 8), (0.5, 16)])
@pytest.mark.parametrize("training", [False, True])
def test_the_slim_stage_is_a_narrow_network(net, training, omega, k):
    """The same blocks built with fewer channels make the same map of the same input."""
    client, w = client_with(net, width=8)
    w = trained(w) if training else w
    f = client.stem(w, client.x).detach()
    stage = w.under(client.last_stage)
    thin = slim(stage, 16, omega)
    _, map_ = through(client, thin, f)

    class Narrow(Pad):
        """Option A to 32 channels, of which the first are kept: eight of padding, then some of the input."""

        def __init__(self, inputs, outputs, stride):
            super().__init__(inputs, 32, stride)

        def forward(self, x):
            return super().forward(x)[:, :k]

    around = project if net == "resnet8" else Narrow
    blocks = [BasicBlock(16, k, 2, around), *(BasicBlock(k, k, 1, around) for _ in range(2 * (net == "resnet20")))]
    narrow = torch.nn.Sequential(*blocks).train(training)
    given = {name.removeprefix(client.last_stage): t for name, t in slim(stage, 16, omega).items()}
    narrow.load_state_dict(given, strict=False)
    torch.testing.assert_close(map_, narrow(f))
    assert map_.shape[1] == k
    assert stage.buffers.equal(w.under(client.last_stage).buffers)


def test_a_bottleneck_stage_can_be_slimmed():
    client, w = client_with("resnet50")
    f = client.stem(w, client.x)
    h, full = through(client, w, f)
    thin, part = through(client, slim(w.under(client.last_stage), f.shape[1], 0.25), f)
    assert (h.shape[1], thin.shape[1], f.shape[1]) == (2048, 512, 1024)
    assert full is h  # at 32 x 32 its last map has one pixel, which is no map
    assert part is thin


@nets
def test_only_the_whole_network_feeds_batch_norm(net):
    client, w = client_with(net, width=8)
    one, two = trained(w), trained(w)
    FedAlign().objective(client, client.x, client.y, two)
    client.features(one, client.x)
    assert torch.equal(one.buffers, two.buffers)
    assert not torch.equal(one.buffers, w.buffers)


# The objective -------------------------------------------------------------------------------------------------------


def by_hand(client, w, mu, omega):
    """Return the loss and its gradient, by modules and explicit matrices."""
    network = copy.deepcopy(client.worker.network).train()
    network.load_state_dict(dict(w), strict=False)
    kept = {}
    network.body.stage2.register_forward_hook(lambda m, i, o: kept.update(into=o))
    network.body.stage3.register_forward_hook(lambda m, i, o: kept.update(out=o))
    ce = F.cross_entropy(network(client.x), client.y)
    into, block = kept["into"].detach(), network.body.stage3[0]
    k = round(omega * block.conv1.out_channels)

    def norm(h, bn):
        return F.batch_norm(h, None, None, bn.weight[:k], bn.bias[:k], training=True)

    h = F.relu(norm(F.conv2d(into, block.conv1.weight[:k], stride=2, padding=1), block.bn1))
    h = norm(F.conv2d(h, block.conv2.weight[:k, :k], padding=1), block.bn2)
    around = norm(F.conv2d(into, block.shortcut[0].weight[:k], stride=2), block.shortcut[1])

    def s(out):
        values = []
        for a, b in zip(F.avg_pool2d(into, 2).flatten(2), out.flatten(2), strict=True):
            T = a @ b.T / a.shape[1]
            K, v = T @ T.T, torch.ones(len(T))
            for _ in range(10):
                v = K @ v
                top = v.norm()
                v = v / top
            values.append(top.sqrt())
        return torch.stack(values)

    lip = ((s(F.relu(h + around)) - s(kept["out"]).detach()) ** 2).mean()
    loss = ce + mu * (ce.item() / lip.item()) * lip
    grads = torch.autograd.grad(loss, list(network.parameters()))
    return loss.detach(), torch.cat([g.flatten() for g in grads]), ce.detach()


@pytest.mark.parametrize(("mu", "omega"), [(0.45, 0.25), (2.0, 0.5)])
def test_a_step_by_hand(mu, omega):
    one = run(knobs={"mu": mu, "width": omega, "clip": None}, rounds=1, clients_per_round=1,
              local={"lr": 0.1, "momentum": 0.0, "batch": 4096})  # fmt: skip
    start = one.server.model
    finish(one)
    line = one.history[0]["metrics"]
    (id,) = one._draw(one.plan[0])
    client = Client(one.engine.worker, id, 0)
    loss, grad, ce = by_hand(client, start, mu, omega)
    assert line["train/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert float(loss) == pytest.approx(float(ce) * (1 + mu), rel=1e-5)
    step = (start.flat - one.server.model.flat) / 0.1
    torch.testing.assert_close(step, grad, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(step, by_hand(client, start, 0, omega)[1], rtol=1e-2, atol=1e-2)


def test_a_stage_of_full_width_has_nothing_to_align():
    client, w = client_with("resnet8", width=4)
    grads = []
    for mu in (0.0, 5.0):
        hot = trained(w)
        FedAlign(mu=mu, width=1.0, clip=None).objective(client, client.x, client.y, hot).backward()
        grads.append(hot.flat.grad)
    assert torch.equal(*grads)


def test_clipping_by_hand():
    w = Params.pack({"a": torch.tensor([3.0, 1.0])})
    for limit, expected in ((10.0, [6.0, 8.0]), (5.0, [3.0, 4.0]), (1e9, [6.0, 8.0])):
        hot = trained(w)
        loss = clipped((hot["a"] * torch.tensor([1.0, 4.0])).pow(2)[0] + 8 * hot["a"][1], hot, limit)
        assert loss.item() == 17
        loss.backward()
        torch.testing.assert_close(hot.flat.grad, torch.tensor(expected))
    hot = trained(w)
    clipped((hot["a"] * 0).sum(), hot, 1.0).backward()
    assert hot.flat.grad.tolist() == [0, 0]


def test_a_clipped_run_takes_steps_of_at_most_that_length():
    local = {"lr": 0.1, "momentum": 0.0, "batch": 4096}
    one = run(knobs={"clip": 0.25}, rounds=1, clients_per_round=1, local=local)
    start = one.server.model
    assert (finish(one).server.model - start).norm().item() == pytest.approx(0.025, rel=1e-4)


# Networks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("cnn_small", {}, "batch norm"),
        ("cnn_ecl", {}, "batch norm"),
        ("resnext50", {}, "grouped convolution"),
        ("mobilenet_v3_small", {}, "grouped convolution"),
        ("resnet32", {"experts": 2}, "each expert"),
    ],
)
def test_other_networks_are_refused_with_a_reason(model, options, why):
    network = build(model, (1, 32, 32), 10, **options)
    with pytest.raises(ValueError, match=f"{why}.*choose one of the models resnet8 to resnet50"):
        FedAlign().server_state(Params.of(network))


@pytest.mark.parametrize("model", ["resnet8", "resnet20", "resnet32", "resnet18", "resnet34", "resnet50"])
def test_residual_networks_are_accepted(model):
    w = Params.of(build(model, (1, 32, 32), 10))
    assert FedAlign().server_state(w) == {"model": w}


def test_a_refused_network_stops_before_anything_starts():
    with pytest.raises(ValueError, match="resnet8 to resnet50"):
        driver(tiny(algorithm="fedalign"))
