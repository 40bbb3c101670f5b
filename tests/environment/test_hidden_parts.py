"""Every test module is collected where an optional part is missing: skipped with a reason, never an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.optional_parts import PARTS, PROGRAMS

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "hidden_parts.py"


@pytest.fixture(scope="module")
def collected() -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("part", [*PARTS, *PROGRAMS])
def test_without_it_nothing_fails_to_collect(part: str, collected: dict[str, dict[str, Any]]) -> None:
    found = collected[part]
    assert found["status"] in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), found["output"]


def test_modules_that_need_a_part_are_found(collected: dict[str, dict[str, Any]]) -> None:
    """Directly, through our own code, and by asking for it."""
    assert all(collected[part]["modules"] for part in ("scipy", "lm_eval", "ziglang", "promtool", "flydsl"))
