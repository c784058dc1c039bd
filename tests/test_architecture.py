"""The rules of the house, read off the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import algorithms

ROOT = Path(__file__).parents[1]


def imports(path: Path) -> set[str]:
    """Return the top-level packages a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources("algorithms"), ids=lambda p: p.stem)
def test_the_science_knows_nothing_of_the_engine(path):
    assert not imports(path) & {"ray", "mlflow", "orchestrator", "matplotlib"}


RAY_FILES = ("actors", "machines", "trial", "sweep", "space", "search", "schedulers")


@pytest.mark.parametrize("path", sources("orchestrator"), ids=lambda p: p.stem)
def test_each_platform_stays_in_its_files(path):
    assert "mlflow" not in imports(path) or path.stem == "tracking"
    assert "ray" not in imports(path) or path.stem in RAY_FILES


def words(path: Path) -> set[str]:
    """Return every word of a file's code: names and texts, but neither comments nor docstrings."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found |= set(re.findall(r"\w+", node.value))
    return found


@pytest.mark.parametrize("path", sources("orchestrator"), ids=lambda p: p.stem)
def test_the_engine_knows_no_algorithm_by_name(path):
    names = algorithms.names()
    # "local" is also a part of an experiment, and `Local` its class.
    assert not words(path) & ({*names, *(algorithms.find(n).__name__ for n in names)} - {"local", "Local"})


@pytest.mark.parametrize("path", sources("orchestrator") + sources("algorithms"), ids=lambda p: p.stem)
def test_nothing_executes_what_it_reads(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(pickle\.loads?|yaml\.load|(?<!\.)eval|(?<!\.)exec|torch\.load)\(", text)


def test_reading_an_experiment_starts_nothing():
    code = (
        "import sys, orchestrator.experiment, orchestrator.space, orchestrator.tracking;"
        "print([m for m in ('ray', 'mlflow', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_versions_are_pinned_and_ranges_hold():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert pins["torch"] == "2.13.0"
    assert pins["torchvision"] == "0.28.0"
    assert {"ray", "mlflow", "numpy", "pyyaml", "pydantic", "safetensors", "pytest"} <= {k.lower() for k in pins}
