"""Client actors: where they run, and what happens when they die."""

import os
import signal
import threading
import time

import pytest
import ray
from conftest import digits, driver, finish, tiny

from algorithms.base import Sum
from algorithms.fedavg import FedAvg
from orchestrator.actors import Pool
from orchestrator.client import CALL, stream
from orchestrator.driver import Driver, split_for
from orchestrator.resources import Share, concurrency, least_share, share
from orchestrator.yaml_file import InputError

HERE = {"CPU": 4.0, "GPU": 2.0, "node:here": 1.0}


def on_ray(experiment, actors, gpu=0.0, cpu=1.0):
    dataset, parts = digits(), split_for(experiment, digits())
    pool = Pool(actors, cpu, gpu)
    pool.load(experiment, ray.put(dataset), parts)
    return Driver(experiment, dataset, parts, pool), pool


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_killed_actor_costs_no_more_than_its_job(ray_cluster, when):
    experiment = tiny(rounds=8)
    expected = finish(driver(experiment)).fingerprint()
    run, pool = on_ray(experiment, 2)
    try:
        wait_for(lambda: run.evaluate() and len(pool.where) == 2)
        while run.round < (2 if when == "early" else 7):
            run.advance()
        victim = next(iter(pool.where.values()))["pid"]
        killer = threading.Timer(0.02, os.kill, (victim, signal.SIGKILL))
        killer.start()
        finish(run)
        killer.join()
        # A victim that was idle at the end is found dead by the next call.
        run.evaluate()
        assert pool.restarts == 1
        assert run.fingerprint() == expected
    finally:
        pool.close()


def test_all_actors_killed_more_than_once(ray_cluster):
    experiment = tiny(rounds=4)
    expected = finish(driver(experiment)).fingerprint()
    run, pool = on_ray(experiment, 2)
    try:
        for _ in range(2):
            run.advance()
            for where in pool.where.values():
                os.kill(where["pid"], signal.SIGKILL)
        finish(run)
        assert pool.restarts >= 2
        assert run.fingerprint() == expected
    finally:
        pool.close()


def test_a_client_that_hangs_is_given_up(ray_cluster):
    """A client that takes too long loses its actor, and is named after as many tries as the experiment allows."""
    run, pool = on_ray(tiny(local={"epochs": 100_000}, failures={"retries": 1, "client_timeout_s": 0.5}), 1)
    try:
        with pytest.raises(RuntimeError, match=r"clients \[\d+\] lost their actor 2 times in round 0"):
            finish(run)
    finally:
        pool.close()


def test_a_round_goes_on_without_a_client_that_does_not_answer(ray_cluster, monkeypatch):
    """A process that stands still is waited for as long as the experiment says; the others' updates make the round."""
    run, pool = on_ray(tiny(clients_per_round=6, failures={"client_timeout_s": 5, "timeout": "skip"}), 2)
    try:
        wait_for(lambda: run.evaluate() and len(pool.where) == 2)
        os.kill(next(iter(pool.where.values()))["pid"], signal.SIGSTOP)
        finish(run)
    finally:
        pool.close()
    assert [line["metrics"].get("clients/late") for line in run.history] == [1, None]
    (told,) = run.history[0]["late"]
    late = int(told.split(",")[0].removeprefix("client "))
    assert told == f"client {late}, round 0: no answer within 5 s"
    train = FedAvg.local

    def local(self, client, w):
        lost = client.id == late and client.rng.initial_seed() == stream(0, CALL, 0, 0, late)
        return Sum.weighted(1, w=w * float("nan")) if lost else train(self, client, w)

    monkeypatch.setattr(FedAvg, "local", local)
    without = finish(driver(tiny(clients_per_round=6, failures={"bad_update": "skip"})))
    assert run.server.model == without.server.model


def test_a_client_that_raises_is_named_with_its_round(ray_cluster):
    run, pool = on_ray(tiny(local={"lr": 1e30, "batch": 16}), 1)
    try:
        with pytest.raises(RuntimeError, match=r"client \d+, round 0: 'w.weights' is not finite"):
            finish(run)
    finally:
        pool.close()


def test_fractions_of_gpus_are_packed_and_actors_know_their_device(ray_cluster):
    run, pool = on_ray(tiny(), 4, gpu=0.5, cpu=0.5)
    try:
        wait_for(lambda: run.evaluate() and len(pool.where) == 4)
        devices = [where["gpus"] for where in pool.where.values()]
        assert all(len(ids) == 1 for ids in devices), "an actor never straddles devices"
        assert sorted(ids[0] for ids in devices) == ["0", "0", "1", "1"]
        assert {where["device"] for where in pool.where.values()} == {"cpu"}, "logical GPUs only, here"
    finally:
        pool.close()


def test_one_pool_serves_one_experiment_after_another(ray_cluster):
    first, second = tiny(), tiny(seed=1, data={"name": "digits", "clients": 4, "alpha": 0.5})
    run, pool = on_ray(first, 2)
    try:
        assert finish(run).fingerprint() == finish(driver(first)).fingerprint()
        pids = {where["pid"] for where in pool.where.values()}
        parts = split_for(second, digits())
        pool.load(second, ray.put(digits()), parts)
        again = finish(Driver(second, digits(), parts, pool))
        assert again.fingerprint() == finish(driver(second)).fingerprint()
        assert pids & {where["pid"] for where in pool.where.values()}
    finally:
        pool.close()


# Resources ----------------------------------------------------------------------------------------------------------


def test_a_trial_asks_for_a_driver_and_its_actors():
    asked = Share(actors=2, cpu=1.0, gpu=0.5, driver_gpu=0.0, node="here")
    assert asked.bundles() == [{"node:here": 0.001}, {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.5}]


def test_automatic_shares_use_the_machine():
    single = share(tiny(), [HERE], 1, "here")
    assert (single.actors, single.gpu) == (3, 0.5)  # no more actors than clients in a round
    many = share(tiny(), [HERE], 4, "here")
    assert (many.actors, many.gpu) == (1, 0.5)
    assert share(tiny(), [{"CPU": 2.0, "node:here": 1.0}], 1, "here").gpu == 0.0
    assert concurrency([tiny()] * 10, None, [HERE]) == 4
    assert concurrency([tiny()] * 10, 2, [HERE]) == 2
    assert concurrency([tiny()], None, [HERE]) == 1


def test_automatic_numbers_of_actors_heed_the_gpus():
    quarter = tiny(cluster={"gpu_per_actor": 0.25}, data={"name": "digits", "clients": 40}, clients_per_round=20)
    assert share(quarter, [{"CPU": 16.0, "GPU": 1.0, "node:here": 1.0}], 1, "here").actors == 4
    assert share(tiny(cluster={"gpu_per_actor": 1}), [HERE], 1, "here").actors == 2
    with_driver = share(tiny(cluster={"driver_gpu": 0.5}), [HERE], 1, "here")
    assert (with_driver.actors, with_driver.gpu) == (3, 0.5)
    assert concurrency([tiny(cluster={"actors": 4})] * 4, None, [HERE]) == 1


def test_no_more_actors_share_a_gpu_than_have_memory_there():
    assert least_share(3.0, 16.0) == 1 / 5
    assert least_share(17.0, 16.0) == 1, "an estimate: it may be worth trying"
    many = tiny(data={"name": "digits", "clients": 40}, clients_per_round=20)
    large = [{"CPU": 64.0, "GPU": 2.0, "node:here": 1.0}]

    def third(_):
        return 1 / 3

    assert concurrency([many] * 50, None, large) == 50
    assert concurrency([many] * 50, None, large, third) == 6
    six = share(many, large, 6, "here", third)
    assert (six.actors, six.gpu) == (1, 1 / 3)
    alone = share(many, large, 1, "here", third)
    assert (alone.actors, alone.gpu) == (6, 1 / 3)
    assert share(tiny(cluster={"actors": 1}), large, 1, "here", third).gpu == 1, "more than it needs, if there is"
    assert concurrency([many] * 50, None, [{"CPU": 64.0}], third) == 50, "there is no GPU"
    assert share(tiny(cluster={"gpu_per_actor": 0.1}), large, 1, "here", third).gpu == 0.1, "what is asked is done"


def test_one_actor_per_client_if_it_fits():
    everyone = tiny(cluster={"actors": "per_client", "cpu_per_actor": 0.5})
    assert share(everyone, [HERE], 1, "here").actors == 6
    with pytest.raises(InputError, match="6 client actors with 1 CPU and 0 GPU each, but the cluster has 4 CPU"):
        share(tiny(cluster={"actors": "per_client", "gpu_per_actor": 0}), [HERE], 1, "here")


def test_what_can_never_be_had_is_refused():
    with pytest.raises(InputError, match=r"1 CPU and 0\.5 GPU each, but the cluster has 2 CPU and 0 GPU"):
        share(tiny(cluster={"actors": 1, "gpu_per_actor": 0.5}), [{"CPU": 2.0, "node:here": 1.0}], 1, "here")
    # Two machines of two CPUs cannot hold an actor of three.
    with pytest.raises(InputError, match="3 CPU"):
        share(tiny(cluster={"actors": 1, "cpu_per_actor": 3}), [HERE | {"CPU": 2.0}, {"CPU": 2.0}], 1, "here")
