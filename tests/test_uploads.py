"""Uploads are added in a tree: whoever adds which branch, the bits are the same."""

import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import Sum
from orchestrator.actors import BUNDLES, Pool
from orchestrator.cohort import TALLEST
from orchestrator.experiment import Failures
from orchestrator.uploads import Part, fold


def uploads(places, keys=1, seed=0):
    """Return an upload of a tensor from each place, with one of some keys."""
    rng = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    return [
        Part(draw.randrange(keys), (("w", "float"),), [i], Sum(w=torch.randn(5, generator=rng) * 10.0 ** (i % 9)), i)
        for i in places
    ]


def sent(parts):
    """Return parts as another process gets them."""
    return pickle.loads(pickle.dumps(parts))


def bits(parts):
    return {part.key: (part.ids, part.total.widen().w.tolist()) for part in parts}


def test_five_uploads_by_hand():
    (total,) = fold(uploads(range(5)), 3)
    a, b, c, d, e = (part.total.w.double() for part in uploads(range(5)))
    assert torch.equal(total.total.w, ((a + b) + (c + d)) + e)
    assert (total.ids, total.first, total.height) == ([0, 1, 2, 3, 4], 0, 3)


@given(
    st.sets(st.integers(0, 63), min_size=1), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.integers(0)))
)
def test_branches_that_others_have_added_change_nothing(places, keys, branches):
    expected = bits(fold(uploads(sorted(places), keys), TALLEST))
    parts = sent(uploads(sorted(places), keys))
    for height, number in branches:
        first = (number << height) % 64
        whole = range(first, first + (1 << height))
        inside = [p for p in parts if p.first in whole and p.height < height]
        if all(p.first + (1 << p.height) <= whole.stop for p in inside):
            others = [p for p in parts if p not in inside]
            parts = others + sent(fold(inside, height))
    assert bits(fold(parts, TALLEST)) == expected


def test_what_does_not_fit_stays_apart():
    parts = uploads(range(2))
    parts[1].form = (("w", "something else"),)
    assert [part.ids for part in fold(parts, TALLEST)] == [[0], [1]]


def test_what_came_from_others_is_not_changed_in_its_place():
    left, right = sent(uploads(range(2)))
    kept = left.total.w.clone()
    before = left.total.w
    fold([left, right], 1)
    assert torch.equal(before, kept)


@pytest.mark.parametrize("jobs", [1, 2, 7, 10, 64])
@pytest.mark.parametrize("actors", [1, 2, 5])
def test_messages_are_whole_branches_and_cover_every_job_once(jobs, actors):
    pool = Pool(actors, 1.0, 0.0)
    pool.failures = Failures()
    waiting, sizes = [range(jobs)], [random.Random(i).randrange(100) for i in range(jobs)]
    messages = []
    while waiting:
        messages.append(pool._next(waiting, sizes))
    assert sorted(i for some in messages for i in some) == list(range(jobs))
    for some in messages:
        height = (len(some) - 1).bit_length()
        assert some.start % (1 << height) == 0
        assert len(some) == 1 << height or some.stop == jobs
    assert all(len(some) <= max(1, jobs // (BUNDLES * actors)) for some in messages)
    assert len(messages[-1]) == 1


def test_large_answers_come_no_faster_than_they_are_received():
    """64 actors do a job in a quarter of a second; to receive an answer takes a fifth, then less."""
    pool = Pool(64, 1.0, 0.0)
    pool.failures = Failures()
    pool._answer_s, pool._job_s = 0.2, 0.25

    def messages(jobs):
        waiting = [range(jobs)]
        while waiting:
            yield pool._next(waiting, [1] * jobs)

    assert [len(some) for some in messages(1024)] == [16] * 64  # wanted are 51, but then only 20 would have work
    pool._answer_s = 0.01  # 64 answers take as long as 2.56 jobs
    assert min(len(some) for some in messages(1024)) == 4
    pool._answer_s = 0.001
    assert min(len(some) for some in messages(1024)) == 1
