"""Every row of the articles has tests that exist, are collected, and are not skipped by a mark."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.repository import ROOT

from kimi_w4a8_eagle3.base.toml import tomllib

TABLE = tomllib.loads((ROOT / "tests/articles/rows.toml").read_text())
ROWS = {
    f"{article}: {row}": [tests] if isinstance(tests, str) else tests
    for article, rows in TABLE.items()
    for row, tests in rows.items()
}
LEAST = 74  # rows; a row never leaves
PROGRAM = """
import json, sys
import pytest

class Found:
    def pytest_collection_modifyitems(self, items):
        kept = [item for item in items if not any(item.iter_markers("skip"))]
        kept = [item for item in kept if not any(mark.args[0] for mark in item.iter_markers("skipif"))]
        print("FOUND", json.dumps(sorted({item.nodeid.partition("[")[0] for item in kept})))

pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-n0", *sys.argv[1:]], plugins=[Found()])
"""


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Tests of all files that the table names, without those that a mark skips."""
    files = sorted({test.partition("::")[0] for tests in ROWS.values() for test in tests})
    files = [name for name in files if (ROOT / name).is_file()]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *files], cwd=ROOT, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [done.stdout + done.stderr]
    return set(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition(": ")[2])
def test_a_row_of_an_article_is_held_by_tests(row: str, collected: set[str]) -> None:
    assert ROWS[row] and [test for test in ROWS[row] if test not in collected] == []


def test_no_row_is_lost() -> None:
    assert len(ROWS) >= LEAST
