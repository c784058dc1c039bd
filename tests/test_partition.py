"""The long-tailed cut, the partitions and the local tests: reference totals, hand-made cases and laws."""

import json
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.data import VOID, DataError, Dataset, Split, describe, split
from orchestrator.data.partition import PARTITIONS, by_user, grouped_equal, long_tail, per_class, per_class_capped
from orchestrator.data.splits import local_tests

laws = settings(max_examples=40, deadline=None, derandomize=True)


def balanced(classes: int, each: int) -> np.ndarray:
    return np.tile(np.arange(classes), each)


def dataset(classes: int = 10, train: int = 100, test: int = 20) -> Dataset:
    y, t = balanced(classes, train), balanced(classes, test)
    x = [np.zeros((len(labels), 1, 1, 1), np.uint8) for labels in (y, t)]
    return Dataset("made", x[0], y, x[1], t, classes, (0.0,), (1.0,))


def table(y: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    return np.stack([np.bincount(y[rows], minlength=classes) for rows in parts])


# ---- the long-tailed cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "n_max", "imbalance", "total"),
    [
        (10, 5000, 10, 20_431), (10, 5000, 50, 13_996), (10, 5000, 100, 12_406),
        (100, 500, 10, 19_573), (100, 500, 50, 12_608), (100, 500, 100, 10_847),
        (10, 6000, 10, 24_516), (10, 6000, 100, 14_886), (200, 500, 10, 39_072),
    ],
)  # fmt: skip
def test_the_totals_are_the_published_ones(classes, n_max, imbalance, total):
    y = balanced(classes, n_max)
    kept = long_tail(y, classes, imbalance)
    counts = np.bincount(y[kept])
    assert len(kept) == total
    assert counts[0] == n_max
    assert counts[-1] == n_max // imbalance
    assert (np.diff(counts) <= 0).all()
    assert (np.diff(kept) > 0).all()


@laws
@given(base=st.integers(2, 7), steps=st.integers(1, 6), last=st.integers(1, 3))
def test_exact_powers_are_not_rounded_down(base, steps, last):
    # imbalance = base ** steps over steps + 1 classes: every class size is a whole number
    n_max = last * base**steps
    assume(n_max * (steps + 1) <= 200_000)
    y = balanced(steps + 1, n_max)
    counts = np.bincount(y[long_tail(y, steps + 1, base**steps)])
    assert counts.tolist() == [last * base ** (steps - c) for c in range(steps + 1)]


def test_imbalance_one_keeps_everything_even_of_unequal_classes():
    y = np.array([0, 0, 0, 0, 1])
    assert long_tail(y, 2, 1).tolist() == [0, 1, 2, 3, 4]


def test_no_class_dies_out_and_a_small_class_gives_all_it_has():
    y = np.repeat([0, 1, 2], [20, 3, 7])  # n_max = 10; asked for are 10, 10/sqrt(1000) and 10/1000
    assert np.bincount(y[long_tail(y, 3, 1000)]).tolist() == [10, 1, 1]
    y = np.repeat([0, 1, 2], [40, 2, 3])  # n_max = 15; asked for are 15, 10 and 7
    assert np.bincount(y[long_tail(y, 3, 2)]).tolist() == [15, 2, 3]
    assert len(long_tail(np.zeros(8, np.int64), 1, 10)) == 8


def test_the_cut_is_a_random_subset_of_each_class_and_the_same_for_every_seed():
    data = dataset(classes=2, train=1000)
    kept = long_tail(data.y_train, 2, 10)
    tail = kept[data.y_train[kept] == 1]
    assert len(tail) == 100
    assert abs(tail.mean() - 1000) < 200  # of the rows 1, 3, ..., 1999: neither the first nor the last
    for seed in (0, 1):
        made = split(data, clients=3, imbalance=10, seed=seed)
        assert np.array_equal(np.sort(np.concatenate(made.train)), kept)


@pytest.mark.parametrize("imbalance", [0.5, 0, -3, math.nan, math.inf])
def test_an_impossible_imbalance_is_refused(imbalance):
    with pytest.raises(DataError, match="imbalance"):
        long_tail(balanced(2, 5), 2, imbalance)


# ---- the partitions ----------------------------------------------------------------------------------------------

labels = st.lists(st.integers(0, 400), min_size=1, max_size=12).map(
    lambda sizes: np.repeat(np.arange(len(sizes)), sizes)
)


@laws
@given(
    y=labels.filter(lambda y: len(y) > 0),
    clients=st.integers(1, 40),
    alpha=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**63),
    name=st.sampled_from(list(PARTITIONS)),
)
def test_every_sample_goes_to_exactly_one_client_or_the_request_is_refused(y, clients, alpha, seed, name):
    y = np.random.default_rng(0).permutation(y)
    if clients > len(y):
        with pytest.raises(DataError, match=f"among {clients} clients"):
            PARTITIONS[name](y, clients, alpha, seed)
        return
    try:
        parts = PARTITIONS[name](y, clients, alpha, seed)
    except DataError:
        parts = []
    assert parts or name != "per_class"  # only the other two have conditions that a draw may never meet
    if not parts:
        return
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert all((np.diff(rows) > 0).all() for rows in parts)
    again = PARTITIONS[name](y, clients, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    sizes = [len(rows) for rows in parts]
    if name == "per_class_capped":
        assert min(sizes) >= 10
    if name == "grouped_equal":
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_another_seed_gives_another_partition(name):
    y = balanced(10, 200)
    first, second = (PARTITIONS[name](y, 10, 0.5, seed) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_large_alpha_tends_to_equal_shares(name):
    y = balanced(10, 1000)
    counts = table(y, PARTITIONS[name](y, 10, 1e8, 0), 10)
    # grouped_equal: ten clients are one group, so its second cut moves next to nothing
    assert np.abs(counts - 100).max() <= (1 if name != "grouped_equal" else 12)


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_smaller_alpha_makes_clients_differ_more(name):
    y = balanced(10, 500)

    def classes_held(alpha: float) -> float:
        runs = [table(y, PARTITIONS[name](y, 10, alpha, seed), 10) for seed in range(5)]
        share = np.stack(runs) / np.stack(runs).sum(2, keepdims=True).clip(1)
        return float((share**2).sum(2).mean())  # 1 when each client has one class, 1/10 when all alike

    values = [classes_held(alpha) for alpha in (0.1, 1.0, 100.0)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.3
    assert values[2] < 0.12


def test_the_shares_of_a_class_are_dirichlet():
    # Dir(a, ..., a) over K: a share has mean 1/K and variance (K - 1) / (K^2 (K a + 1))
    y, clients, alpha = balanced(500, 1000), 5, 0.5
    share = table(y, per_class(y, clients, alpha), 500) / 1000
    assert np.allclose(share.mean(1), 1 / clients, atol=0.04)
    assert share.var() == pytest.approx((clients - 1) / clients**2 / (clients * alpha + 1), rel=0.05)


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.01])
def test_a_tiny_alpha_gives_a_class_to_one_client(alpha):
    y = balanced(20, 50)
    counts = table(y, per_class(y, 10, alpha), 20)
    assert counts.sum() == 1000
    assert counts.max(0).mean() > 0.85 * 50


def test_a_capped_client_gets_nothing_more():
    # two clients, alpha so small that a class goes to one of them whole: after the first class its owner is full
    y = balanced(2, 100)
    for seed in range(10):
        counts = table(y, per_class_capped(y, 2, 1e-6, seed, min_size=0), 2)
        assert sorted(counts.tolist()) == [[0, 100], [100, 0]]


def test_many_clients_and_any_alpha_are_no_trouble():
    y = np.random.default_rng(0).permutation(balanced(100, 500))
    for alpha in (0.5, 1000):
        for name in PARTITIONS:
            assert sum(len(rows) for rows in PARTITIONS[name](y, 500, alpha, 0)) == 50_000


def test_equal_groups_work_for_numbers_of_clients_that_are_no_tens():
    y = balanced(10, 130)
    for clients in (1, 7, 10, 13, 25):
        sizes = [len(rows) for rows in grouped_equal(y, clients, 1.0)]
        assert sum(sizes) == 1300
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_more_clients_than_samples_is_refused(name):
    with pytest.raises(DataError, match="5 samples cannot be divided among 6 clients"):
        PARTITIONS[name](np.arange(5), 6, 1.0, 0)
    with pytest.raises(DataError, match="among 0 clients"):
        PARTITIONS[name](np.arange(5), 0, 1.0, 0)


@pytest.mark.parametrize("name", list(PARTITIONS))
@pytest.mark.parametrize("alpha", [0, -1.0, math.nan, math.inf])
def test_an_impossible_alpha_is_refused(name, alpha):
    with pytest.raises(DataError, match="alpha must be"):
        PARTITIONS[name](balanced(2, 50), 2, alpha, 0)


def test_a_hopeless_request_ends_and_says_what_to_change():
    with pytest.raises(DataError, match=r"alpha=0\.001 .* 50 clients at least 10 .*larger alpha, fewer clients"):
        per_class_capped(balanced(2, 1000), 50, 0.001)
    with pytest.raises(DataError, match="11 clients at least 10 of 100 samples"):
        per_class_capped(balanced(2, 50), 11, 1.0)


@laws
@given(
    users=st.lists(st.integers(0, 30), min_size=1, max_size=200).map(np.array),
    clients=st.integers(1, 40),
    seed=st.integers(0, 2**63),
)
def test_every_client_gets_whole_users_or_the_request_is_refused(users, clients, seed):
    there = len(np.unique(users))
    if clients > there:
        with pytest.raises(DataError, match=f"{there} users cannot be .* {clients} clients: use 1 to {there} clients"):
            by_user(users, clients, seed)
        return
    parts = by_user(users, clients, seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(users)))
    assert all((np.diff(rows) > 0).all() for rows in parts)
    whose = [set(users[rows].tolist()) for rows in parts]
    assert sum(map(len, whose)) == there, "nobody is at two clients"
    assert max(map(len, whose)) - min(map(len, whose)) <= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, by_user(users, clients, seed), strict=True))


def of_users(train: int = 100) -> Dataset:
    """Ten classes, and users of whom the first has half of all images."""
    data = dataset(train=train)
    users = np.arange(len(data.y_train)) // 12 % 40
    users[: len(users) // 2] = 0
    return replace(data, users=users)


def test_users_are_dealt_at_random_by_the_seed():
    data = of_users()
    made, other = (split(data, clients=8, partition="by_user", seed=seed) for seed in (0, 1))
    assert made.digest != other.digest
    whose = [np.unique(data.users[rows]) for rows in made.train]
    assert [len(users) for users in whose] == [5] * 8
    assert any((np.diff(users) != 1).any() and (np.diff(users) != 8).any() for users in whose), "not in their order"
    assert np.array_equal(made.counts, table(data.y_train, list(made.train), 10))
    assert max(len(rows) for rows in made.train) > 500, "who has many images keeps them all"


def test_users_whose_images_are_all_cut_are_nobody():
    data = replace(dataset(classes=2, train=100), users=np.repeat([7, 5, 3, 1], 50))
    with pytest.raises(DataError, match="4 users cannot be divided among 5 clients"):
        split(data, clients=5, partition="by_user")
    kept = len(np.unique(data.users[long_tail(data.y_train, 2, 100)]))
    made = split(data, clients=kept, partition="by_user", imbalance=100, validation=0.2)
    assert all(len(np.unique(data.users[rows])) == 1 for rows in made.train)
    held = [data.users[[*rows, *out]] for rows, out in zip(made.train, made.validation, strict=True)]
    assert all(len(np.unique(users)) == 1 for users in held)


def test_users_are_ignored_by_the_other_partitions_and_are_part_of_the_data_set():
    data = of_users()
    assert split(data, clients=8).digest == split(replace(data, users=None), clients=8).digest
    digests = {one.digest for one in (data, replace(data, users=None), replace(data, users=data.users[::-1].copy()))}
    assert len(digests) == 3


def test_maps_of_labels_are_counted_without_a_wider_copy_of_them():
    y = np.random.default_rng(0).integers(0, 5, (64, 128, 128)).astype(np.uint8)  # a megabyte
    y[y == 4] = VOID
    x = np.zeros((len(y), 3, 1, 1), np.uint8)
    data = Dataset("made", x, y, x[:1], y[:1], 4, (0.0,) * 3, (1.0,) * 3)
    tracemalloc.start()
    try:
        made = split(data, clients=1, partition="foreground", classes_per_client=4)
        assert tracemalloc.get_traced_memory()[1] < y.nbytes
    finally:
        tracemalloc.stop()
    assert made.counts.tolist() == [[*((y == c).sum() for c in range(4)), 0]]


# ---- local tests -------------------------------------------------------------------------------------------------


def test_floor_and_ceiling_by_hand():
    y = balanced(3, 10)  # 30 test images, ten a class; 60 training samples: a test image for two of them
    counts = np.array([[30, 3, 0], [1, 1, 0], [0, 0, 25], [0, 0, 0]])
    floor = table(y, list(local_tests(y, counts, "floor", 0)), 3)
    # 30/2 = 15 exceeds the ten there are, 3/2 gives 1; (1/2, 1/2) would be nothing: one of the first class; 25/2 is 12
    assert floor.tolist() == [[10, 1, 0], [1, 0, 0], [0, 0, 10], [0, 0, 0]]
    ceiling = table(y, list(local_tests(y, counts, "ceil_owned", 0)), 3)
    assert ceiling.tolist() == [[10, 2, 0], [1, 1, 0], [0, 0, 10], [0, 0, 0]]


def test_a_client_is_tested_on_its_most_frequent_class_that_can_be_tested():
    y = np.array([1, 1, 2])
    counts = np.array([[9, 1, 2], [5, 0, 0], [2000, 1, 3], [1000, 1000, 1000]])
    made = local_tests(y, counts, "floor", 0)
    assert [y[rows].tolist() for rows in made[:3]] == [[2], [], [2]]


data_settings = {
    "clients": st.integers(1, 30), "alpha": st.floats(0.01, 100), "imbalance": st.floats(1, 100),
    "validation": st.sampled_from([0.0, 0.1, 0.29, 0.5]), "seed": st.integers(0, 2**40),
}  # fmt: skip


@laws
@given(**data_settings)
def test_a_split_obeys_its_laws(clients, alpha, imbalance, validation, seed):
    data = dataset()
    options = {"clients": clients, "alpha": alpha, "imbalance": imbalance, "validation": validation, "seed": seed}
    made = split(data, **options)
    other = split(data, **options, test_alloc="ceil_owned")
    whole = split(data, **options | {"validation": 0.0})
    total = made.counts.sum()
    for k in range(clients):
        rows, held = made.train[k], made.validation[k]
        assert np.array_equal(np.union1d(rows, held), whole.train[k])
        assert len(rows) + len(held) == len(whole.train[k])
        assert np.array_equal(np.bincount(data.y_train[rows], minlength=10), made.counts[k])
        # n * 29 // 100 in whole numbers: 0.29 * 100 must not become 28
        expected = whole.counts[k] * round(100 * validation) // 100
        assert np.array_equal(np.bincount(data.y_train[held], minlength=10), expected)
        assert made.owned(k).tolist() == whole.owned(k).tolist() == np.unique(data.y_train[rows]).tolist()
        tests = np.bincount(data.y_test[made.test[k]], minlength=10)
        wanted = np.minimum(made.counts[k] * 200 // total, 20)
        if wanted.sum() == 0 and len(rows):
            wanted[made.counts[k].argmax()] = 1
        assert np.array_equal(tests, wanted)
        assert len(set(made.test[k])) == len(made.test[k])
        assert set(data.y_test[other.test[k]]) == set(made.owned(k))
        assert set(made.test[k]) <= set(other.test[k])
        assert np.array_equal(other.train[k], rows)
        assert np.array_equal(other.validation[k], held)
    assert made.global_counts.tolist() == made.counts.sum(0).tolist()
    assert made.empty_tests == 0


def test_empty_clients_are_kept_and_clients_without_tests_are_counted():
    data = dataset(classes=2, train=10, test=5)
    made = split(data, clients=8, alpha=1e-6)
    assert sorted(len(rows) for rows in made.train)[-2:] != [0, 0]
    empty = [k for k in range(8) if len(made.train[k]) == 0]
    assert len(empty) >= 6
    assert all(len(made.test[k]) == 0 and len(made.owned(k)) == 0 for k in empty)
    assert made.empty_tests == 0
    nothing = np.zeros(0, np.int64)
    assert Split(made.train, made.validation, (nothing,) * 8, made.counts).empty_tests == 8 - len(empty)


def test_local_tests_of_two_clients_are_drawn_independently():
    y = balanced(1, 1000)
    first, second = local_tests(y, np.array([[50], [50]]), "floor", 0)
    assert len(first) == len(second) == 500
    assert 200 < len(np.intersect1d(first, second)) < 300


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"partition": "iid"}, "per_class, per_class_capped, grouped_equal, by_user or foreground, not 'iid'"),
        ({"partition": "by_user"}, "by_user keeps each user's images together, but made names no users"),
        ({"test_alloc": "round"}, "floor, ceil_owned, not 'round'"),
        ({"validation": 1.0}, "validation must be"),
        ({"validation": -0.1}, "validation must be"),
        ({"validation": math.nan}, "validation must be"),
        ({"seed": -1}, "seed must not be negative"),
        ({"clients": 2000}, "1000 samples cannot be divided among 2000 clients"),
    ],
)
def test_wrong_options_are_refused(options, complaint):
    with pytest.raises(DataError, match=complaint):
        split(dataset(), **{"clients": 4} | options)


# ---- identity ----------------------------------------------------------------------------------------------------

GOLDEN = {
    "per_class": "8ee1247a50c6cf8bab8056d30e1056b622cec6d6eb124ca3391a04449b7da513",
    "per_class_capped": "1ee4d5ebdd4a5b1a3ea9f28df3d9f944f161ac7d73b830917be6597c88cd1bd0",
    "grouped_equal": "df99094ef9d945cd895cb70ee2465a1b06c1322b72ab79963e7d436cc374c714",
}


def test_users_are_dealt_the_same_on_every_machine_and_in_every_version():
    made = split(of_users(), clients=12, partition="by_user", validation=0.1, seed=3)
    assert made.digest == "0e9fbdd25eb99d227bae2c251877430bfec459501f502a4e2106383eb92de364"


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_split_stays_the_same_on_every_machine_and_in_every_version(name):
    made = split(dataset(), clients=12, partition=name, alpha=0.5, imbalance=10, validation=0.1, seed=3)
    assert made.digest == GOLDEN[name]


def test_the_digest_sees_every_part():
    def digest(**options) -> str:
        return split(dataset(), **{"clients": 5, "validation": 0.2} | options).digest

    options = [{}, {"seed": 1}, {"alpha": 0.6}, {"imbalance": 2}, {"test_alloc": "ceil_owned"}, {"validation": 0.1}]
    assert len({digest(**option) for option in options}) == len(options)
    assert digest() == digest()


def test_a_split_survives_saving(tmp_path):
    made = split(dataset(), clients=30, alpha=0.05, validation=0.3)
    made.save(tmp_path / "split")
    read = Split.read(tmp_path / "split")
    assert read.digest == made.digest
    for kind in ("train", "validation", "test"):
        for a, b in zip(getattr(made, kind), getattr(read, kind), strict=True):
            assert a.dtype == b.dtype == np.int64
            assert np.array_equal(a, b)
    assert np.array_equal(made.counts, read.counts)
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


def test_a_damaged_split_is_refused(tmp_path):
    path = tmp_path / "split.npz"
    split(dataset(), clients=3).save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["train"][0] += 1
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="does not match its digest"):
        Split.read(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as a split"):
        Split.read(path)
    with pytest.raises(DataError, match="cannot be read as a split"):
        Split.read(tmp_path / "nothing.npz")


def test_a_description_is_plain_json():
    data = dataset()
    made = split(data, clients=7, imbalance=10, validation=0.1)
    told = json.loads(json.dumps(describe(data, made)))
    assert told["name"] == "made"
    assert told["classes"] == 10
    assert told["digest"] == data.digest
    assert told["split"] == made.digest
    assert told["train"] + told["validation"] == len(long_tail(data.y_train, 10, 10))
    assert sum(told["class_counts"]) == told["train"]
    sizes = sorted(len(rows) for rows in made.train)
    assert told["client_sizes"] == {"min": sizes[0], "median": sizes[3], "max": sizes[6]}


def test_no_client_owns_more_classes_by_its_place():
    labels = np.repeat(np.arange(10), [500, 300, 180, 108, 65, 39, 23, 14, 8, 5])
    owned = np.zeros(20)
    for seed in range(60):
        owned += [len(np.unique(labels[rows])) for rows in per_class(labels, 20, 0.2, seed)]
    assert abs(owned[-1] - owned[:-1].mean()) < 4 * owned[:-1].std(ddof=1)
