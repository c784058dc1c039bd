import subprocess
import sys
import textwrap
from functools import cache

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from orchestrator.models import MODELS, Network, build, default_model
from orchestrator.models.experts import Cosine
from orchestrator.models.resnet import Pad


def conv(inputs, outputs, kernel=3):
    return inputs * outputs * kernel**2 + 2 * outputs  # without bias, with batch-norm


def block(inputs, outputs):
    return conv(inputs, outputs) + conv(outputs, outputs)


# name: image shape, classes, parameters; the last three as torchvision publishes them.
CASES = {
    "cnn_small": ((1, 8, 8), 10, (9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 4 * 4 + 1) * 64 + 65 * 10),
    "cnn_ecl": ((1, 28, 28), 10, 61_706),  # LeNet-5
    "cnn_mupfl": ((1, 28, 28), 10, (25 + 1) * 32 + (25 * 32 + 1) * 64 + (64 * 4 * 4 + 1) * 10),
    "resnet8": (
        (3, 32, 32),
        10,
        conv(3, 64)
        + block(64, 64)
        + (block(64, 128) + conv(64, 128, 1))
        + (block(128, 256) + conv(128, 256, 1))
        + 257 * 10,
    ),
    "resnet20": ((3, 32, 32), 10, 269_722),
    "resnet32": ((3, 32, 32), 10, 464_154),
    "resnet18": ((3, 32, 32), 10, 11_173_962),
    "resnet34": ((3, 32, 32), 10, 21_282_122),
    "resnet50": ((3, 64, 64), 1000, 25_557_032),
    "resnext50": ((3, 64, 64), 1000, 25_028_904),
    "mobilenet_v3_small": ((3, 64, 64), 1000, 2_542_856),
}
DIMS = {
    "cnn_small": 64,
    "cnn_ecl": 84,
    "cnn_mupfl": 1024,
    "resnet8": 256,
    "resnet20": 64,
    "resnet32": 64,
    "resnet18": 512,
    "resnet34": 512,
    "resnet50": 2048,
    "resnext50": 2048,
    "mobilenet_v3_small": 1024,
}
EXPERTS = {
    "cnn_small x3": ((1, 8, 8), 10, (9 + 1) * 16 + (16 * 9 + 1) * 32 + 3 * ((32 * 4 * 4 + 1) * 64 + 64 * 10)),
    "cnn_ecl x3": ((1, 28, 28), 10, 26 * 6 + 151 * 16 + 3 * (401 * 120 + 121 * 84 + 84 * 10)),
    "resnet32 x3": ((3, 32, 32), 10, 23_824 + 3 * (248_544 + 48 * 10)),
    "resnet8 x3": (
        (3, 32, 32),
        10,
        conv(3, 64)
        + block(64, 64)
        + 3 * (block(64, 96) + conv(64, 96, 1) + block(96, 192) + conv(96, 192, 1) + 192 * 10),
    ),
}
CASES |= EXPERTS
DIMS |= {"cnn_small x3": 3 * 64, "cnn_ecl x3": 3 * 84, "resnet32 x3": 3 * 48, "resnet8 x3": 3 * 192}
IMAGES = [name for name, model in MODELS.items() if model.task == "classification"]
every = pytest.mark.parametrize("name", [*IMAGES, *EXPERTS])


def make(case: str, shape: tuple[int, int, int], classes: int, **options: int) -> Network:
    """Build what a case names: a model, or one with so many experts."""
    name, _, experts = case.partition(" x")
    return build(name, shape, classes, **options, **({"experts": int(experts)} if experts else {}))


@cache
def case(name: str) -> Network:
    shape, classes, _ = CASES[name]
    return make(name, shape, classes)


def images(name: str) -> torch.Tensor:
    return torch.randn(2, *CASES[name][0], generator=torch.Generator().manual_seed(1))


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@every
def test_parameter_count(name):
    assert count(case(name)) == CASES[name][2]


@every
def test_logits_are_the_head_of_the_body(name):
    network, x = case(name), images(name)
    network.eval()
    with torch.no_grad():
        h = network.body(x)
        assert h.shape == (2, network.dim) == (2, DIMS[name])
        logits = network(x)
        assert logits.shape == (2, CASES[name][1])
        torch.testing.assert_close(logits, network.head(h))
    network.train()


@every
def test_gradients_reach_every_parameter(name):
    network = make(name, CASES[name][0], 3)
    network(images(name)).logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@every
def test_body_parameters_come_first(name):
    halves = [key.partition(".")[0] for key, _ in case(name).named_parameters()]
    assert set(halves) == {"body", "head"}
    assert halves == sorted(halves)


@every
def test_last_stage_and_block_are_there(name):
    network = case(name)
    names = [key for key, _ in network.named_parameters()]
    block_ = [key for key in names if key.startswith(network.last_block)]
    stage_ = [key for key in names if key.startswith(network.last_stage)]
    body = [key for key in names if key.startswith("body.")]
    assert block_
    assert set(block_) <= set(stage_)
    assert stage_ == body[-len(stage_) :]  # the last stage ends where the head begins
    assert len(stage_) < len(body)


def test_resnet32_has_63_tensors_before_its_last_stage():
    names = [key for key, _ in case("resnet32").named_parameters()]
    assert names.index("body.stage3.0.conv1.weight") == 63
    assert case("resnet32").last_block == "body.stage3.4."


def maps(network: Network, x: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    hooks = [
        network.get_submodule(key).register_forward_hook(lambda module, args, output: seen.append(output))
        for key in network.activations
    ]
    with torch.no_grad():
        network.eval()(x)
    network.train()
    for hook in hooks:
        hook.remove()
    return seen


@every
def test_activations_are_maps(name):
    network = case(name)
    found = maps(network, images(name))
    assert len(found) == len(network.activations) >= 2
    for h in found:
        assert h.dim() == 4
        assert h.shape[2] * h.shape[3] > 1


@pytest.mark.parametrize("name", [*MODELS, *EXPERTS])
def test_what_is_tapped_has_gone_through_an_activation(name):
    shape = CASES[name][0] if name in CASES else (3, 45, 70)
    network = case(name) if name in CASES else build(name, shape, 5)
    found = maps(network, torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)))
    for layer, h in zip(network.activations, found, strict=True):
        least = -0.3751 if isinstance(network.get_submodule(layer), nn.Hardswish) else 0  # which is -3/8 at -3/2
        assert h.min() >= least, layer


@pytest.mark.parametrize(("name", "side"), [("mobilenet_v3_small", 64), ("lraspp_mobilenet_v3_small", 64)])
def test_each_block_of_a_mobilenet_is_tapped_after_its_depthwise_convolution(name, side):
    network = build(name, (3, side, side), 5)
    layers = [network.get_submodule(layer) for layer in network.activations]
    assert [type(layer) for layer in layers] == [nn.ReLU] * 3 + [nn.Hardswish] * 8
    depthwise = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert [h.shape[1] for h in maps(network, torch.zeros(2, 3, side, side))] == [m.out_channels for m in depthwise]


def test_maps_of_one_pixel_are_no_activations():
    network = build("mobilenet_v3_small", (3, 32, 32), 2)
    assert set(network.activations) < set(case("mobilenet_v3_small").activations)
    assert all(h.shape[2] * h.shape[3] > 1 for h in maps(network, torch.zeros(2, 3, 32, 32)))


@every
def test_only_float_state_and_nothing_in_place(name):
    assert all(tensor.is_floating_point() for tensor in case(name).state_dict().values())
    for module in case(name).modules():
        assert not getattr(module, "inplace", False)
        if isinstance(module, nn.BatchNorm2d):
            assert module.num_batches_tracked is None
            assert module.momentum == 0.1
            assert module.weight.eq(1).all()
            assert module.running_mean.eq(0).all()


@pytest.mark.parametrize("name", ["cnn_small", "resnet20", "cnn_small x3", "resnet32 x3", "mobilenet_v3_small"])
def test_weights_come_from_the_seed_alone(name):
    shape, classes, _ = CASES[name]
    threads = torch.get_num_threads()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = weights(make(name, shape, classes, seed=7))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    torch.set_num_threads(3 - min(threads, 2))
    try:
        again = weights(make(name, shape, classes, seed=7))
    finally:
        torch.set_num_threads(threads)
    assert equal(first, again)
    assert not equal(first, weights(make(name, shape, classes, seed=8)))


@pytest.mark.parametrize("name", ["resnet8", "resnet32 x3", "mobilenet_v3_small"])
def test_functional_call_moves_the_given_buffers_only(name):
    network = make(name, CASES[name][0], 3)
    own, given = weights(network.body), weights(network.body)
    network.train()
    h = functional_call(network.body, given, images(name))
    functional_call(network.head, weights(network.head), h)
    assert equal(weights(network.body), own)
    for key, _ in network.body.named_buffers():
        assert not torch.equal(given[key], own[key]), key
    for key, _ in network.body.named_parameters():
        assert torch.equal(given[key], own[key]), key


@pytest.mark.parametrize("name", ["cnn_small", "resnet8", "cnn_small x3", "resnet32 x3"])
def test_clients_can_be_stacked(name):
    shape = CASES[name][0]
    narrow = {"width": 4} if name == "resnet8" else {}
    network = make(name, shape, 3, **narrow)
    network.train()
    each = [weights(make(name, shape, 3, **narrow, seed=s)) for s in (1, 2)]
    x = torch.stack([images(name), images(name).flip(0) + 1])
    stacked = {key: torch.stack([w[key] for w in each]) for key in each[0]}
    together = vmap(lambda w, x: functional_call(network, w, x))(stacked, x)
    alone = torch.stack([functional_call(network, w, part) for w, part in zip(each, x, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
    for key, tensor in stacked.items():
        torch.testing.assert_close(tensor, torch.stack([w[key] for w in each]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("experts", "millions"), [(1, 0.46), (2, 0.52), (3, 0.77), (4, 1.02), (5, 1.27)])
def test_expert_sizes_are_those_of_ldae_table_6(experts, millions):
    network = build("resnet32", (3, 32, 32), 100, experts=experts)
    assert round(count(network.body) / 1e6, 2) == millions
    assert network.experts == (experts if experts > 1 else 0)
    if experts > 1:
        assert count(network.body) == 23_824 + experts * 248_544


@pytest.mark.parametrize(
    ("name", "shared_size", "own_size"),
    [
        ("resnet32 x3", 23_824, 248_544 + 480),
        ("cnn_small x3", 10 * 16 + 145 * 32, 513 * 64 + 640),
        ("cnn_ecl x3", 26 * 6 + 151 * 16, 401 * 120 + 121 * 84 + 840),
    ],
)
def test_experts_own_equal_and_separate_parts(name, shared_size, own_size):
    network = case(name)
    tensors = dict(network.named_parameters())
    parts = [{key for key in tensors if key.startswith(network.expert_prefixes(i))} for i in range(network.experts)]
    assert [sum(tensors[key].numel() for key in part) for part in parts] == [own_size] * 3
    shared = set(tensors) - set.union(*parts)
    assert sum(tensors[key].numel() for key in shared) == shared_size
    assert shared == {key for key in tensors if not key.startswith(("body.experts.", "head.experts."))}
    assert sum(map(len, parts)) + len(shared) == len(tensors)
    with pytest.raises(ValueError, match="no expert 3"):
        network.expert_prefixes(3)
    with pytest.raises(ValueError, match="has 0 experts"):
        case("resnet32").expert_prefixes(0)


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_logits(name):
    network, x = case(name), images(name)
    dim = network.dim // 3
    network.eval()
    with torch.no_grad():
        h = network.body(x)
        each = network.head.expert_logits(h)
        assert each.shape == (3, 2, 10)
        torch.testing.assert_close(each.mean(0), network(x))
        torch.testing.assert_close(functional_call(network.head, weights(network.head), (h,), {"each": True}), each)
        # Expert 1 reads its own features and no others.
        other = h.clone()
        other[:, dim : 2 * dim] = torch.rand(2, dim)
        changed = (network.head.expert_logits(other) - each).abs().amax((1, 2))
    network.train()
    assert changed[1] > 0
    assert changed[0] == changed[2] == 0


def test_cosine_logits_by_hand():
    head = Cosine(2, 2)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(2))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(head(torch.tensor([[0.0, 5.0]])), torch.tensor([[0.0, 24.0]]))


@pytest.mark.parametrize("name", ["cnn_small", "cnn_ecl", "resnet32", "resnet18"])
def test_one_expert_is_the_plain_network(name):
    shape, classes, _ = CASES[name]
    one = build(name, shape, classes, experts=1)
    assert one.experts == 0
    assert equal(weights(one), weights(case(name)))


def test_width_scales_every_part_of_an_expert():
    network = build("resnet32", (1, 8, 8), 10, width=4, experts=2)
    assert network.dim == 2 * 12
    assert network.get_parameter("body.experts.1.stage2.0.conv1.weight").shape == (6, 4, 3, 3)


def test_a_wider_lenet_keeps_its_proportions():
    network = build("cnn_ecl", (1, 28, 28), 10, width=12)
    assert [tuple(p.shape[:2]) for name, p in network.named_parameters() if name.endswith("weight")] == [
        (12, 1), (32, 12), (240, 32 * 25), (168, 240), (10, 168),
    ]  # fmt: skip


def test_experts_of_four_stages_share_the_first_two():
    network = build("resnet18", (3, 32, 32), 10, width=8, experts=3)
    assert network.dim == 3 * 48
    assert network.activations == (
        "body.trunk.stage1", "body.trunk.stage2",
        *(f"body.experts.{i}.stage{s}" for i in range(3) for s in (3, 4)),
    )  # fmt: skip
    assert network.get_parameter("body.experts.2.stage3.0.conv1.weight").shape == (24, 16, 3, 3)


def test_experts_of_resnext_share_two_stages_and_own_two_of_three_quarters():
    """Stages 3 and 4 have 6 and 3 blocks of a 1x1, a grouped 3x3 and a 1x1 convolution, each with a batch norm."""
    network = build("resnext50", (3, 64, 64), 10, experts=2)
    assert network.dim == 2 * 1536
    assert network.get_parameter("body.experts.1.layer3.0.conv2.weight").shape == (384, 12, 3, 3)

    def blocks(inputs, width, outputs, number):
        first, other = ((i * width + 2 * width) + (9 * width * width // 32 + 2 * width) for i in (inputs, outputs))
        last = width * outputs + 2 * outputs
        return first + last + inputs * outputs + 2 * outputs + (number - 1) * (other + last)

    own = blocks(512, 384, 768, 6) + blocks(768, 768, 1536, 3) + 1536 * 10
    for i in range(2):
        found = [p.numel() for n, p in network.named_parameters() if n.startswith(network.expert_prefixes(i))]
        assert sum(found) == own
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_pad_shortcut_by_hand():
    x = torch.arange(16 * 16, dtype=torch.float32).reshape(1, 16, 4, 4)
    out = Pad(16, 24, 2)(x)
    assert out.shape == (1, 24, 2, 2)
    assert torch.equal(out[:, 4:20], x[:, :, ::2, ::2])
    assert out[:, :4].eq(0).all()
    assert out[:, 20:].eq(0).all()
    assert Pad(3, 6, 1)(torch.ones(1, 3, 2, 2)).sum((0, 2, 3)).tolist() == [0, 4, 4, 4, 0, 0]


def test_convolutions_start_as_in_he_et_al():
    weight = case("resnet18").get_parameter("body.stage4.1.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(("name", "dim"), [("resnet8", 16), ("resnet20", 16), ("resnet32", 16), ("resnet18", 32)])
def test_width(name, dim):
    network = build(name, (1, 8, 8), 10, width=4)
    assert network.dim == dim
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@every
def test_smallest_image(name):
    model = name.partition(" x")[0]
    side = MODELS[model].smallest
    network = make(name, (1, side, side + 1), 2)
    assert network(torch.zeros(2, 1, side, side + 1)).shape == (2, 2)
    with pytest.raises(ValueError, match=f"{model}.* at least {side}x{side}, not {side + 1}x{side - 1}"):
        make(name, (1, side + 1, side - 1), 2)


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match=r"'resnt32'; did you mean 'resnet32'.*cnn_small.*mobilenet_v3_small"):
        build("resnt32", (3, 32, 32), 10)
    with pytest.raises(ValueError, match="'cnn_small' takes no width; those that do: cnn_ecl, resnet8"):
        build("cnn_small", (1, 28, 28), 10, width=8)
    with pytest.raises(ValueError, match="'cnn_mupfl' takes no experts; those that do: cnn_small, cnn_ecl, resnet8"):
        build("cnn_mupfl", (1, 28, 28), 10, experts=2)
    with pytest.raises(ValueError, match=r"experts .* must be 1 to 100, not 0"):
        build("resnet32", (3, 32, 32), 10, experts=0)
    with pytest.raises(ValueError, match=r"width .* must be 1 to 256, not 1000000000"):
        build("resnet8", (3, 32, 32), 10, width=10**9)


def test_default_models_exist():
    usual = {"fashion_mnist": "cnn_ecl", "cifar10": "resnet8", "cifar100": "resnet32", "tiny_imagenet": "resnet32"}
    assert {name: default_model(name) for name in usual} == usual
    assert default_model("digits") == default_model("something else") == "cnn_small"
    assert set(usual.values()) < set(MODELS)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torchvision_works_in_a_fresh_process():
    run("""
        import sys
        import torch
        from orchestrator.models import torchvision
        assert "torchvision" not in sys.modules, "importing the models must stay cheap"
        tv = torchvision()
        assert torchvision() is tv is sys.modules["torchvision"]
        from torchvision import datasets
        from torchvision.transforms import v2
        assert v2.RandomCrop(32, padding=4)(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 3, 32, 32)
        assert len(datasets.FakeData(4)) == 4 and datasets.CIFAR10
        with torch.device("meta"):
            assert sum(p.numel() for p in tv.models.resnet50().parameters()) == 25_557_032
    """)


def test_a_torchvision_that_fails_otherwise_is_not_touched():
    run("""
        import importlib.abc, sys
        from orchestrator.models import vision

        class Broken(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name == "torchvision":
                    raise RuntimeError("operator torchvision::something does not exist")

        sys.meta_path.insert(0, Broken())
        try:
            vision.torchvision()
        except RuntimeError as error:
            assert "something" in str(error)
        else:
            raise AssertionError
        assert vision._schemas is None
    """)


@every
def test_no_convolution_of_one_pixel_strides(name):
    """Where its channels come last, the gradient of one that does is written out of bounds (torch 2.13 on the CPU)."""
    convolutions = [m for m in case(name).modules() if isinstance(m, nn.Conv2d)]
    assert all(m.stride == (1, 1) for m in convolutions if m.kernel_size == (1, 1))


@pytest.mark.parametrize("name", ["cnn_small", "cnn_ecl", "cnn_mupfl"])
def test_pooling_before_rectifying_gives_the_same_bits(name):
    network = build(name, (1, 28, 28), 10, seed=0)
    x, y = torch.randn(32, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 10

    def gradients():
        loss = nn.functional.cross_entropy(network(x), y)
        return torch.cat([loss[None], *(g.flatten() for g in torch.autograd.grad(loss, list(network.parameters())))])

    swapped, seen = gradients(), []
    watched = [network.get_submodule(name) for name in network.activations]
    hooks = [layer.register_forward_hook(lambda _, __, output: seen.append(output.shape[2:])) for layer in watched]
    assert torch.equal(gradients(), swapped)
    assert seen[0] == (28, 28) if name != "cnn_mupfl" else (24, 24), "who watches sees the map before it is pooled"
    for hook in hooks:
        hook.remove()
