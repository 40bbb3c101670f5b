"""The clients of this environment, through the command of docs/perf/clients.md, and how its table tells failures."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
from support.repository import ROOT

from proof.agents.matrix import MatrixRow, table


@pytest.mark.slow
@pytest.mark.server
def test_the_sdks_of_this_environment_reach_every_turn() -> None:
    words = [sys.executable, "-m", "proof.agents", "--here", "--only", "openai", "--only", "anthropic"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for client, api in (("openai", "chat"), ("openai", "responses"), ("anthropic", "messages")):
        assert f"| {client} | {version(client)} | {api} | 6 of 6 | 6 of 6 | 0 | answered |" in done.stdout


def test_a_row_says_what_was_broken_or_is_not_to_be_had() -> None:
    broken = MatrixRow("a", "1", "chat", turns=1, of=3, calls=1, refused=1, second=False)
    absent = MatrixRow("b", "b==2", why=["no such version"])
    lines = table([broken, absent]).splitlines()[2:]
    assert lines == [
        "| a | 1 | chat | 1 of 3 | 1 of 3 | 1 | broken |",
        "| b | b==2 | not run: no such version | - | - | - | - |",
    ]
    assert not broken.good and absent.good
