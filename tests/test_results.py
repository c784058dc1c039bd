"""The documents say what the kept results say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "results"))

import documents  # noqa: E402


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_kept_runs(path):
    text = path.read_text(encoding="utf-8")
    assert documents.written(text) == text, "`python results/documents.py` writes them again"


def test_every_table_is_shown_somewhere_and_nothing_else_is_asked_for():
    asked = [found[2] for path in documents.DOCUMENTS for found in documents.BLOCK.finditer(path.read_text("utf-8"))]
    assert set(asked) == set(documents.BLOCKS)


def test_what_stands_between_marks_is_replaced_and_the_rest_is_left():
    text = "a\n<!-- end of catalogue -->\nb\n<!-- cifar10 claims short -->\nyesterday\n<!-- end -->\nc\n"
    new = documents.written(text)
    assert new.startswith("a\n<!-- end of catalogue -->\nb\n<!-- cifar10 claims short -->\n| claim |")
    assert new.endswith(" |\n<!-- end -->\nc\n")
    assert "yesterday" not in new


def test_what_is_kept_is_small():
    size = sum(path.stat().st_size for path in documents.RESULTS.rglob("*") if path.is_file())
    assert size < 20 * 2**20
