"""The catalogue says what there is, and the README says the same."""

import dataclasses
import json
from pathlib import Path

import algorithms
from orchestrator import catalogue
from orchestrator.checkpoint import set_status
from orchestrator.data import DATASETS
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


def columns(*names):
    """Return these cells of the README's table, by method."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in catalogue.markdown().split("\n\n")[0].splitlines())
    return {row[0].strip("`"): [row[head.index(name)].strip() for name in names] for row in rows}


def test_a_method_without_segmentation_says_why(capsys):
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for name, (pixels,) in columns("segmentation").items():
        reason = algorithms.find(name).per_image
        assert pixels == (f"no: {reason}" if reason else "yes")
        assert reason in text


def keep(folder, chain, data, status="FINISHED", prior="none"):
    """Write down a trial as a sweep does."""
    folder.mkdir(parents=True)
    experiment = {"algorithm": [{name: {}} for name in chain], "data": {"name": data}, "local": {"prior": prior}}
    (folder / "trial.json").write_text(json.dumps({"experiment": experiment}))
    set_status(folder, status)


def test_what_a_method_was_run_on_is_told_by_kept_results(tmp_path, monkeypatch, capsys):
    trials = tmp_path / "sweep" / "trials"
    keep(trials / "0000", ["fedavg", "ecl"], "fashion_mnist", prior="gpi")
    keep(trials / "0001", ["fedavg"], "cifar10")
    keep(trials / "0002", ["scaffold"], "cifar10", status="FAILED")
    fashion = ["fashion_mnist"]
    assert catalogue.run_on(tmp_path) == {"fedavg": ["cifar10", *fashion], "ecl": fashion, "gpi": fashion}
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path)
    found = columns("kept results")
    assert found.keys() == set(algorithms.names())
    assert found["fedavg"] == ["`cifar10`, `fashion_mnist`"]
    assert found["ecl"] == found["gpi"] == ["`fashion_mnist`"]
    assert found["scaffold"] == found["ldae"] == ["none; tested on `digits`"]
    assert main(["--list"]) == 0
    told = {
        lines[0]: lines[2] for lines in map(str.splitlines, capsys.readouterr().out.split("\n\n")) if len(lines) > 2
    }
    assert told["fedavg"].endswith("; run here on cifar10, fashion_mnist")
    assert told["scaffold"].endswith("; tested on digits")


def test_data_sets_are_listed_with_where_to_get_them_and_whether_they_have_been_run(tmp_path, monkeypatch, capsys):
    keep(tmp_path / "sweep" / "trials" / "0000", ["fedavg"], "camvid")
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path)
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    assert "\ndata camvid\n  11 classes of pixels; run here\n  where from: reduce the road scenes of CamVid" in text
    needed = "tested on a small copy in its published layout, needs your data"
    assert f"\ndata imagenet_lt\n  1000 classes of images; {needed}\n  where from: unpack ILSVRC2012" in text
    assert all(f"\ndata {name}\n" in text for name in set(DATASETS) - {"digits"})


def test_without_results_as_when_installed_the_catalogue_says_nothing_of_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path / "results")
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    assert "\nfedavg\n" in text
    assert "run here on" not in text
    assert "tested on" not in text


def test_results_of_today_are_all_of_known_methods_and_data():
    found = catalogue.run_on(catalogue.RESULTS)
    assert {"fedavg", "ecl", "mupfl"} <= found.keys() <= set(algorithms.names())
    assert "fashion_mnist" in found["ecl"]
    assert {data for each in found.values() for data in each} <= set(DATASETS)
