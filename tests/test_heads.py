"""Fixed classifier heads: their geometry, their zeros, and that a stored one is the one that was made."""

import itertools
import math
import typing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from algorithms import heads
from algorithms.heads import Kind, etf, fixed_head, mask, realigned

DENSE = [kind for kind in typing.get_args(Kind) if not kind.startswith("s")]
SPARSE = [kind for kind in typing.get_args(Kind) if kind.startswith("s")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give every test an empty memory and an empty directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heads._remembered.cache_clear()
    yield tmp_path / "fedtail" / "heads"
    heads._remembered.cache_clear()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cosines(head: torch.Tensor) -> torch.Tensor:
    """Return the cosines of all pairs of different rows, [C, C-1]."""
    unit = F.normalize(head.double())
    return (unit @ unit.T)[~torch.eye(len(head), dtype=torch.bool)].view(len(head), -1)


def widest(classes: int) -> float:
    return math.degrees(math.acos(-1 / (classes - 1)))


# ETF -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (2, 5), (10, 9), (10, 10), (10, 64), (100, 512)])
def test_an_etf_has_unit_rows_at_equal_angles(classes, dim):
    head = etf(classes, dim, generator())
    assert torch.allclose(head.norm(dim=1), torch.ones(classes), atol=1e-6)
    assert torch.allclose(cosines(head), torch.tensor(-1 / (classes - 1)).double(), atol=1e-6)


def test_an_etf_is_equation_2():
    """Rebuild U from the head: Psi = sqrt(C/(C-1)) U (I - 11^T/C) for some U with orthonormal columns."""
    psi = etf(5, 8, generator()).T
    extra = torch.linalg.svd(psi).U[:, -1]  # a unit vector orthogonal to all columns, for the direction 1 that is lost
    U = math.sqrt(4 / 5) * psi + extra[:, None] / math.sqrt(5)
    assert torch.allclose(U.T @ U, torch.eye(5), atol=1e-6)
    assert torch.allclose(math.sqrt(5 / 4) * U @ (torch.eye(5) - 1 / 5), psi, atol=1e-6)


def test_where_there_is_no_room_for_an_etf_random_rows_are_spread():
    head = fixed_head("etf", 12, 4, steps=2000, lr=1e-3)
    assert torch.allclose(head.norm(dim=1), torch.ones(12), atol=1e-2)
    random = fixed_head("etf", 12, 4, steps=0)
    assert cosines(head).amax(1).mean() < cosines(random).amax(1).mean() - 0.1


# The mask ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 99), st.integers(0, 5))
def test_a_mask_has_its_zeros_and_spares_every_class(classes, dim, percent, seed):
    S = mask(classes, dim, percent / 100, generator(seed))
    zeros = percent * classes * dim // 100
    assert S.shape == (classes, dim)
    assert int((S == 0).sum()) == zeros
    assert int((S == 1).sum()) == classes * dim - zeros
    kept = S.sum(1).min()
    free = classes * dim - zeros
    if free >= min(2, dim) * classes:
        assert kept >= min(2, dim)
    elif free >= classes:
        assert kept >= 1


def test_a_mask_falls_anywhere():
    """Over many draws each entry is free equally often, and rows keep different numbers of entries."""
    drawn = torch.stack([mask(4, 10, 0.5, generator(seed)) for seed in range(2000)])
    assert torch.allclose(drawn.mean(0), torch.tensor(0.5), atol=0.06)
    assert drawn.sum(2).std() > 1


# SSE-C ---------------------------------------------------------------------------------------------------------------


def loss(psi: torch.Tensor, gamma: float) -> torch.Tensor:
    """Equations 3 to 5, as they are written."""
    norms = psi.norm(dim=1)
    cosine = (psi / norms[:, None]) @ (psi / norms[:, None]).T
    cosine = cosine - 3 * torch.eye(len(psi))
    angle = torch.acos(cosine.max(1).values.clamp(-0.99999, 0.99999))
    return ((norms - gamma) ** 2).sum() - angle.mean()


@pytest.mark.parametrize("by", ["adam", "sgd"])
def test_realigning_is_torchs_optimizer_on_the_papers_loss(by):
    S = mask(6, 12, 0.5, generator())
    start = etf(6, 12, generator(1))
    expected = (start * S).requires_grad_()
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[by]([expected], lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss(expected * S, 0.3).backward()
        optimizer.step()
    assert not torch.allclose(expected, start * S, atol=1e-3)
    assert torch.allclose(realigned(start, S, 0.3, 20, 1e-3, by), expected.detach(), atol=2e-6)


def assert_sse_c(head: torch.Tensor, beta: float, gamma: float) -> None:
    classes, dim = head.shape
    assert int((head == 0).sum()) == math.floor(beta * dim * classes)
    assert (head.norm(dim=1) - gamma).abs().max() < 1e-3
    angles = torch.rad2deg(cosines(head).acos())
    assert angles.amin(1).mean() == pytest.approx(widest(classes), abs=0.3)
    assert angles.mean() == pytest.approx(widest(classes), abs=0.01)


def test_sse_c_is_a_sparse_etf():
    head = fixed_head("sse_c", 10, 64)
    assert widest(10) == pytest.approx(96.38, abs=0.005)
    assert_sse_c(head, 0.6, 0.1)
    assert torch.equal(head == 0, mask(10, 64, 0.6, _after_etf(10, 64)) == 0)


def _after_etf(classes: int, dim: int) -> torch.Generator:
    rng = generator()
    etf(classes, dim, rng)
    return rng


def test_sse_c_at_the_size_of_the_authors_log():
    """d=512, C=100, beta=.6, gamma=.1: mean angle 90.5778, its variance .042, mean norm .1002, its variance 2.6e-9."""
    head = fixed_head("sse_c", 100, 512)
    assert_sse_c(head, 0.6, 0.1)
    angles, norms = torch.rad2deg(cosines(head).acos()), head.norm(dim=1)
    assert angles.mean() == pytest.approx(90.5778, abs=5e-4)
    assert angles.var() == pytest.approx(0.042, abs=0.004)
    assert norms.mean() == pytest.approx(0.1002, abs=1e-4)
    assert norms.var() < 1e-8


def test_no_sparsity_leaves_an_etf_and_only_changes_its_length():
    head = fixed_head("sse_c", 10, 16, sparsity=0.0, norm=0.5, steps=1000, lr=1e-3)
    assert int((head == 0).sum()) == 0
    assert torch.allclose(head.norm(dim=1), torch.tensor(0.5), atol=5e-3)
    assert torch.rad2deg(cosines(head).acos()).mean() == pytest.approx(widest(10), abs=0.01)


def test_why_not_sgd_as_the_text_has_it():
    """A step closes 2 lr of a row's gap to gamma: at lr 1e-4 and 10,000 steps 13.5 % of it are left."""
    start = fixed_head("sse_c", 10, 32, steps=0).norm(dim=1)
    after = fixed_head("sse_c", 10, 32, steps=500, optimizer="sgd").norm(dim=1)
    assert torch.allclose((after - 0.1) / (start - 0.1), torch.tensor((1 - 2e-4) ** 500), atol=1e-3)


@pytest.mark.parametrize("kind", SPARSE)
def test_every_sparse_head_is_realigned(kind):
    head = fixed_head(kind, 6, 24, sparsity=0.5, steps=1500, lr=1e-3)
    assert int((head == 0).sum()) == 72
    assert (head.norm(dim=1) - 0.1).abs().max() < 0.01
    assert torch.rad2deg(cosines(head).acos()).amin(1).mean() == pytest.approx(widest(6), abs=3)


@pytest.mark.parametrize("kind", SPARSE)
def test_without_steps_a_sparse_head_is_masked_unit_rows(kind):
    head = fixed_head(kind, 6, 24, sparsity=0.5, steps=0)
    dense = F.normalize(fixed_head("etf" if kind == "sse_c" else kind.removeprefix("sparse_"), 6, 24))
    assert torch.equal(head, dense * (head != 0))


@pytest.mark.parametrize(("classes", "dim", "sparsity"), [(2, 1, 0.5), (3, 2, 0.9), (20, 3, 0.6), (5, 1, 0.99)])
def test_hopeless_sizes_give_finite_heads(classes, dim, sparsity):
    assert fixed_head("sse_c", classes, dim, sparsity=sparsity, steps=50).isfinite().all()


# The others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mean", "std", "largest"),
    [
        ("xavier", 0, math.sqrt(2 / 600), math.sqrt(6 / 600)),
        ("gaussian", 0, 1, 6),
        ("uniform", 0.5, math.sqrt(1 / 12), 1),
        ("kaiming", 0, math.sqrt(2 / 500), math.sqrt(6 / 500)),
    ],
)
def test_dense_heads_are_what_their_names_say(kind, mean, std, largest):
    head = fixed_head(kind, 100, 500)
    assert head.mean() == pytest.approx(mean, abs=0.02 * std)
    assert head.std() == pytest.approx(std, rel=0.02)
    assert head.abs().max() <= largest


def test_an_orthogonal_head_is_orthogonal():
    head = fixed_head("orthogonal", 10, 30)
    assert torch.allclose(head @ head.T, torch.eye(10), atol=1e-5)


# Reproducible, and remembered ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*DENSE, *SPARSE])
def test_a_head_depends_on_its_recipe_alone(kind, cache):
    first = fixed_head(kind, 7, 20, steps=30)
    for seed, threads in ((1, 1), (2, 2)):
        for file in cache.iterdir():
            file.unlink()
        heads._remembered.cache_clear()
        torch.manual_seed(seed)
        before, threads_before = torch.get_rng_state(), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(fixed_head(kind, 7, 20, steps=30), first)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(threads_before)
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(fixed_head(kind, 7, 20, steps=30, seed=1), first)


def test_every_ingredient_makes_another_head():
    base = {"sparsity": 0.6, "norm": 0.1, "steps": 30, "lr": 1e-4, "optimizer": "adam", "seed": 0}
    others = {"sparsity": 0.5, "norm": 0.2, "steps": 29, "lr": 2e-4, "optimizer": "sgd", "seed": 1}
    made = [fixed_head("sse_c", 7, 20, **base | {k: v}) for k, v in [*others.items(), ("seed", 0)]]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(made, 2))


def test_memory_and_disk_return_the_same_bits_without_making_them_again(cache):
    first = fixed_head("sse_c", 7, 20, steps=30)
    expected = first.clone()
    first.zero_()  # whoever gets a head may do with it as he likes
    assert torch.equal(fixed_head("sse_c", 7, 20, steps=30), expected)
    (file,) = cache.iterdir()
    written = file.stat()
    heads._remembered.cache_clear()
    assert torch.equal(fixed_head("sse_c", 7, 20, steps=30), expected)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def _flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[:40], lambda c: c[:-1], lambda c: b"x" * len(c), _flip, lambda c: c[:9] + c]
)
def test_a_damaged_file_is_made_anew(cache, damage):
    expected = fixed_head("sse_c", 7, 20, steps=30)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    heads._remembered.cache_clear()
    assert torch.equal(fixed_head("sse_c", 7, 20, steps=30), expected)
    assert file.read_bytes() == whole
    assert list(cache.iterdir()) == [file]


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fixed_head("sse_c", 7, 20, steps=30).isfinite().all()


def test_without_a_cache_directory_named_the_home_has_one(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    fixed_head("xavier", 7, 20)
    assert len(list((tmp_path / ".cache" / "fedtail" / "heads").iterdir())) == 1
