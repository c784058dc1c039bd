"""Labels of pixels: how they are read, divided, learned, counted and shown."""

import csv
import json
import math
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
import torch.nn.functional as F
from conftest import VOID, driver, finish, pixels, scenes, tiny
from mlflow.tracking import MlflowClient
from PIL import Image
from pydantic import ValidationError
from test_every_algorithm import QUICK, assert_finite
from torch.utils._python_dispatch import TorchDispatchMode

import algorithms
from algorithms import federated_features as ff
from algorithms.params import Params
from orchestrator import models, segmentation
from orchestrator.actors import Pool
from orchestrator.augment import flip
from orchestrator.data import DataError, ImageFiles, Split, describe, load, outline, split
from orchestrator.data.maps import CAMVID, CITYSCAPES, SIZE
from orchestrator.data.sources import SOURCES
from orchestrator.driver import Driver, InProcess, split_for
from orchestrator.evaluate import known_metrics
from orchestrator.experiment import Experiment, problems
from orchestrator.models.pixels import enlarge
from orchestrator.pictures.run import pictures
from orchestrator.preflight import check_metric
from orchestrator.runs import read_run
from orchestrator.saved import load as load_model
from orchestrator.saved import save
from orchestrator.scoring import examples_of
from orchestrator.space import trials
from orchestrator.sweep_file import dump_sweep, filled_in, read
from orchestrator.worker import Worker
from orchestrator.yaml_file import InputError

ABLE = [name for name in algorithms.names() if not algorithms.find(name).per_image]
UNABLE = [name for name in algorithms.names() if algorithms.find(name).per_image]


def somebody(dataset=None, id=0, **changes):
    """Return a client that has pixels, and the initial model."""
    run = driver(pixels(**changes), dataset=dataset or scenes())
    return run.engine.worker.client(id, 0, {}, run.server.model, 5, lr=0.05), run.server.model


# Data ----------------------------------------------------------------------------------------------------------------


def write(path, **changes):
    """Write an .npz of pictures of 4 x 6 pixels in three classes; 7 is void besides 255."""
    rng = np.random.default_rng(0)
    y_train, y_test = rng.integers(0, 3, (5, 4, 6)).astype(np.uint8), rng.integers(0, 3, (2, 4, 6)).astype(np.uint8)
    y_train[0, 0, 0], y_train[0, 0, 1] = 7, VOID
    x = {f"x_{kind}": rng.integers(0, 256, (n, 4, 6, 3)).astype(np.uint8) for kind, n in (("train", 5), ("test", 2))}
    arrays = {**x, "y_train": y_train, "y_test": y_test, "void": np.array(7), **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def test_an_npz_whose_labels_are_maps_is_one_of_pixels(tmp_path):
    stored = write(tmp_path / "own.npz", names=np.array(["sky", "road", "car", "nothing"]))
    data = load("own.npz", tmp_path)
    assert data.segmented
    assert (data.classes, data.outputs, data.names) == (3, 4, ("sky", "road", "car"))
    assert data.shape == (3, 4, 6)
    assert data.y_train.dtype == np.uint8
    assert data.y_train[0, 0, :2].tolist() == [VOID, VOID]
    rest = np.ones((5, 4, 6), bool)
    rest[0, 0, :2] = False
    assert np.array_equal(data.y_train[rest], stored["y_train"][rest])
    assert np.array_equal(data.x_test, stored["x_test"].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"y_test": np.zeros((2, 4, 5), np.uint8)}, r"y_test must be whole numbers of shape \(2, 4, 6\)"),
        ({"y_train": np.zeros((5, 4, 6))}, "y_train must be whole numbers"),
        ({"y_train": np.full((5, 4, 6), 300)}, "use 0 to 254, and 255 for void"),
        ({"void": None}, r"every class from 0 up, not \[0, 1, 2, 7\]"),
        ({"void": np.array([7, 8])}, "void must be one whole number"),
        ({"y_test": np.full((2, 4, 6), 5)}, r"labels that y_train has not: \[5\]"),
        ({"y_train": np.full((5, 4, 6), VOID)}, "every class from 0 up"),
    ],
)
def test_wrong_maps_say_what_is_wrong(tmp_path, changes, complaint):
    write(tmp_path / "own.npz", **changes)
    with pytest.raises(DataError, match=complaint):
        load("own.npz", tmp_path)


def test_camvid_is_found_by_name_and_its_twelfth_label_is_void(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for kind, n in (("train", 367), ("test", 233)):
        arrays[f"x_{kind}"] = np.zeros((n, 4, 6, 3), np.uint8)
        arrays[f"y_{kind}"] = rng.integers(0, 12, (n, 4, 6)).astype(np.uint8)
    np.savez(tmp_path / "camvid_90x120.npz", **arrays)
    data = load("camvid", tmp_path)
    assert (data.classes, data.names, data.augment) == (11, CAMVID, "flip")
    assert np.array_equal(data.y_train == VOID, arrays["y_train"] == 11)
    with pytest.raises(
        DataError, match=r"camvid_90x120\.npz .* name the directory that holds it by the data root"
    ) as told:
        load("camvid", tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") in str(told.value)


def city(root, kind, name, ids, labels=True):
    """Write one image of Cityscapes and its labels, in the published layout."""
    for what, image, suffix in (
        ("leftImg8bit", np.stack([ids * 7] * 3, axis=2).astype(np.uint8), "leftImg8bit"),
        ("gtFine", ids.astype(np.uint8), "gtFine_labelIds"),
    )[: 1 + labels]:
        path = root / what / kind / name.split("_")[0] / f"{name}_{suffix}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Let a few images pass for Cityscapes, and keep what is decoded of them among what the test leaves."""
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, "cityscapes", replace(SOURCES["cityscapes"], sizes=None))


def test_cityscapes_is_read_in_its_published_layout(tmp_path, few):
    ids = np.repeat(np.repeat(np.array([[0, 7, 8, 33], [11, 23, 30, 26]]), 16, 0), 16, 1)
    for kind, name in (
        ("train", "aachen_000000_000019"),
        ("train", "ulm_000001_000019"),
        ("val", "munster_000002_000019"),
    ):
        city(tmp_path / "cityscapes", kind, name, ids)
    data = load("cityscapes", tmp_path)
    assert data.segmented
    assert (data.classes, data.names, data.shape) == (19, tuple(CITYSCAPES.values()), (3, *SIZE))
    planned = outline("cityscapes")
    assert (planned.classes, planned.shape, planned.outputs) == (data.classes, data.shape, data.outputs)
    assert (planned.mean, planned.std, planned.augment) == (data.mean, data.std, data.augment)
    assert (len(data.x_train), len(data.x_test)) == (2, 1)
    cells = data.y_test[0, SIZE[0] // 4 :: SIZE[0] // 2, SIZE[1] // 8 :: SIZE[1] // 4]
    assert cells.tolist() == [[VOID, 0, 1, 18], [2, 10, VOID, 13]]
    assert data.x_test[[0]][0, :, SIZE[0] // 4, 3 * SIZE[1] // 8].tolist() == [49, 49, 49]


def test_images_of_cityscapes_stay_in_their_files_and_are_decoded_once(tmp_path, monkeypatch, few):
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    ids = np.repeat(np.repeat(np.array([[7, 8, 33, 26]]), 32, 0), 16, 1)
    for kind in ("train", "val"):
        city(tmp_path, kind, "aachen_000000_000019", ids)
    data = load("cityscapes", tmp_path)
    assert isinstance(data.x_train, ImageFiles)
    first = data.x_train[[0]]
    assert len(list((tmp_path / "cache").iterdir())) == 2  # pictures, and labels
    monkeypatch.setattr("orchestrator.data.files.decode", None)  # nothing is decoded any more
    again = load("cityscapes", tmp_path)
    assert np.array_equal(again.y_train, data.y_train)
    assert np.array_equal(again.x_train[[0]], first)
    assert again.digest == data.digest


def test_a_map_of_labels_that_is_a_picture_is_refused(tmp_path):
    for kind in ("train", "val"):
        city(tmp_path, kind, "aachen_000000_000019", np.full((32, 64), 7))
    (wrong,) = (tmp_path / "gtFine/val").glob("*/*.png")
    Image.new("RGB", (64, 32)).save(wrong)
    with pytest.raises(DataError, match="must have one byte a pixel, not the mode RGB"):
        load("cityscapes", tmp_path)


@pytest.mark.parametrize("algorithm", ["fedavg", "mupfl"])
def test_clients_learn_from_images_of_pixels_in_files(tmp_path, monkeypatch, few, algorithm):
    monkeypatch.setenv("ORCHESTRATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("orchestrator.data.maps.SIZE", (16, 32))
    draw = np.random.default_rng(0)
    for kind, count in (("train", 8), ("val", 2)):
        for i in range(count):
            ids = np.repeat(np.repeat(draw.choice([7, 8, 26], (4, 8)), 8, 0), 8, 1)
            city(tmp_path, kind, f"ulm_{i:06}_000019", ids)
    data = load("cityscapes", tmp_path)
    held = replace(data, x_train=data.x_train[np.arange(8)], x_test=data.x_test[np.arange(2)])
    part = {"name": "scenes.npz", "clients": 2, "partition": "foreground", "classes_per_client": 2, "imbalance": 1}
    chosen = experiment(algorithm, data=part, clients_per_round=2, local={"batch": 2, "lr": 0.01, "augment": "flip"})
    found = [finish(driver(chosen, tmp_path / str(i), of)) for i, of in enumerate((data, held))]
    assert found[0].fingerprint() == found[1].fingerprint()  # where pixels lie makes no difference


# Partition -----------------------------------------------------------------------------------------------------------


def divided(**options):
    return split(scenes(), **{"clients": 4, "partition": "foreground", "imbalance": 8.0} | options)


def test_images_are_divided_into_parts_that_shrink_exponentially():
    parts = divided()
    # 22 images by 1, 1/2, 1/4, 1/8 of 15/8: edges at 11.7, 17.6, 20.5, 22, rounded.
    assert [len(rows) for rows in parts.train] == [12, 6, 3, 1]
    assert sorted(np.concatenate(parts.train).tolist()) == list(range(22))
    assert all(np.array_equal(rows, np.sort(rows)) for rows in parts.train)
    assert all(np.array_equal(rows, np.arange(7)) for rows in parts.test)
    assert [len(rows) for rows in divided(imbalance=1.0, clients=2).train] == [11, 11]
    assert divided(seed=1).digest != parts.digest == divided().digest


def test_what_a_client_does_not_know_is_background():
    parts, data = divided(classes_per_client=2, clients=6, imbalance=1.0), scenes()
    assert parts.foreground.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2]]
    assert parts.relabelling(3)[:4].tolist() == [0, 4, 4, 3]
    assert parts.relabelling(3)[VOID] == VOID
    for k, rows in enumerate(parts.train):
        y = data.y_train[rows]
        known = [int((y == c).sum()) if c in parts.foreground[k] else 0 for c in range(4)]
        assert parts.counts[k].tolist() == [*known, int((y != VOID).sum()) - sum(known)]
    client, _ = somebody(data={"name": "scenes.npz", "clients": 6, "partition": "foreground", "imbalance": 1}, id=2)
    y = data.y_train[client.rows]
    assert np.array_equal(client.y.numpy(), np.where(y == VOID, VOID, np.where(y == 2, 2, 4)))
    assert client.n == len(y)
    assert client.owned.tolist() == [2, 4]


def test_a_split_of_pixels_is_written_and_read(tmp_path):
    parts = divided(validation=0.25)
    assert [len(rows) for rows in parts.validation] == [3, 1, 0, 0]
    parts.save(tmp_path / "split.npz")
    again = Split.read(tmp_path / "split.npz")
    assert again.digest == parts.digest
    assert np.array_equal(again.foreground, parts.foreground)
    about = describe(scenes(), parts)
    assert (about["train"], about["validation"]) == (18, 4)
    assert about["client_sizes"]["max"] == 9
    assert about["foreground"] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"partition": "per_class"}, "a label for every pixel, so that an image has many classes"),
        ({"classes_per_client": 5}, "classes_per_client must be 1 to 4"),
        ({"clients": 23}, "22 images cannot be divided among 23 clients"),
        ({"imbalance": 0.5}, "imbalance must be"),
        ({"validation": 1.0}, "validation must be"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, complaint):
    with pytest.raises(DataError, match=complaint):
        divided(**options)


def test_foreground_is_of_pixels_only():
    with pytest.raises(DataError, match="digits has one label an image"):
        split(load("digits"), clients=4, partition="foreground")


# Networks ------------------------------------------------------------------------------------------------------------

NETWORKS = [("cnn_pixels", (3, 13, 18)), ("cnn_pixels", (1, 12, 16)), ("lraspp_mobilenet_v3_small", (3, 45, 70))]


@pytest.mark.parametrize(("name", "shape"), NETWORKS)
def test_networks_give_logits_of_every_pixel(name, shape):
    network = models.build(name, shape, 5).eval()
    x = torch.randn(2, *shape)
    with torch.no_grad():
        maps = network.body(x)
        assert maps.shape[:2] == (2, network.dim)
        assert network(x).shape == (2, 5, *shape[1:])
        vectors = maps.flatten(2).mT.reshape(-1, network.dim)
        at_cells = network.head(vectors).view(2, -1, 5).mT.reshape(2, 5, *maps.shape[2:])
        assert torch.allclose(enlarge(at_cells, shape[1:]), network(x), atol=1e-5)
        stem, stage = network.halves()
        assert torch.equal(stage(stem(x)), maps)
    assert {name for name, _ in network.head.named_parameters()} == {"weight", "bias"}
    assert network.head.weight.shape == (5, network.dim)
    assert len(network.activations) >= 3
    ones = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1)]
    assert all(m.stride == (1, 1) for m in ones), "torch's gradient of others is written out of bounds (test_models)"


@pytest.mark.parametrize("name", ["cnn_pixels", "lraspp_mobilenet_v3_small"])
def test_smallest_image_with_labels_of_pixels(name):
    side = models.MODELS[name].smallest
    network = models.build(name, (3, side, side + 1), 2)
    assert network(torch.zeros(2, 3, side, side + 1)).shape == (2, 2, side, side + 1)
    with pytest.raises(ValueError, match=f"{name}.* at least {side}x{side}, not {side + 1}x{side - 1}"):
        models.build(name, (3, side + 1, side - 1), 2)


@pytest.mark.parametrize(("have", "want"), [((5, 7), (13, 29)), ((1, 3), (4, 3)), ((4, 4), (4, 4))])
def test_maps_are_enlarged_as_torch_does(have, want):
    h = torch.randn(2, 3, *have)
    assert torch.allclose(enlarge(h, want), F.interpolate(h, want, mode="bilinear"), atol=1e-5)


def test_lraspp_is_torchvisions_with_its_two_classifiers_as_one():
    network = models.build("lraspp_mobilenet_v3_small", (3, 64, 96), 5).eval()
    theirs = models.torchvision().models.segmentation.lraspp.LRASPPHead(24, 576, 5, 128).eval()
    top = network.body.top
    theirs.cbr.load_state_dict(top.high.state_dict() | {"1.num_batches_tracked": torch.tensor(0)})
    theirs.scale.load_state_dict(top.gate.state_dict())
    low, high = network.head.weight.detach().split([24, 128], dim=1)
    with torch.no_grad():
        theirs.low_classifier.weight.copy_(low[:, :, None, None])
        theirs.high_classifier.weight.copy_(high[:, :, None, None])
        theirs.low_classifier.bias.copy_(network.head.bias)
        theirs.high_classifier.bias.zero_()
        x = torch.randn(2, 3, 64, 96)
        maps = network.body[:3](x)
        expected = theirs({"low": maps, "high": top.layers(maps)})
        expected = F.interpolate(expected, (64, 96), mode="bilinear")
        assert maps.shape[2:] == (8, 12)
        assert top.layers(maps).shape == (2, 576, 4, 6)
        assert torch.allclose(network(x), expected, atol=1e-5)


# Learning ------------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_pixels_which_have_a_label():
    client, _ = somebody()
    logits = torch.randn(2, 5, 2, 3, requires_grad=True)
    y = torch.tensor([[[0, 1, VOID], [4, VOID, 2]], [[VOID, VOID, VOID], [3, 3, 0]]], dtype=torch.uint8)
    by_hand = [
        -torch.log_softmax(logits[b, :, i, j], 0)[y[b, i, j].long()]
        for b in range(2) for i in range(2) for j in range(3) if y[b, i, j] != VOID
    ]  # fmt: skip
    assert len(by_hand) == 7
    assert torch.allclose(client.loss(logits, y), torch.stack(by_hand).mean())


@pytest.mark.parametrize(
    "loss",
    ["ce", "focal", "fedlc", {"name": "balanced_softmax", "prior": "local"}, {"name": "lade", "prior": "global"}],
)
def test_a_batch_of_void_teaches_nothing(loss):
    named = loss if isinstance(loss, dict) else {"name": loss, "prior": "none"}
    client, _ = somebody(local={"loss": named["name"], "prior": named["prior"]})
    logits = torch.randn(2, 5, 2, 3, requires_grad=True)
    nothing = client.loss(logits, torch.full((2, 2, 3), VOID, dtype=torch.uint8))
    (slope,) = torch.autograd.grad(nothing, logits)
    assert nothing == 0
    assert not slope.any()
    some = client.loss(logits, torch.tensor([[[0, 1, VOID]] * 2] * 2, dtype=torch.uint8))
    assert 0 < some < math.inf


def test_labels_are_mirrored_with_their_pixels():
    client, _ = somebody()
    seen = set()
    for x, y in client.batches(3):
        assert (x.shape[2:], y.dtype) == (y.shape[1:], torch.uint8)
        for image, labels in zip(x, y, strict=True):
            same = (client.x == image).flatten(1).all(1) & (client.y == labels).flatten(1).all(1)
            turned = (client.x == image.flip(2)).flatten(1).all(1) & (client.y == labels.flip(1)).flatten(1).all(1)
            assert same.any() or turned.any()
            seen.add(bool(turned.any()))
    assert seen == {True, False}
    x = torch.arange(24.0).view(4, 1, 2, 3)
    rng = torch.Generator().manual_seed(0)
    turned = torch.randint(2, (4, 1, 1, 1), generator=torch.Generator().manual_seed(0), dtype=torch.bool).flatten()
    for before, after, is_turned in zip(x, flip(x, rng, (2, 3), torch.zeros(1)), turned, strict=True):
        assert torch.equal(after, before.flip(2) if is_turned else before)


@pytest.mark.parametrize("model", [{"name": "cnn_pixels", "width": 4}, "lraspp_mobilenet_v3_small"])
def test_class_gradients_of_cells_are_those_of_backpropagation(model):
    size = (12, 16) if isinstance(model, dict) else (40, 56)
    client, w = somebody(scenes(*size), model=model)
    z = ff.class_gradients(client, w, batch=10**6, repeats=2)  # all cells of a class
    maps = client.features(w, client.x).detach()
    height, width = maps.shape[2:]
    # The label of a cell is that of the pixel in its middle.
    down, across = (
        [int((i + 0.5) * side / n) for i in range(n)] for n, side in zip((height, width), size, strict=True)
    )
    y = client.y[:, down][:, :, across]
    assert torch.equal(client.labels, y.flatten())
    vectors = maps.flatten(2).mT.reshape(-1, maps.shape[1])
    picked = torch.tensor([5, 0, len(vectors) - 1, 5])
    assert torch.allclose(client.vectors(w, picked), vectors[picked], atol=1e-5)
    assert set(z) == set(y.unique().tolist()) - {VOID}
    for k in z:
        head = {name: t.detach().clone().requires_grad_() for name, t in w.head.items()}
        h = vectors[y.flatten() == k]
        loss = F.cross_entropy(client.classify(head, h), torch.full((len(h),), k))
        weight, bias = torch.autograd.grad(loss, list(head.values()))
        torch.testing.assert_close(z[k], torch.cat([weight, bias[:, None]], 1), rtol=1e-4, atol=1e-5)


def test_bavd_sees_the_maps_of_every_block():
    client, w = somebody()
    maps = ff.ActivationMaps({}, "text", "chw", "mean", 0.5)
    client.fit(maps.objective, w=w)
    assert {layer: tuple(M.shape) for layer, M in maps.M.items()} == {
        "body.relu1": (4, 6, 8), "body.relu2": (8, 3, 4), "body.relu3": (16, 3, 4),
    }  # fmt: skip


@pytest.mark.parametrize("model", [{"name": "cnn_pixels", "width": 4}, "lraspp_mobilenet_v3_small"])
def test_bavd_drops_what_is_low_and_nothing_high(model):
    """The mean of a map in [0, 1] is at most 1, so that no activation above is lost, nor one far below zero."""
    client, w = somebody(scenes(40, 56), model=model)
    bavd, layers = ff.ActivationMaps({}, "text", "chw", "value", 0.5), []

    def tap(layer, h):
        kept = bavd.drop(layer, h)
        lost = h[kept != h]
        assert (lost > 0).any(), layer
        assert lost.abs().max() <= 1, layer
        assert torch.equal(kept[h >= 1], h[h >= 1])
        layers.append(layer)
        return kept

    client.logits(Params(w.layout, w.flat.requires_grad_(), w.buffers), client.x[:4], tap=tap)
    assert len(layers) == (3 if isinstance(model, dict) else 11)


def largest(make):
    """Return the bytes of the largest tensor that is made on the way."""

    class Watch(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            self.most = max(self.most, made.nbytes if isinstance(made, torch.Tensor) else 0)
            return made

    with Watch() as watch:
        make()
    return watch.most


def test_labels_are_relabelled_in_blocks():
    data = {"name": "scenes.npz", "clients": 1, "partition": "foreground"}
    client, _ = somebody(data=data, clients_per_round=1)
    client.worker.block = 4
    assert largest(lambda: client.y) == client.n * 12 * 16  # a byte a pixel
    known = client.worker.split.relabelling(0)[client.worker.y_train[client.rows].numpy()]
    assert np.array_equal(client.y.numpy(), known)
    assert client.y.dtype == torch.uint8


# Metrics -------------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    # Three classes, of which the third is not in the truth.
    counts = np.array([[6, 2, 0], [1, 3, 4], [0, 0, 0]])
    found = segmentation.Confusion(counts)
    assert found.iou[:2].tolist() == pytest.approx([6 / 9, 3 / 10])
    assert found.recall[:2].tolist() == pytest.approx([6 / 8, 3 / 8])
    assert math.isnan(found.iou[2])
    assert math.isnan(found.recall[2])
    assert found.metrics() == pytest.approx({"miou": (6 / 9 + 3 / 10) / 2, "macc": (6 / 8 + 3 / 8) / 2, "acc": 9 / 16})
    assert all(map(math.isnan, segmentation.Confusion(np.zeros((2, 2), int)).metrics().values()))


def test_pixels_are_counted_by_truth_and_prediction():
    truth = torch.tensor([[0, 1, VOID, 1]], dtype=torch.uint8)
    found = segmentation.table(truth, torch.tensor([[2, 1, 0, 0]]), 2)
    assert found.tolist() == [[0, 0, 1], [1, 1, 0]]


def test_scores_relabel_the_truth_for_each_client():
    data = scenes()
    parts = divided(classes_per_client=1, clients=2, imbalance=1.0)
    counts = np.arange(20).reshape(4, 5)
    personal = np.stack([np.stack([counts, np.zeros_like(counts)])] * 2)
    scores = segmentation.Scores(parts, data.y_test, counts[:, :4], personal)
    metrics = scores.metrics()
    # Client 0 knows class 0: what is truly 1, 2 or 3 is background, class 4.
    knows, rest = counts[0], counts[1:].sum(0)
    of_0 = knows[0] / (knows.sum() + rest[0]), rest[4] / (rest.sum() + knows[4])
    other, rest = counts[1], counts[[0, 2, 3]].sum(0)
    of_1 = other[1] / (other.sum() + rest[1]), rest[4] / (rest.sum() + other[4])
    assert metrics["personal/miou"] == pytest.approx((np.mean(of_0) + np.mean(of_1)) / 2)
    assert metrics["personal/miou_worst10"] == pytest.approx(min(np.mean(of_0), np.mean(of_1)))
    assert metrics["generic/acc"] == pytest.approx(np.trace(counts[:, :4]) / counts[:, :4].sum())
    assert not [name for name in metrics if name.startswith("validation/")]
    assert set(metrics) < set(known_metrics("segmentation")) < set(known_metrics())
    rows = scores.per_class()
    assert [row["clients"] for row in rows] == [1, 1, 0, 0, 2]
    assert rows[0]["personal_iou"] == pytest.approx(of_0[0])
    assert rows[2]["personal_iou"] is None
    assert rows[4]["personal_iou"] == pytest.approx((of_0[1] + of_1[1]) / 2)
    assert rows[4]["generic_iou"] is None
    assert [row["test"] for row in rows[:4]] == [int((data.y_test == c).sum()) for c in range(4)]
    assert [row["train"] for row in scores.per_client()] == [11, 11]


def test_test_pixels_are_counted_in_little_memory():
    parts = divided(clients=2)
    y = np.random.default_rng(0).choice(np.array([0, 1, 3, VOID], np.uint8), (64, 128, 128))
    tracemalloc.start()
    scores = segmentation.Scores(parts, y, np.ones((4, 4), np.int64))
    rows = scores.per_class()
    scores.metrics()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row["test"] for row in rows] == [*((y == c).sum() for c in range(4)), None]
    assert most < y.nbytes


def test_scores_are_those_of_a_plain_loop():
    """Predict image by image, relabel and compare pixel by pixel."""
    chosen = pixels(algorithm={"finetune": {"epochs": 1}}, data={
        "name": "scenes.npz", "clients": 3, "partition": "foreground", "imbalance": 2, "validation": 0.3,
    }, clients_per_round=2)  # fmt: skip
    run, data = finish(driver(chosen, dataset=scenes())), scenes()
    found, worker = run.history[-1]["metrics"], run.engine.worker

    def scored(truth, predicted, classes):
        ious = [
            (truth == c)[predicted == c].sum() / ((truth == c) | ((predicted == c) & (truth != VOID))).sum()
            for c in range(classes) if (truth == c).any()
        ]  # fmt: skip
        recalls = [(predicted == c)[truth == c].mean() for c in range(classes) if (truth == c).any()]
        return np.mean(ious), np.mean(recalls), (predicted == truth)[truth != VOID].mean()

    def predictions(w, x, rows, background=True):
        with torch.no_grad():
            logits = torch.cat([worker.logits(w, worker.images(x, [row])) for row in rows])
        return logits[:, : None if background else -1].argmax(1).numpy()

    everything = np.arange(len(data.y_test))
    generic = scored(data.y_test, predictions(run.server.model, worker.x_test, everything, background=False), 4)
    assert [found[f"generic/{m}"] for m in ("miou", "macc", "acc")] == pytest.approx(generic)
    own, held = [], []
    for k in range(3):
        w, table = run.memory[k]["w"], run.split.relabelling(k)
        own.append(scored(table[data.y_test], predictions(w, worker.x_test, everything), 5))
        if len(rows := run.split.validation[k]):
            held.append(scored(table[data.y_train[rows]], predictions(w, worker.x_train, rows), 5))
    assert [found[f"personal/{m}"] for m in ("miou", "macc", "acc")] == pytest.approx(np.mean(own, 0))
    assert [found[f"validation/{m}"] for m in ("miou", "macc", "acc")] == pytest.approx(np.mean(held, 0))


# Every algorithm -----------------------------------------------------------------------------------------------------


def experiment(name, **changes):
    return pixels(algorithm={name: QUICK.get(name, {})}, **changes)


@pytest.fixture(scope="module")
def pools(ray_cluster):
    """Pools of one and two actors, which serve one algorithm after another."""
    made = [Pool(actors, cpu=0.5, gpu=0.0) for actors in (1, 2)]
    yield made, ray.put(scenes())
    for pool in made:
        pool.close()


@pytest.mark.parametrize("name", ABLE)
def test_the_same_bits_on_actors_without_ray_and_resumed(name, pools, tmp_path):
    chosen = experiment(name, failures={"checkpoint_s": 0})
    whole = finish(driver(chosen, tmp_path / "whole", scenes()))
    assert_finite(whole)
    assert {"personal/miou", "personal/macc", "personal/acc", "personal/miou_worst10"} <= set(
        whole.history[-1]["metrics"]
    )
    for stop in range(1, len(whole.plan)):
        broken = driver(chosen, tmp_path / str(stop), scenes())
        for _ in range(stop):
            broken.advance()
        assert finish(driver(chosen, tmp_path / str(stop), scenes())).fingerprint() == whole.fingerprint()
    made, dataset = pools
    parts = split_for(chosen, scenes())
    for pool in made:
        pool.load(chosen, dataset, parts)
        assert finish(Driver(chosen, scenes(), parts, pool)).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedrep", "creff", "mupfl"])
def test_methods_run_on_lraspp(name):
    data = {"name": "scenes.npz", "clients": 3, "partition": "foreground", "imbalance": 1}
    changes = {"data": data, "clients_per_round": 2, "model": "lraspp_mobilenet_v3_small", "rounds": 1}
    run = finish(driver(experiment(name, **changes), dataset=scenes(40, 56)))
    assert_finite(run)


@pytest.mark.parametrize("name", ["fedavg", "mupfl", "creff", "fedrep"])
def test_degenerate_clients_neither_fail_nor_spoil(name):
    """One client has one image, one has only void, one has nothing but background."""
    data = scenes()
    y = data.y_train.copy()
    y[1], y[2] = VOID, np.where(y[2] == VOID, VOID, 1)
    data = replace(data, y_train=y)
    train = (np.array([0]), np.array([1]), np.array([2]), np.arange(3, 22))
    foreground = np.array([[0], [1], [2], [3]])
    nothing = tuple(rows[:0] for rows in train)
    parts = Split(train, nothing, (np.arange(7),) * 4, np.zeros((4, 5), np.int64), foreground=foreground)
    for k, rows in enumerate(train):
        known = parts.relabelling(k)[y[rows]]
        parts.counts[k] = np.bincount(known[known != VOID], minlength=5)
    chosen = experiment(name, clients_per_round=3)
    run = finish(Driver(chosen, data, parts, InProcess(Worker(chosen, data, parts))))
    assert run.selectable == [0, 2, 3]
    assert_finite(run)


@pytest.mark.parametrize("name", UNABLE)
def test_a_method_that_makes_no_sense_is_refused_with_the_reason(name):
    tree = pixels().model_dump(mode="json") | {"algorithm": name}
    found = [each.text for each in problems(tree)]
    assert any(algorithms.find(name).per_image in text for text in found), found


def test_learning_learns():
    """A few rounds find sky and ground, which have colours of their own."""
    data = {"name": "scenes.npz", "clients": 2, "partition": "foreground", "imbalance": 1, "classes_per_client": 4}
    local = {"lr": 0.1, "batch": 4, "epochs": 6}
    run = finish(driver(pixels(data=data, local=local, clients_per_round=2, rounds=6), dataset=scenes()))
    last = run.history[-1]["metrics"]
    assert last["generic/acc"] > 0.8
    assert last["generic/miou"] == pytest.approx(last["personal/miou"])  # everybody knows all: nothing is background


# Experiments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"task": "classification"}, "data.partition 'foreground' is of labels of pixels"),
        ({"data": {"name": "digits"}, "task": "segmentation"}, "which is not what segmentation learns"),
        ({"data": {"name": "camvid"}, "task": "classification", "model": None}, "'camvid' has a label for every pixel"),
        (
            {"data": {"name": "own.npz"}, "task": "segmentation"},
            "data.partition 'per_class' goes by the label of an image",
        ),
        (
            {"data": {"name": "camvid", "test_alloc": "ceil_owned"}},
            "data.test_alloc 'ceil_owned' is of labels of images",
        ),
        (
            {"data": {"name": "digits", "classes_per_client": 2}, "task": None, "model": None},
            "is of partition foreground",
        ),
        ({"model": "resnet8"}, "'resnet8' is a network for classification; those for segmentation: cnn_pixels"),
        (
            {"data": {"name": "digits"}, "task": None},
            "'cnn_pixels' is a network for segmentation; those for classification",
        ),
        ({"local": {"loss": "ldam", "prior": "local"}}, "loss 'ldam' needs a cosine classifier"),
        ({"local": {"loss": "balanced_softmax", "prior": "gpi"}}, "prior 'gpi' does not do segmentation"),
        ({"local": {"augment": "crop_flip"}}, "for segmentation choose flip or none"),
    ],
)
def test_what_does_not_fit_is_refused(changes, complaint):
    found = [each.text for each in problems(pixels().model_dump(mode="json") | changes)]
    assert any(complaint in text for text in found), found


def test_the_data_set_says_what_is_usual():
    camvid, own = (Experiment.model_validate({"data": {"name": name}}) for name in ("camvid", "digits"))
    assert (camvid.task, camvid.data.partition, camvid.model.name) == ("segmentation", "foreground", "cnn_pixels")
    assert (own.task, own.data.partition, own.model.name) == ("classification", "per_class", "cnn_small")
    assert Experiment.model_validate({"data": {"name": "cityscapes"}}).model.name == "lraspp_mobilenet_v3_small"
    with pytest.raises(ValidationError, match="foreground"):
        tiny(data={"name": "digits", "partition": "foreground"})


def test_a_sweep_of_segmentation_ranks_by_iou():
    sweep = read(text="experiment: {data: {name: camvid}, seed: !grid [0, 1]}")
    assert sweep.search.metric == "personal/miou"
    again = read(text=dump_sweep(filled_in(sweep)))
    assert [t.experiment for t in trials(again)] == [t.experiment for t in trials(sweep)]
    assert read(text="data: {name: digits}").search.metric == "personal/acc_dist"
    check_metric("generic/miou", trials(sweep))
    with pytest.raises(InputError, match="personal/acc_owned is not reported by segmentation"):
        check_metric("personal/acc_owned", trials(sweep))
    with pytest.raises(InputError, match="personal/miou is not reported by classification"):
        check_metric("personal/miou", trials(read(text="data: {name: digits}")))


# What is left of a run -----------------------------------------------------------------------------------------------


def test_saved_models_predict_pixels_as_reported(tmp_path):
    run = finish(driver(pixels(algorithm={"finetune": {"epochs": 1}}), tmp_path / "run", scenes()))
    save(run, tmp_path / "models")
    data = scenes()
    generic = load_model(tmp_path / "models" / "generic").predict(data.x_test)
    assert generic.shape == (7, 5, 12, 16)
    right = (generic[:, :4].argmax(1) == data.y_test)[data.y_test != VOID].mean()
    assert right == pytest.approx(run.history[-1]["metrics"]["generic/acc"])
    mine = load_model(tmp_path / "models" / "client-0").predict(data.x_test).argmax(1)
    truth = run.split.relabelling(0)[data.y_test]
    (table,) = (tmp_path / "run").glob("artifacts/2-finetune.tune/per_client.csv")
    row = next(csv.DictReader(table.open()))
    assert (mine == truth)[truth != VOID].mean() == pytest.approx(float(row["acc"]))
    assert load_model(tmp_path / "models" / "generic").predict(data.x_test[:0]).shape == (0, 5, 12, 16)


def test_images_that_cannot_be_read_are_not_shown_and_end_no_run(tmp_path, monkeypatch, few):
    monkeypatch.setenv("ORCHESTRATOR_CACHE_GB", "0")
    monkeypatch.setattr("orchestrator.data.maps.SIZE", (16, 32))
    for i, kind in enumerate(["train"] * 4 + ["val"] * 2):
        city(tmp_path, kind, f"ulm_{i:06}_000019", np.repeat(np.repeat(np.array([[7, 8], [8, 26]]), 16, 0), 32, 1))
    part = {"name": "scenes.npz", "clients": 2, "partition": "foreground", "imbalance": 1}
    run = finish(driver(pixels(data=part, clients_per_round=2), dataset=load("cityscapes", tmp_path)))
    assert set(examples_of(run)) >= {"images", "truth", "generic", "known"}
    for path in (tmp_path / "leftImg8bit" / "val").glob("*/*.png"):
        path.write_bytes(b"no picture")
    assert examples_of(run) == {}


def test_pictures_show_what_a_run_has(tmp_path):
    run = finish(driver(pixels(algorithm={"local": {}}), tmp_path, scenes()))  # which has no generic model
    run.split.save(tmp_path / "artifacts" / "split.npz")
    (tmp_path / "experiment.yaml").write_text("task: segmentation\n")
    drawn = {picture.name: picture for picture in pictures(read_run(tmp_path))}
    assert set(drawn) == {"segments", "rounds", "classes", "clients", "labels", "long_tail"}
    titles = [axes.get_title(loc="center") for axes in drawn["segments"].figure.axes if axes.get_title(loc="center")]
    assert titles == [
        "image",
        "truth",
        "truth of client 0",
        "model of client 0",
        "truth of client 2",
        "model of client 2",
    ]
    assert drawn["classes"].figure.axes[0].get_ylabel() == "IoU (%)"
    (tmp_path / "artifacts" / "1-local.train" / "examples.npz").write_bytes(b"no zip")
    damaged = read_run(tmp_path)
    assert "examples.npz is damaged" in damaged.notes
    assert "segments" not in {picture.name for picture in pictures(damaged)}


def test_the_command_segments(tmp_path):
    data = scenes()
    arrays = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "scenes.npz", names=np.array(["sky", "ground", "wall", "thing"]), **arrays)
    (tmp_path / "scenes.yaml").write_text(
        "task: segmentation\n"
        f"data: {{name: scenes.npz, root: {tmp_path}, clients: 4, partition: foreground}}\n"
        f"algorithm: {{mupfl: {json.dumps(QUICK['mupfl'])}}}\n"
        "rounds: 2\nclients_per_round: 2\nlocal: {batch: 4, augment: flip}\n"
    )
    words = [
        sys.executable,
        "-m",
        "orchestrator.tune",
        tmp_path / "scenes.yaml",
        "--out",
        tmp_path / "runs",
        "--num-cpus",
        "2",
    ]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "personal/miou" in done.stdout
    folder = tmp_path / "runs" / "scenes"
    summary = json.loads((folder / "summary.json").read_text())
    (trial,) = summary["trials"]
    assert (summary["metric"], trial["status"]) == ("personal/miou", "FINISHED")
    drawn = {path.stem for path in folder.glob("trials/0000/artifacts/pictures/*.svg")}
    assert drawn >= {"segments", "rounds", "classes", "clients", "labels", "long_tail"}
    assert "thing" in (folder / "trials/0000/artifacts/pictures/segments.svg").read_text()
    assert json.loads((folder / "trials/0000/artifacts/data.json").read_text())["class_names"][3] == "thing"
    assert "IoU of each class" in (folder / "report.html").read_text()
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    logged = client.get_run(trial["run_id"]).data.metrics
    assert logged["personal/miou"] == pytest.approx(trial["last"]["personal/miou"])
