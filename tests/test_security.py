"""What SECURITY.md promises and other tests do not already show."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import orchestrator

ROOT = Path(orchestrator.__file__).parents[1]

#: First version without the flaw; an advisory stands for all that it fixes.
ADVISORIES = {
    "ray": {
        "CVE-2023-6019 command injection": "2.8.1",
        "CVE-2025-62593 code execution by DNS rebinding": "2.52.0",
        "CVE-2026-27482 unauthenticated DELETE": "2.54.0",
    },
    "mlflow": {
        "CVE-2026-2033 code execution by artifacts": "3.8.0",
        "CVE-2026-2614 path traversal": "3.9.1",
        "CVE-2026-116690 unauthenticated file read": "3.17.0",
    },
    "torch": {"CVE-2025-32434 code execution by torch.load": "2.6.0"},
}


def pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def least(package):
    """Return the oldest version that our requirements allow."""
    text = (ROOT / "pyproject.toml").read_text()
    wanted = [Requirement(found) for found in re.findall(r'"([a-z]+(?:\[[a-z]+\])?>=[^"]+)"', text)]
    return [Version(s.version) for r in wanted if r.name == package for s in r.specifier if s.operator == ">="]


@pytest.mark.parametrize(("package", "flaw"), [(p, flaw) for p, flaws in ADVISORIES.items() for flaw in flaws])
def test_known_flaws_are_shut_out(package, flaw):
    fixed = Version(ADVISORIES[package][flaw])
    assert Version(pinned()[package]) >= fixed
    assert Version(version(package)) >= fixed
    assert min(least(package)) >= Version(".".join(str(fixed).split(".")[:2])), "nor may anybody install an older one"


FORBIDDEN = (
    r"\b(pickle\.loads?|cloudpickle|yaml\.(load|unsafe_load|full_load)|torch\.load|eval|exec|os\.system)\(|shell=True"
)


def test_nothing_in_the_project_runs_what_it_reads():
    found = [
        f"{path}:{number}"
        for folder in ("orchestrator", "algorithms", "search_spaces", "cluster")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(FORBIDDEN, line) and ".eval(" not in line
    ]
    assert found == []


def test_the_search_for_it_would_find_it():
    assert all(
        re.search(FORBIDDEN, line) for line in ("x = eval(y)", "yaml.load(f)", "torch.load(path)", "pickle.loads(b)")
    )
