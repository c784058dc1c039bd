"""What is measured is the same work: the plain loop of the benchmarks against our engine."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import digits, driver, tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from plain import Loop, Setting
from workloads import hand_over


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("cnn_small", Setting(processes=1, threads=1)),
        ({"name": "resnet8", "width": 16}, Setting(processes=2, threads=1, channels_last=True, fused=True)),
    ],
)
def test_the_plain_loop_takes_our_steps_and_arrives_at_our_weights(model, setting, tmp_path):
    local = {"lr": 0.01, "momentum": 0.9, "batch": 16}
    experiment = tiny(model=model, local=local, rounds=2)
    run = driver(experiment)
    hand_over(experiment, digits(), run.split, tmp_path / "task.npz")
    loop = Loop(tmp_path / "task.npz", setting)
    start = loop.weights.clone()
    while not run.done:
        chosen = run._draw(run.plan[run.round])
        run.advance()
        did = loop.advance()
        assert did.steps == run._steps
        assert did.samples == run.split.counts[chosen].sum()
    loop.close()
    ours = torch.cat([run.server.model.flat, run.server.model.buffers])
    assert float((ours - start).norm()) > 0.1
    torch.testing.assert_close(loop.weights, ours, rtol=1e-3, atol=1e-4)
