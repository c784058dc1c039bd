"""Pictures: what they show is what the files say, whatever names contain."""

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_comparison import configuration, run

from algorithms.pictures import Bars, Heatmap, Lines, Points
from orchestrator.comparison import ranking
from orchestrator.pictures import hyperparameters
from orchestrator.pictures.comparison import Comparison
from orchestrator.pictures.comparison import pictures as compare
from orchestrator.pictures.declared import draw_declared
from orchestrator.pictures.run import draw, pictures
from orchestrator.pictures.style import canvas, legend, look, plain, styled, svg
from orchestrator.runs import compared, read_run, read_source

METRIC = "personal/acc_dist"
HOSTILE = "<script>alert(1)</script> $x^{$ & \x00\ud800 中文"


@pytest.fixture(scope="module")
def tuned(finished_sweep):
    """A run of two phases, and its reference."""
    trials = finished_sweep / "trials"
    return read_run(trials / "0006"), read_run(trials / "0003")


@pytest.fixture(scope="module")
def drawn(tuned):
    return {p.name: p.figure for p in pictures(*tuned)}


def labelled(figure):
    """Tell whether every pair of axes says what its two axes mean; a colour bar has one."""
    return all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes) and figure.axes[0].get_xlabel()


def texts(figure):
    """Return every text of a figure's SVG, which must be sound XML."""
    return [node.text for node in ET.fromstring(svg(figure)).iter("{http://www.w3.org/2000/svg}text")]


def test_a_run_has_all_its_pictures_with_labels(drawn):
    assert list(drawn) == ["rounds", "classes", "gap", "clients", "shots", "labels", "long_tail"]
    assert all(labelled(figure) for figure in drawn.values())
    assert "accuracy (%)" in texts(drawn["rounds"])
    assert "gain (percentage points)" in texts(drawn["gap"])


def test_they_are_written_beside_the_run(finished_sweep, tmp_path):
    directory = shutil.copytree(finished_sweep / "trials" / "0003", tmp_path / "0003")
    paths = draw(directory)
    assert [p.stem for p in paths] == ["rounds", "classes", "clients", "shots", "labels", "long_tail"]
    before = [p.read_bytes() for p in paths]
    assert [p.read_bytes() for p in draw(directory)] == before, "the same run gives the same bytes"
    assert ET.fromstring(before[0]).tag.endswith("svg")


def test_accuracy_over_rounds(drawn, tuned):
    (axes,) = drawn["rounds"].axes
    line = next(each for each in axes.lines if each.get_label() == "personal (own label mix)")
    rounds, values = tuned[0].series(METRIC)
    assert line.get_xdata().tolist() == rounds == [1, 2, 3]
    assert line.get_ydata() == pytest.approx([100 * v for v in values])
    assert [each.get_xdata()[0] for each in axes.lines if each.get_linewidth() < 1] == [2.5], "the first phase ends"


def test_classes_lie_before_their_sizes_largest_first(drawn, tuned):
    front, behind = drawn["classes"].axes
    rows = sorted(tuned[0].per_class, key=lambda row: -row["train"])
    assert behind.patches[0].get_data().values.tolist() == [row["train"] for row in rows]
    generic = next(line for line in front.lines if line.get_label() == "generic")
    assert generic.get_ydata() == pytest.approx([100 * row["generic_acc"] for row in rows])
    assert front.get_zorder() > behind.get_zorder()


def test_the_gap_is_the_difference_to_the_reference(drawn, tuned):
    """Fine-tuning leaves the generic model as it was, so only the personal bars are there."""
    (bars,) = drawn["gap"].axes[0].containers
    there = {row["class"]: row["personal_acc_owned"] for row in tuned[1].per_class}
    rows = sorted(tuned[0].per_class, key=lambda row: -row["train"])
    assert [bar.get_height() for bar in bars] == pytest.approx(
        [100 * (row["personal_acc_owned"] - there[row["class"]]) for row in rows]
    )


def test_the_area_of_a_bubble_is_the_number_of_samples(drawn, tuned):
    bubbles = drawn["labels"].axes[0].collections[0]
    counts = tuned[0].counts
    at = bubbles.get_offsets().astype(int)
    assert len(at) == (counts > 0).sum()
    found = bubbles.get_sizes() / counts[at[:, 0], at[:, 1]]
    assert found == pytest.approx(np.full(len(at), found[0]))


def test_clients_one_by_one_and_many_sorted(drawn, tuned):
    line = drawn["clients"].axes[0].lines[0]
    assert line.get_ydata() == pytest.approx([100 * row["acc_dist"] for row in tuned[0].per_client])
    many = run("many", clients=[(7 * i) % 100 / 100 for i in range(100)], personal_acc_dist=0.5)
    (figure,) = (p.figure for p in pictures(many) if p.name == "clients")
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx(np.arange(100))
    assert "sorted" in figure.axes[0].get_xlabel()


def test_shots(drawn, tuned):
    last = tuned[0].record()["last"]
    names = [text.get_text() for text in drawn["shots"].axes[0].get_xticklabels()]
    assert names == ["many", "medium", "few", "head", "middle", "tail"]
    bars = drawn["shots"].axes[0].containers[1]
    found = dict(zip(names, (bar.get_height() for bar in bars), strict=True))
    assert {k: v for k, v in found.items() if not np.isnan(v)} == pytest.approx(
        {s: 100 * last[f"{METRIC}_{s}"] for s in names if f"{METRIC}_{s}" in last}
    )


def test_an_empty_run_has_no_pictures(tmp_path):
    assert draw(tmp_path) == []


# What algorithms give of themselves -----------------------------------------------------------------------------------

AXES = {"title": "Norms", "x": "class", "y": "norm of its row", "note": "Fig. 1"}


def test_declared_pictures_are_drawn_with_their_numbers():
    figure = draw_declared(Lines(**AXES, at=[0, 1, 2], series={"body": [1.0, None, 3.0], "head": [0.0, 1.0, 2.0]}))
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("class", "norm of its row")
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([1.0, np.nan, 3.0], nan_ok=True)
    assert {"body", "head"} <= set(texts(figure))
    figure = draw_declared(Bars(**AXES, groups=["a", "b"], series={"one": [1.0, -2.0]}))
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.0, -2.0]
    figure = draw_declared(Points(**AXES, series={"one": [[1.0, 2.0], [3.0, 4.0]]}))
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    figure = draw_declared(Heatmap(**AXES, rows=["r"], columns=["a", "b"], values=[[0.25, None]], colour="cosine"))
    assert {"0.25", "cosine", "r", "a", "b"} <= set(texts(figure))


def test_an_algorithms_own_pictures_come_with_the_run(finished_sweep, tmp_path):
    directory = shutil.copytree(finished_sweep / "trials" / "0003", tmp_path / "0003")
    figures = directory / "artifacts" / "1-fedavg.train" / "portraits"
    figures.mkdir(parents=True)
    (figures / "norms.json").write_text(json.dumps(Bars(**AXES, groups=["a"], series={"s": [1.0]}).to_json()))
    (figures / "bad.json").write_text('{"kind": "Bars", "title": 3}')
    found = read_run(directory)
    (own,) = (p for p in pictures(found) if p.name.startswith("own-"))
    assert (own.name, own.caption) == ("own-norms", "Norms. Fig. 1")
    assert any("the picture bad is not shown: not a Bars" in note for note in found.notes)


# Comparisons ----------------------------------------------------------------------------------------------------------


def comparison(configurations, goals=(0.5,)):
    ranked = ranking(configurations, METRIC)
    return Comparison(ranked, METRIC, "max", ranked[-1], goals, True)


def test_methods_side_by_side(finished_sweep):
    found = compared([read_source(finished_sweep)])
    drawn = {p.name: p.figure for p in compare(comparison(found, [0.0, 2.0]))}
    assert list(drawn) == ["rounds", "target", "time", "shots", "clients"]
    assert all(labelled(figure) for figure in drawn.values())
    best = ranking(found, METRIC)[0]
    line = drawn["rounds"].axes[0].lines[0]
    assert line.get_label() == best.name
    assert line.get_ydata()[-1] == pytest.approx(100 * np.mean(best.values(METRIC)))
    heights = [[bar.get_height() for bar in bars] for bars in drawn["target"].axes[0].containers]
    assert all(reached == 1.0 and np.isnan(never) for reached, never in heights), "0 at once, 2 never"
    assert len(drawn["clients"].axes[0].lines[0].get_ydata()) == 6


def segmented(name, method, images, said, seed=0):
    """Return a configuration of one run whose personal model gives every pixel one class, where its client knows 1."""
    shape = (len(images), *images.shape[2:])
    truth = np.ones(shape, int)
    examples = {"images": images, "truth": truth, "names": np.array(["a", "b"]), "clients": np.array([3])}
    examples |= {"known": truth[None], "personal": np.full((1, *shape), said)}
    about = {"id": name, "name": name, "tags": {"algorithm": method}}
    one = run(name, seed, personal_miou=said / 10)
    return configuration(replace(one, about=about, counts=np.ones((1, 3), int), examples=examples))


def segments_of(*configurations):
    c = Comparison(configurations, "personal/miou", "max", configurations[-1], (), True)
    found = {p.name: p.figure for p in compare(c)}
    titled = [(a.get_title(loc="center"), a) for a in found["segments"].axes] if "segments" in found else []
    return {title: axes.images[0].get_array()[0, 0].tolist() for title, axes in titled if title}


def test_the_best_of_each_method_segments_the_same_images():
    images, other = np.zeros((2, 3, 4, 4), np.uint8), np.ones((2, 3, 4, 4), np.uint8)
    found = [segmented("x rate=1", "x", images, 1), segmented("x rate=2", "x", images, 2)]
    found += [segmented("y rate=1", "y", images, 2), segmented("z rate=1", "z", other, 0)]
    shown = segments_of(*found, segmented("w rate=1", "w", images, 0, seed=1))
    assert list(shown) == ["image", "truth of client 3", "x rate=1", "y rate=1"], "of the same images and split"
    assert shown["x rate=1"] == shown["truth of client 3"] != shown["y rate=1"]
    assert list(segments_of(*found[:2])) == ["image", "truth of client 3", "rate=1", "rate=2"], "of one method all"
    assert segments_of(found[0], found[3]) == {}, "nothing to compare"


def search(points, score):
    """Return a search over hyperparameters whose result is a formula of them."""
    found = []
    for i, params in enumerate(points):
        one = configuration(run(f"method {i}", personal_acc_dist=score(**params)))
        one.trials[0]["params"] = {f"local.{k}": v for k, v in params.items()} | {"seed": 0}
        found.append(one)
    return found


def test_two_hyperparameters_make_a_heat_map_with_the_best_framed():
    found = search([{"a": a, "b": b} for a in (1, 2, 3) for b in ("x", "y")], lambda a, b: a / 10 + (b == "y") / 20)
    drawn = {p.name: p.figure for p in compare(comparison(found))}
    axes = drawn["two"].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("local.a", "local.b")
    rows = [text.get_text() for text in axes.get_yticklabels()]
    values = dict(zip(rows, axes.images[0].get_array().tolist(), strict=True))
    assert values["x"] == pytest.approx([10, 20, 30])
    assert values["y"] == pytest.approx([15, 25, 35])
    frame = axes.patches[0]
    assert (frame.get_x() + 0.5, rows[round(frame.get_y() + 0.5)]) == (2, "y")


def test_the_line_over_one_hyperparameter_is_the_mean_over_the_others():
    found = search([{"a": a, "b": b} for a in (1, 2) for b in (0, 1)], lambda a, b: a / 10 + b / 20)
    figure = next(p.figure for p in compare(comparison(found)) if p.name == "one")
    over_a = next(axes for axes in figure.axes if axes.get_xlabel() == "local.a")
    assert over_a.lines[0].get_ydata() == pytest.approx([12.5, 22.5])


def test_methods_under_an_open_setting_are_a_hyperparameter_too():
    found = search([{"a": a, "m": m} for a in (1, 2) for m in (0, 1)], lambda a, m: a / 10 + m / 5)
    for each in found:
        each.trials[0]["params"]["case"] = each.trials[0]["params"].pop("local.m")
        each.trials[0]["run"].about["tags"] = {"algorithm": "xy"[each.trials[0]["params"]["case"]]}
    (two,) = (p.figure for p in compare(comparison(found)) if p.name == "two")
    names = [text.get_text() for text in two.axes[0].get_xticklabels()]
    assert sorted(names) == ["0: x", "1: y"]
    column = two.axes[0].images[0].get_array()[:, names.index("1: y")]
    assert sorted(column.tolist()) == pytest.approx([30, 40])


def test_what_matters_is_most_important():
    points = [{"a": a, "b": b, "c": c} for a in (0.001, 0.01, 0.1, 1.0) for b in (1, 2) for c in ("x", "y")]
    found = search(points, lambda a, b, c: 0.5 + 0.1 * np.log10(a) + 0.01 * b)
    knobs = hyperparameters.knobs(found)
    found_shares = hyperparameters.importance(knobs, [c.values(METRIC)[0] for c in found])
    shares = dict(zip([k.label for k in knobs], found_shares, strict=True))
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["a"] > 0.8
    assert shares["c"] < 0.05
    names = [p.name for p in compare(comparison(found))]
    assert names[-4:] == ["importance", "one", "two", "parallel"]


def test_too_few_trials_have_no_importance():
    found = search([{"a": a, "b": a} for a in range(7)], lambda a, b: a / 10)
    captions = {p.name: p.caption for p in compare(comparison(found))}
    assert "importance" not in captions
    assert "7 configurations are too few to tell the importance of each; 8 are needed." in captions["one"]


def test_drawn_from_ranges_they_are_points():
    rng = np.random.default_rng(0)
    drawn = search(
        [{"a": float(a), "b": float(b), "c": None} for a, b in rng.uniform(0.001, 1, (9, 2))], lambda a, b, c: a
    )
    figures = {p.name: p.figure for p in compare(comparison(drawn))}
    assert len(figures["one"].axes) == 2, "what does not differ is not open"
    assert figures["one"].axes[0].get_xscale() == "log"
    assert not figures["one"].axes[0].lines
    assert len(figures["two"].axes[0].collections[0].get_offsets()) == 9


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_are_text_whatever_they_contain(tmp_path):
    """Not formulas, not markup, and no character that XML forbids."""
    a = configuration(run(f"{HOSTILE} a", personal_acc_dist=[0.1, 0.2], clients=(0.1, 0.2)))
    b = configuration(run("b", personal_acc_dist=[0.2, 0.3], clients=(0.1, 0.2)))
    for picture in compare(comparison([a, b])):
        found = texts(picture.figure)
        if picture.name == "rounds":
            assert any("<script>alert(1)</script> $x^{$ & \ufffd\ufffd 中文" in (text or "") for text in found)
    bars = draw_declared(Bars(title=HOSTILE, x=HOSTILE, y=HOSTILE, groups=[HOSTILE], series={HOSTILE: [1], "$": [2]}))
    assert sum("$x^{$" in (text or "") for text in texts(bars)) >= 4


def test_series_differ_without_colour():
    looks = [look(i) for i in range(16)]
    assert len({(each.marker, str(each.line)) for each in looks[:8]}) == 8
    assert len({(each.colour, each.marker) for each in looks}) == 16


@pytest.mark.parametrize("length", [5, 14, 20, 30, 36, 60])
@styled
def test_a_legend_stays_within_its_picture(length):
    figure, axes = canvas()
    for i in range(8):
        axes.plot([0, 1], [0, i], label=plain("configuration " * 9, length))
    legend(axes)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert 0 <= box.y0 < box.y1 < axes.get_window_extent().y0


def test_drawing_leaves_the_callers_style_alone(tuned):
    import matplotlib

    before = dict(matplotlib.rcParams)
    pictures(tuned[1])
    assert dict(matplotlib.rcParams) == before


def test_the_fixture_is_not_touched(finished_sweep):
    assert not list(Path(finished_sweep).rglob("pictures"))
