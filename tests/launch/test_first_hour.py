"""docs/perf/first-hour.md: every problem of the three rounds names tests that exist."""

from __future__ import annotations

import re

from support.repository import ROOT


def test_every_problem_names_its_tests() -> None:
    page = (ROOT / "docs/perf/first-hour.md").read_text()
    rows = dict(re.findall(r"^\| ([FR]?\d+) \|.*\| ([^|]+) \|$", page, re.MULTILINE))
    assert list(rows) == [
        *(f"F{number}" for number in range(12)),
        *map(str, range(1, 13)),
        *(f"R{number}" for number in range(1, 13)),
    ]
    for name, cell in rows.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
        assert tests, name
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(), (name, test)
