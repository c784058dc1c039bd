"""Aggregations: hand-computed values, what a poisoned client can do, and what privacy costs and promises."""

import math

import pytest
import torch
from conftest import driver, finish, tiny
from test_every_algorithm import NAMES, assert_finite, experiment

import algorithms
from algorithms.aggregations import AGGREGATIONS, Aggregation, Clip, Median, Private, TrimmedMean
from algorithms.base import Sum
from algorithms.fedavg import FedAvg
from algorithms.params import Params
from orchestrator.cohort import Cohort
from orchestrator.driver import Driver
from orchestrator.privacy import epsilon
from orchestrator.sweep_file import read
from orchestrator.yaml_file import InputError


def model(*values: float) -> Params:
    return Params.pack({"body.w": torch.tensor(values)})


def uploads(*values: float) -> list[Sum]:
    """Uploads of one number each; the k-th client counts k times."""
    return [Sum.weighted(k, w=model(value)).widen() for k, value in enumerate(values, 1)]


def combined(rule: Aggregation, *values: float) -> float:
    total = rule.combined(uploads(*values))
    return float((total.w / total.n).flat)


def test_weighted_means_medians_and_trimmed_means_by_hand():
    values = 1.0, 2.0, 9.0, 4.0, 100.0
    assert combined(Aggregation(), *values) == pytest.approx((1 + 4 + 27 + 16 + 500) / 15)
    assert combined(Median(), *values) == pytest.approx(4.0)
    assert combined(Median(), *values[:4]) == pytest.approx(3.0)
    assert combined(TrimmedMean(share=0.2), *values) == pytest.approx((2 + 9 + 4) / 3)
    assert combined(TrimmedMean(share=0.19), *values) == pytest.approx(sum(values) / 5)


def test_counts_of_all_clients_stay_and_who_counts_nothing_is_left_out():
    total = Median().combined([*uploads(1.0, 2.0, 3.0), Sum.weighted(0, w=model(77.0)).widen()])
    assert total.n == 6
    assert float((total.w / total.n).flat) == pytest.approx(2.0)


def test_entries_are_combined_over_those_who_have_them():
    def sent(n, **entries):
        return Sum.weighted(n, z={int(k[1:]): torch.tensor(v) for k, v in entries.items()})

    total = Median().combined([sent(1, c1=[1.0]), sent(1, c1=[3.0], c2=[5.0]), sent(1, c1=[8.0])])
    assert {c: z.tolist() for c, z in total.z.items()} == {1: [9.0], 2: [15.0]}  # the middle, three times


def test_clipping_by_hand():
    received = model(1.0, 1.0)
    upload = Sum.weighted(2, w=model(4.0, 5.0)) | Sum(extra=torch.tensor([30.0, 40.0]))
    limited = Clip(norm=2.5).limited(upload, dict(received))
    assert limited.n == 2
    assert (limited.w / limited.n).flat.tolist() == pytest.approx([1 + 1.5, 1 + 2.0])
    assert limited.extra.tolist() == [30.0, 40.0], "what is only added up, such as counts, is left as it is"
    near = Clip(norm=5.5).limited(upload, dict(received))
    assert (near.w / near.n).flat.tolist() == pytest.approx([4.0, 5.0])


def test_private_uploads_are_bounded_equal_in_weight_and_noisy():
    received, rule = model(1.0, 1.0), Private(clip=2.5, noise=0.8)
    upload = Sum.weighted(7, w=model(4.0, 5.0), a=100.0)
    limited = rule.limited(upload, dict(received))
    assert (limited.n, limited.a) == (1, 2.5)
    assert limited.w.flat.tolist() == pytest.approx([2.5, 3.0])
    assert rule.limited(Sum.weighted(0, w=model(9.0, 9.0)), dict(received)).w == received
    rng = torch.Generator().manual_seed(0)
    zeros = Params.pack({"body.w": torch.zeros(100_000)})
    noisy = rule.released(Sum.weighted(1, w=zeros, a=0.0).widen(), rng)
    assert float(noisy.w.flat.std()) == pytest.approx(0.8 * 2.5 * math.sqrt(2), rel=0.02)
    assert noisy.n == 1
    assert noisy.a != 0


def test_what_has_a_part_for_each_class_cannot_be_hidden():
    with pytest.raises(TypeError, match=r"'z' has a part for each of the client's \[3\]"):
        Private().limited(Sum(z={3: torch.zeros(1)}), {})


@pytest.mark.parametrize(("sums", "noise"), [(1, 4.0), (50, 20.0)])
def test_epsilon_of_full_participation_is_that_of_the_gaussian_mechanism(sums, noise):
    """Concentrated privacy gives a bound in closed form, which the accountant's may only undercut, and not by much."""
    rho = sums * 2**2 / (2 * noise**2)
    bound = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert 0.75 * bound < epsilon(Private(noise=noise), {"8/8": sums}) <= bound


def test_epsilon_grows_with_rounds_and_shrinks_with_sampling_and_noise():
    base = epsilon(Private(noise=4.0), {"10/100": 10})
    assert epsilon(Private(noise=4.0), {"10/100": 20}) > base
    assert epsilon(Private(noise=8.0), {"10/100": 10}) < base
    assert epsilon(Private(noise=4.0), {"100/100": 10}) > base
    assert epsilon(Private(noise=4.0), {"10/100": 10, "100/100": 1}) > base


# Runs ---------------------------------------------------------------------------------------------------------------

LOCAL = FedAvg.local
IID = {"name": "digits", "clients": 6, "alpha": 100, "imbalance": 1}
WELL = {"rounds": 12, "clients_per_round": 6, "evaluate": {"every": 12}, "data": IID}


def attacked(monkeypatch, aggregation):
    """Return the accuracy after training with a client that sends its model negated and four times as large."""

    def local(self, client, w):
        sent = LOCAL(self, client, w)
        return Sum.weighted(client.n, w=sent.w / client.n * -4.0) if client.id == 2 else sent

    monkeypatch.setattr(FedAvg, "local", local)
    run = finish(driver(tiny(**WELL, aggregation=aggregation)))
    return run.history[-1]["metrics"]["generic/acc"]


def test_robust_aggregations_withstand_an_attacker(monkeypatch):
    honest = finish(driver(tiny(**WELL))).history[-1]["metrics"]["generic/acc"]
    assert honest > 0.7
    assert attacked(monkeypatch, "mean") < 0.3
    for rule in ("median", {"trimmed_mean": {"share": 0.2}}, {"clip": {"norm": 1.0}}):
        assert attacked(monkeypatch, rule) > honest - 0.2, rule


ADDING = [name for name in NAMES if algorithms.find(name).card.sums]


@pytest.mark.parametrize("name", ADDING)
def test_every_method_that_adds_up_can_be_made_robust(name, monkeypatch):
    heard, combined = [], Median.combined
    monkeypatch.setattr(Median, "combined", lambda self, uploads: heard.append(len(uploads)) or combined(self, uploads))
    assert_finite(finish(driver(experiment(name, aggregation="median"))))
    assert heard
    assert max(heard) > 1, "it compares single uploads"


PRIVATE = [name for name in ADDING if not algorithms.find(name).card.singles and name not in ("ldae",)]


@pytest.mark.parametrize("name", PRIVATE)
def test_every_method_that_only_adds_up_can_be_private(name, tmp_path):
    private = experiment(name, aggregation={"dp": {"clip": 0.5, "noise": 0.01}}, failures={"checkpoint_s": 0})
    run = driver(private, tmp_path)
    run.advance()
    run.checkpoint()
    run = finish(driver(private, tmp_path))
    assert_finite(run)
    assert run.history[-1]["metrics"]["privacy/epsilon"] > 0
    assert sum(run.releases.values()) >= 2, "what was released before the interruption counts"


def test_drawing_few_of_many_is_accounted_for():
    dp = {"dp": {"noise": 0.01}}
    few = finish(driver(tiny(aggregation=dp))).releases
    assert few == {"3/6": 2}
    chain = [{"fedavg": {}}, {"crt": {"rounds": 1}}]
    assert finish(driver(tiny(aggregation=dp, algorithm=chain))).releases == {"3/6": 3}
    assert finish(driver(tiny(aggregation=dp, algorithm="bpfed"))).releases == {"3/6": 2, "6/6": 1}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_catalogue_says_the_server_sees_is_true(name, monkeypatch):
    added, told = [], []
    combine, answers = Driver.combine, Cohort.map

    def noting_sums(self, parts, drawn):
        added.append(self.parts[self.part].name)
        return combine(self, parts, drawn)

    def noting_values(self, *arguments, **more):
        values = answers(self, *arguments, **more)
        told.extend([self._driver.parts[self._driver.part].name] if any(v is not None for v in values.values()) else [])
        return values

    monkeypatch.setattr(Driver, "combine", noting_sums)
    monkeypatch.setattr(Cohort, "map", noting_values)
    finish(driver(experiment(name)))
    card = algorithms.find(name).card
    assert (name in added) == card.sums
    assert (name in told) == (card.singles not in ("", "classes"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aggregation: medain", "did you mean 'median'"),
        ("algorithm: local\naggregation: median", "with local the server adds up no uploads"),
        ("algorithm: clustered\naggregation: median", "with clustered the server adds up no uploads"),
        ("algorithm: climb\naggregation: dp", "climb tells the server each client's loss"),
        ("algorithm: ldae\nlocal: {loss: balanced_softmax, prior: gpi}\naggregation: dp", "gpi tells the server"),
        ("aggregation: {dp: {noise: 0}}", "aggregation.dp.noise: must be > 0"),
        ("aggregation: {trimmed_mean: {share: 0.5}}", "must be < 0.5"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        read(text=text)


def test_an_aggregation_is_swept_like_any_setting():
    sweep = read(text="experiment: {aggregation: {clip: {norm: !grid [1, 2]}}}")
    from orchestrator.space import trials

    assert [t.experiment.aggregation for t in trials(sweep)] == [("clip", {"norm": 1.0}), ("clip", {"norm": 2.0})]
    assert set(AGGREGATIONS) == {"mean", "clip", "median", "trimmed_mean", "dp"}


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("fedavg", None),
        ("fedper", None),
        ("scaffold", lambda model, d: 4 * 3 * model),
        ("bpfed", lambda model, d: 6 * 4 * d * d),
    ],
)
def test_bytes_beyond_a_model_are_counted(name, beyond):
    run = finish(driver(experiment(name)))
    counted = [line["metrics"].get("bytes/up_extra") for line in run.history]
    wanted = None if beyond is None else beyond(run.origin.flat.numel(), run.origin["head.weight"].shape[1])
    assert counted[-1] == wanted
