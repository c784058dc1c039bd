"""MLflow's pages of a real sweep, in a real browser; the screenshots stay in .screenshots/."""

import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_command import run

from orchestrator import tracking

KEPT = Path(__file__).parents[1] / ".screenshots"
SWEEP = """\
search: {metric: personal/acc_owned}
experiment:
  data: {name: digits, clients: 6, imbalance: 5}
  local: {lr: 0.1, batch: 16}
  rounds: 6
  clients_per_round: 3
  evaluate: {every: 2}
cases:
  - algorithm: fedavg
  - algorithm: [fedavg, {ecl: {epochs: 1}}]
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Run a sweep."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "small.yaml").write_text(SWEEP)
    code, text, error = run(folder / "small.yaml", "--out", folder / "runs")
    assert code == 0, text + error
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def server(sweep):
    """Start what the command says to type, at a free port, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    setting, *words = shlex.split(tracking.ui_command(tracking.default_uri(sweep.parent)))
    name, value = setting.split("=")
    words[words.index("--port") + 1] = str(port)
    process = subprocess.Popen(
        words,
        env=os.environ | {name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            assert urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
            break
        except OSError:
            assert time.monotonic() < deadline, "MLflow does not answer"
            time.sleep(0.5)
    yield address
    os.killpg(process.pid, 15)
    process.wait(timeout=30)


def test_mlflow_shows_the_sweep(sweep, server):
    record = json.loads((sweep / "mlflow.json").read_text())
    parent, (plain, chained) = record["parent"], record["runs"].values()
    runs = f"{server}/#/experiments/{record['experiment_id']}/runs"
    with Browser() as browser:

        def look(address, name, *wanted):
            """Open a page, wait for what must be on it, and keep a picture."""
            browser.open(address)
            try:
                for script in wanted:
                    browser.find(script)
            finally:
                time.sleep(2)  # for what is drawn after it is there
                browser.keep(KEPT / f"{name}.png")

        def text(words):
            return f"document.body.innerText.includes({json.dumps(words)})"

        look(f"{runs}?workflowType=machine_learning", "runs", text("small"), text("3 matching runs"))
        links = [f"""document.querySelector('a[href$="/runs/{child}"]')?.innerText""" for child in (plain, chained)]
        scores = json.loads((sweep / "summary.json").read_text())["trials"]
        table = [text(f"{trial['last']['personal/acc_owned']:.4f}") for trial in scores]
        look(f"{runs}/{parent}", "parent", *links, *table, text("To repeat:"))
        drawn = """document.querySelectorAll(".js-plotly-plot .scatterlayer path.js-line").length >= 3"""
        look(f"{runs}/{chained}/model-metrics", "metrics", text("generic"), drawn)
        image = """[...document.images].some(i => i.naturalWidth > 200 && /^blob:|svg/.test(i.src))"""
        look(f"{runs}/{chained}/artifacts/pictures/classes.svg", "picture", image)
        frame = """document.querySelector("iframe")"""
        look(f"{runs}/{parent}/artifacts/report.html", "report", frame)
