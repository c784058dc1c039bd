"""The catalogue says what there is, and the README says the same."""

import dataclasses
from pathlib import Path

import algorithms
from orchestrator import catalogue
from orchestrator.tune import main

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_has_the_catalogue_of_today():
    text = README.read_text(encoding="utf-8")
    assert catalogue.inserted(text) == text, "type: make catalogue"


def test_every_algorithm_is_listed_with_all_it_has(capsys):
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for name in algorithms.names():
        kind = algorithms.find(name)
        assert kind.card.kind in catalogue.KINDS
        assert f"\n{name}\n" in f"\n{text}"
        assert catalogue.about(kind) in text
        for field in dataclasses.fields(kind):
            (knob,) = (k for k in catalogue.knobs(kind) if k.name == field.name)
            assert knob.meaning, f"{name}.{field.name} says nothing of itself"
            assert f"    {knob.name}: {knob.default}  ({knob.range})  {knob.meaning}" in text


def test_ranges_read_like_the_bounds():
    found = {k.name: k for k in catalogue.knobs(algorithms.find("ecl"))}
    assert (found["expert_logit_weight"].default, found["expert_logit_weight"].range) == ("0.5", "number >= 0 <= 1")
    assert found["num_experts"].range == "whole number >= 1"
    assert found["norm_power"].range == "1 | 2"
    assert (found["mask_unowned"].default, found["mask_unowned"].range) == ("true", "true | false")
    assert {k.name: k.range for k in catalogue.knobs(algorithms.find("fedloge"))}["finetune_lr"] == "number > 0 or null"
