"""The report: what it says is what was found, whatever a name contains and whatever is missing."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
import yaml

from orchestrator import report
from orchestrator.comparison import t_test
from orchestrator.findings import claim_rows, collect, conclusion, p_value, ranking_rows, significance
from orchestrator.summary import HEADLINE, configurations

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> $x_{ [bold]& \x07"


class Page(HTMLParser):
    """A page's tables, texts, tags and whatever it would load."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.loads, self.text, self.cell = [], [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [v for k, v in attributes if k in ("src", "href", "srcset", "data", "action", "poster")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.cell:
            self.tables[-1][-1][-1] += data

    def table(self, *heads):
        """Return the first table that has these columns, as a list of mappings."""
        first = next(t for t in self.tables if set(heads) <= set(t[0]))
        return [dict(zip(first[0], row, strict=True)) for row in first[1:]]


def written(*directories, **options):
    found = collect(list(directories), **options)
    return report.html(found, report.compared_pictures(found))


@pytest.fixture(scope="module")
def page(finished_sweep, tmp_path_factory):
    directory = shutil.copytree(finished_sweep, tmp_path_factory.mktemp("runs") / "methods")
    (directory / "mlflow.json").write_text(json.dumps({"tags": {"version.torch": "2.13.0"}}))
    page = Page(written(directory))
    page.directory = directory
    return page


@pytest.fixture
def sweep(finished_sweep, tmp_path):
    return shutil.copytree(finished_sweep, tmp_path / "methods")


def test_the_ranking_has_the_numbers_of_the_summary(page, finished_sweep):
    summary = json.loads((finished_sweep / "summary.json").read_text())
    expected = {c.name: [c.show(m) for m in HEADLINE] for c in configurations(summary)}
    rows = page.table("rank", "p, by seed")
    assert {row["name"]: [row[m] for m in HEADLINE] for row in rows} == expected
    means = [float(row["personal/acc_dist"].split()[0]) for row in rows]
    assert means == sorted(means, reverse=True)
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    trials = page.table("trial", "fingerprint")
    for row, trial in zip(trials, summary["trials"], strict=True):
        assert row["personal/acc_dist"] == f"{trial['last']['personal/acc_dist']:.4f}"
        assert trial["fingerprint"].startswith(row["fingerprint"])
        at = trial["best_at"]["personal/acc_dist"]["round"]
        assert row["best personal/acc_dist"] == f"{trial['best']['personal/acc_dist']:.4f} in round {at}"


def test_the_tests_are_told_with_their_pairs(page, finished_sweep):
    """Three seeds, and of each the six clients that have a local test."""
    best, *others = page.table("rank", "p, by seed")
    assert (best["p, by seed"], best["p, by client"]) == ("", "")
    tests = significance(collect([finished_sweep]))
    for row in others:
        by_seed, by_client = tests[row["name"]]
        assert (by_seed.pairs, by_client.pairs) == (3, 18)
        shown = "< 0.001" if by_seed.p < 0.001 else f"{by_seed.p:.3f}"
        assert row["p, by seed"] == f"{shown} (n = 3)"
        assert row["p, by client"].endswith("(n = 18)")


def test_it_says_how_to_repeat_and_where_it_ran(page):
    assert f"python -m orchestrator.tune {page.directory}/sweep.yaml" in page.text
    assert (page.directory / "sweep.yaml").read_text().strip() in page.text
    assert ["version.torch", "2.13.0"] in [row for table in page.tables for row in table]


def test_it_needs_no_network(page):
    assert page.loads
    assert all(load.startswith(("data:image/svg+xml;base64,", "#")) for load in page.loads)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(page.tags)


def test_the_leaderboard_ranks_under_all_metrics(page, finished_sweep, capsys):
    rows = page.table("mean rank", "personal/acc_worst10")
    assert [float(row["mean rank"]) for row in rows] == sorted(float(row["mean rank"]) for row in rows)
    ranks = sorted(float(re.search(r"\((.*)\)", row["personal/acc_owned"])[1]) for row in rows)
    assert sum(ranks) == 6
    assert report.main([str(finished_sweep), "--leaderboard"]) == 0
    out = capsys.readouterr().out
    assert all(row["mean rank"] in out and row["name"] in out for row in rows)
    assert "2 rounds, 3 clients a round; seed 0, 1, 2" in out


def test_a_claim_is_tested_in_pairs(finished_sweep, capsys):
    assert report.main([str(finished_sweep), "--tests", "--reference", "local", "--metric", "personal/acc_owned"]) == 0
    out = capsys.readouterr().out
    assert "local has personal/acc_owned" in out
    found = collect([finished_sweep], metric="personal/acc_owned", reference="local")
    local, others = found.reference, [c for c in found.configurations if c is not found.reference]
    for (name, value, by, pairs, seed, client), other in zip(claim_rows(found), others, strict=True):
        gain = [a - b for a, b in zip(local.values(found.metric), other.values(found.metric), strict=True)]
        assert (name, value) == (other.name, other.show(found.metric))
        assert float(by) == pytest.approx(sum(gain) / 3, abs=6e-5)
        assert pairs == f"{sum(g > 0 for g in gain)} of 3"
        assert seed == p_value(t_test(local, other, found.metric))
        assert client.endswith("(n = 18)")
        assert all(cell in out for cell in (value, by, pairs))


def test_less_is_better_where_a_metric_says_so(finished_sweep):
    found = collect([finished_sweep], metric="train/loss", reference="local")
    local = found.reference
    for (_, _, by, *_), other in zip(claim_rows(found), [c for c in found.able if c is not local], strict=True):
        less = sum(other.values("train/loss")) - sum(local.values("train/loss"))
        assert float(by) == pytest.approx(less / 3, abs=6e-5)


def test_a_claim_needs_pairs(finished_sweep, capsys):
    assert report.main([str(finished_sweep / "trials" / "0000"), "--tests"]) == 2
    assert "no two configurations have been run with one seed on one split" in capsys.readouterr().err


def test_runs_are_compared_but_ranked_together_only_on_the_same_split(finished_sweep, tmp_path):
    trials, out = finished_sweep / "trials", tmp_path / "three.html"
    assert report.main([*(str(trials / id) for id in ("0000", "0003", "0007")), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert {row["name"] for row in page.table("rank")} == {"local", "fedavg", "fedavg+finetune"}
    assert "There are 2 tables" in page.text
    assert "The runs are on 2 different splits of the data; each seed has its own." in page.text
    assert "only those within one table of the leaderboard are comparable" in page.text
    assert conclusion(collect([trials / "0000", trials / "0003"]))[-1] == "The runs are on the same split of the data."


def test_it_ranks_by_what_is_asked_for(finished_sweep):
    found = collect([finished_sweep], metric="generic/acc", reference="local", goals=[0.25])
    assert found.reference.name == "local"
    assert (found.metric, found.targets, found.given) == ("generic/acc", [0.25], True)
    assert {c.name for c in found.able} == {"fedavg", "fedavg+finetune"}, "one method has no generic model"
    assert collect([finished_sweep]).reference.name == "fedavg", "the plain one"
    assert [row["rank"] for row in ranking_rows(found)] == [1, 2, ""]


def test_a_loss_is_better_when_low_and_no_run_counts_twice(finished_sweep):
    found = collect([finished_sweep, finished_sweep / "trials" / "0003", finished_sweep], metric="train/loss")
    assert len(found.runs) == 9
    means = [sum(c.values("train/loss")) for c in found.able]
    assert means == sorted(means)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{empty}"], "neither a sweep's directory"),
        (["{empty}/nowhere"], "is not a directory"),
        (["{sweep}", "--metric", "generic/ac"], "did you mean 'generic/acc'?"),
        (["{sweep}", "--reference", "fedavgg"], "did you mean 'fedavg'?"),
        (["{sweep}", "--out", "{empty}/no/where.html"], "choose another place with --out"),
    ],
)
def test_mistakes_are_told_in_a_paragraph(finished_sweep, tmp_path, capsys, arguments, reason):
    given = [a.format(empty=tmp_path, sweep=finished_sweep) for a in arguments]
    assert report.main(given) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert reason in told
    assert "Traceback" not in told


# What is missing ------------------------------------------------------------------------------------------------------


def test_what_is_damaged_is_named_and_the_rest_is_shown(sweep, capsys):
    trials = sweep / "trials"
    (sweep / "summary.json").write_text('{"schema": 99}')
    log = trials / "0000" / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    (trials / "0001" / "status.json").write_text("{")
    shutil.rmtree(trials / "0002" / "artifacts")
    for path in (trials / "0004").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (trials / "0005" / "status.json").write_text('{"status": "FAILED", "error": "client 3: out of memory\\nTraceback"}')
    assert report.main([str(sweep)]) == 0
    out = capsys.readouterr().out
    page = Page((sweep / "report.html").read_text())
    for note in (
        "methods: summary.json has schema 99, this version reads 1; it is not used",
        "trials/0000: the last line of metrics.jsonl is torn, and left out",
        "status.json is damaged",
        "there are no tables per class and per client",
        "it has not begun",
        "it has not ended (status FAILED)",
    ):
        assert note in out
        assert note in page.text
    rows = {row["trial"]: row for row in page.table("trial", "error")}
    assert rows["0005"]["error"] == "client 3: out of memory"
    assert len(rows) == 9
    assert page.table("rank")[0]["name"] == "fedavg+finetune"
    assert {"rounds.svg", "target.svg", "time.svg"} <= {path.name for path in (sweep / "pictures").iterdir()}


def test_nothing_but_an_empty_sweep(tmp_path):
    (tmp_path / "trials").mkdir()
    page = Page(written(tmp_path))
    assert "0 trials of 0 configurations: none." in page.text
    assert "there are no trials" in page.text
    assert "There is nothing to rank." in page.text


def test_a_run_that_has_not_ended_has_its_pictures(sweep):
    trial = sweep / "trials" / "0006"
    (trial / "status.json").write_text('{"status": "RUNNING"}')
    page = Page(written(trial))
    assert "Nothing is ranked: no trial that has ended reports personal/acc_dist." in page.text
    assert page.tags.count("img") == 6


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(finished_sweep, tmp_path_factory):
    """A sweep in which everything that has a name has a hostile one, and its report."""
    sweep = shutil.copytree(finished_sweep, tmp_path_factory.mktemp("runs") / "<b onmouseover=x>")
    for path in (sweep / "trials").iterdir():
        about = json.loads((path / "trial.json").read_text())
        about["name"] = f"{about['name'].split()[0]} {HOSTILE} seed={about['params']['seed']}"
        about["params"] |= {HOSTILE: about["params"]["case"]}
        (path / "trial.json").write_text(json.dumps(about))
        state = json.loads((path / "status.json").read_text())
        (path / "status.json").write_text(json.dumps(state | {"error": HOSTILE}))
        experiment = yaml.safe_load((path / "experiment.yaml").read_text())
        experiment["data"]["name"] = HOSTILE
        (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    (sweep / "sweep.yaml").write_text(f"# </pre>{HOSTILE}")
    return sweep, report.write_report(collect([sweep]))


def test_names_are_text_whatever_they_contain(hostile, capsys):
    sweep, file = hostile
    page = Page(file.read_text())
    assert page.tags.count("script") == 1
    assert "b" not in page.tags
    assert HOSTILE.replace("\x07", "") in page.text.replace("\x07", "")
    assert all(load.startswith(("data:image/svg+xml;base64,", "#")) for load in page.loads)
    assert report.main([str(sweep), "--leaderboard"]) == 0
    assert "[bold]&" in capsys.readouterr().out


def test_it_starts_quickly():
    code = (
        "import sys, orchestrator.report;"
        "print([m for m in ('torch', 'ray', 'mlflow', 'matplotlib', 'scipy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# In a browser ---------------------------------------------------------------------------------------------------------

#: Shows a page in frames as wide as a desk's screen and as a telephone's (a window cannot be that narrow), and writes
#: down what it finds in each.
FRAMES = """<!doctype html><title>waiting</title>
<iframe src="report.html" style="width: 1280px"></iframe><iframe src="report.html" style="width: 360px"></iframe>
<script>onload = () => document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, root = page.documentElement, images = [...page.images];
  const resources = frame.contentWindow.performance.getEntriesByType("resource");
  const head = page.querySelector("#trials th");
  head.click(), head.click();
  return {
    title: page.title, width: root.clientWidth, needs: root.scrollWidth, images: images.length,
    broken: images.filter(image => !image.complete || !image.naturalWidth).length,
    first: page.querySelector("#trials tbody td").textContent,
    loaded: resources.map(each => each.name).filter(name => !name.startsWith("data:")),
  };
}))</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_in_a_browser(hostile, tmp_path):
    """Pictures are shown, nothing is loaded, no script of a name runs, tables sort, and no page is too wide."""
    shutil.copy(hostile[1], tmp_path / "report.html")
    (tmp_path / "frames.html").write_text(FRAMES)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1700,1000"]
    command = [
        CHROMIUM,
        *flags,
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        f"{tmp_path.as_uri()}/frames.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    desk, telephone = json.loads(unescape(re.search("<title>(.*)</title>", done.stdout)[1]))
    assert desk["width"] > 1200 > 360 >= telephone["width"]
    for found in (desk, telephone):
        assert found["title"] == "<b onmouseover=x>"
        assert found["needs"] == found["width"]
        assert found["images"] > 10
        assert found["broken"] == 0
        assert found["loaded"] == []
        assert found["first"] == "0008", "sorted twice, the last trial comes first"
