"""Metrics by hand: three clients, four classes."""

import numpy as np
import pytest
import torch
from conftest import digits, driver, finish, tiny

from orchestrator.data import Split
from orchestrator.evaluate import (
    HELD_MASKED,
    HELD_MATCHED,
    HELD_OWNED,
    MASKED,
    MATCHED,
    OWNED,
    Scores,
    SortedTest,
    groups,
    known_metrics,
)

Y_TEST = np.repeat(np.arange(4), 10)
Y_TRAIN = np.repeat(np.arange(4), [12, 4, 2, 2])


def scores():
    counts = np.array([[8, 0, 0, 0], [4, 4, 2, 0], [0, 0, 0, 2]])
    tests = (np.array([0, 1, 2, 3]), np.array([0, 1, 10, 20]), np.array([], dtype=np.int64))
    train = (np.arange(8), np.array([8, 9, 10, 11, 12, 13, 14, 15, 16, 17]), np.array([18, 19]))
    held_out = (np.array([0, 1]), np.array([8, 12]), np.array([], dtype=np.int64))
    made = Scores(Split(train=train, validation=held_out, test=tests, counts=counts), Y_TRAIN, Y_TEST)
    made.generic = np.array([9, 5, 2, 0])
    personal = np.zeros((3, 6, 4), dtype=np.int64)
    personal[0, OWNED], personal[0, MASKED] = [10, 0, 0, 0], [10, 0, 0, 0]
    personal[0, MATCHED], personal[0, HELD_MATCHED] = [3, 0, 0, 0], [1, 0, 0, 0]
    personal[1, OWNED], personal[1, MASKED] = [8, 4, 0, 0], [9, 6, 3, 0]
    personal[1, MATCHED], personal[1, HELD_MATCHED] = [1, 1, 0, 0], [1, 0, 0, 0]
    personal[0, HELD_OWNED], personal[1, HELD_OWNED] = [2, 0, 0, 0], [1, 0, 0, 0]
    personal[0, HELD_MASKED], personal[1, HELD_MASKED] = [3, 0, 0, 0], [2, 1, 0, 0]
    personal[2, OWNED], personal[2, MASKED] = [0, 0, 0, 5], [0, 0, 0, 10]
    made.personal = personal
    return made


def test_generic_accuracy_is_over_all_test_images():
    found = scores().metrics()
    assert found["generic/acc"] == 16 / 40


def test_owned_is_the_mean_over_owned_classes_then_over_clients():
    found = scores().metrics()
    assert found["personal/acc_owned"] == pytest.approx((1.0 + (0.8 + 0.4 + 0.0) / 3 + 0.5) / 3)
    assert found["personal/acc_owned_masked"] == pytest.approx((1.0 + (0.9 + 0.6 + 0.3) / 3 + 1.0) / 3)


def test_matched_is_the_mean_over_clients_that_have_a_test():
    found = scores().metrics()
    assert found["personal/acc_dist"] == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert found["personal/acc_worst10"] == pytest.approx(2 / 4)


def test_validation_is_scored_on_held_out_training_images():
    """As on the test: by its own images, or by everybody's of its classes; here 3 of class 0 and 1 of class 1."""
    found = scores().metrics()
    assert found["validation/acc_dist"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found["validation/acc_owned"] == pytest.approx((2 / 3 + (1 / 3 + 0 / 1) / 2) / 2)
    assert found["validation/acc_owned_masked"] == pytest.approx((3 / 3 + (2 / 3 + 1 / 1) / 2) / 2)


def test_groups_by_count_and_by_share():
    """Counts 12, 4, 2, 2 of 20: class 1 crosses 75 %, class 3 starts at 90 % and crosses 95 %."""
    counts = np.array([12, 4, 2, 2])
    found = {k: v.tolist() for k, v in groups(counts).items()}
    assert found["head"] == [0, 1]
    assert found["middle"] == [2, 3]
    assert found["tail"] == []
    assert found["few"] == [0, 1, 2, 3]
    large = {k: v.tolist() for k, v in groups(np.array([101, 100, 20, 19])).items()}
    assert (large["many"], large["medium"], large["few"]) == ([0], [1, 2], [3])
    assert groups(np.array([1, 5, 94]))["tail"].tolist() == [0]


def test_split_metrics_by_hand():
    found = scores().metrics()
    assert found["generic/acc_head"] == (9 + 5) / 20
    assert found["generic/acc_middle"] == 2 / 20
    assert "generic/acc_tail" not in found
    assert found["personal/acc_owned_head"] == pytest.approx((1.0 + (0.8 + 0.4) / 2) / 2)
    assert found["personal/acc_owned_middle"] == pytest.approx((0.0 + 0.5) / 2)
    assert found["personal/acc_dist_middle"] == 0.0


def test_tables():
    made = scores()
    row = made.per_class()[0]
    assert row == {"class": 0, "train": 12, "test": 10, "clients": 2, "generic_acc": 0.9, "personal_acc_owned": 0.9}
    client = made.per_client()[2]
    assert (client["train"], client["classes"], client["test"], client["acc_dist"]) == (2, 1, 0, None)
    assert client["acc_owned"] == 0.5
    pairs = {(row["client"], row["class"]): row for row in made.per_client_class()}
    assert pairs.keys() == {(k, c) for k, c in zip(*np.nonzero(made.split.counts), strict=True)}
    assert (pairs[1, 1]["acc"], pairs[1, 1]["acc_masked"]) == (0.4, 0.6)
    assert pairs[1, 1]["train"] == made.split.counts[1, 1]


def test_blocks_are_of_one_class_and_cover_the_test_set():
    labels = np.array([1, 0, 1, 1, 2, 0] * 300)
    tests = SortedTest(labels, 3)
    covered = np.concatenate([tests.order[a:b] for _, a, b in tests.blocks])
    assert sorted(covered) == list(range(len(labels)))
    assert all(set(labels[tests.order[a:b]]) == {c} for c, a, b in tests.blocks)
    assert (labels[tests.order][tests.position] == labels).all()
    some = SortedTest(labels, 3, rows=np.array([7, 2, 1]))
    assert (some.order.tolist(), some.position[[7, 1, 2, 0]].tolist()) == ([7, 1, 2], [0, 1, 2, -1])
    assert some.blocks == [(0, 0, 2), (1, 2, 3)]


def test_a_run_counts_as_a_plain_loop_would():
    """Redo the evaluation of a finished run image by image."""
    run = finish(
        driver(
            tiny(
                algorithm=["fedavg", {"finetune": {"epochs": 2}}],
                data={"name": "digits", "clients": 6, "imbalance": 5, "alpha": 0.3, "validation": 0.2},
            )
        )
    )
    found, worker, data = run.history[-1]["metrics"], run.engine.worker, digits()
    dist, owned_acc, masked_acc, held, held_owned, held_masked = [], [], [], [], [], []
    pool = np.concatenate(run.split.validation)
    assert len(pool)
    everything = worker.images(worker.x_test, np.arange(len(data.y_test)))
    with torch.no_grad():
        generic = run.engine.worker.head(run.server.model, worker.features(run.server.model, everything)).argmax(1)
        assert found["generic/acc"] == (generic.numpy() == data.y_test).mean()
        for k in run.selectable:
            w = run.memory[k]["w"]
            logits = worker.head(w, worker.features(w, everything))
            right = logits.argmax(1).numpy() == data.y_test
            dist.append(right[run.split.test[k]].mean())
            owned = run.split.owned(k)
            owned_acc.append(np.mean([right[data.y_test == c].mean() for c in owned]))
            masked = np.array(owned)[logits[:, owned].argmax(1).numpy()] == data.y_test
            masked_acc.append(np.mean([masked[data.y_test == c].mean() for c in owned]))
            rows = run.split.validation[k]
            if len(rows):
                y, logits = data.y_train[rows], worker.head(w, worker.features(w, worker.images(worker.x_train, rows)))
                held.append((logits.argmax(1).numpy() == y).mean())
            y, logits = data.y_train[pool], worker.head(w, worker.features(w, worker.images(worker.x_train, pool)))
            masked = np.array(owned)[logits[:, owned].argmax(1).numpy()] == y
            among = np.intersect1d(y, owned)
            held_masked.append(np.mean([masked[y == c].mean() for c in among]))
            held_owned.append(np.mean([(logits.argmax(1).numpy() == y)[y == c].mean() for c in among]))
    assert found["personal/acc_dist"] == pytest.approx(np.mean(dist))
    assert found["personal/acc_owned"] == pytest.approx(np.mean(owned_acc))
    assert found["personal/acc_owned_masked"] == pytest.approx(np.mean(masked_acc))
    assert found["validation/acc_dist"] == pytest.approx(np.mean(held))
    assert found["validation/acc_owned"] == pytest.approx(np.mean(held_owned))
    assert found["validation/acc_owned_masked"] == pytest.approx(np.mean(held_masked))


def test_a_shared_model_is_scored_alike_by_both_ways():
    """One model's logits are computed once for all; models tuned for zero epochs are scored client by client."""
    data = {"name": "digits", "clients": 6, "validation": 0.2}
    run = finish(driver(tiny(algorithm=["fedavg", {"finetune": {"epochs": 0}}], data=data)))
    shared, separate = (run.history[i]["metrics"] for i in (-2, -1))
    assert {k: v for k, v in shared.items() if k.startswith(("personal/", "validation/"))} == {
        k: v for k, v in separate.items() if k.startswith(("personal/", "validation/"))
    }


def test_only_what_is_asked_for_is_evaluated():
    only = finish(driver(tiny(evaluate={"what": ["generic"]}))).history[-1]["metrics"]
    assert not [k for k in only if k.startswith("personal/")]
    only = finish(driver(tiny(evaluate={"what": ["personal"]}))).history[-1]["metrics"]
    assert not [k for k in only if k.startswith("generic/")]


def test_every_reported_score_can_be_ranked_by():
    data = {"name": "digits", "clients": 6, "validation": 0.2, "imbalance": 100}
    found = finish(driver(tiny(data=data))).history[-1]["metrics"]
    assert {k for k in found if not k.startswith(("time/", "bytes/"))} <= set(known_metrics())
