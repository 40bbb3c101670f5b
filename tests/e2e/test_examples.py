"""Clients as a reader runs them: the examples, and the command of docs/perf/answers.md, whose table tells failures."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.repository import ROOT

from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from proof.agents.matrix import MatrixRow, table

EXAMPLES = ROOT / "docs/examples"
QUESTION = "Mia has 33 apples and buys 14 more. How many apples does Mia have now?"


def run_client(base_url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "client.py", QUESTION, "--temperature", "0"],
        env={**os.environ, "OPENAI_BASE_URL": f"{base_url}/v1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.server
def test_the_client_streams_thinking_a_tool_call_and_the_answer(eagle3: FrontedEngine) -> None:
    done = run_client(eagle3.base_url)
    assert done.returncode == 0, done.stderr
    assert "33 + 14" in done.stderr  # the thinking
    call, answer = done.stdout.strip().split("\n", 1)
    assert call == 'calculator({"expression": "33 + 14"}) = 47' and "47 apples" in answer


def test_the_client_without_a_server_says_so() -> None:
    done = run_client("http://127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.strip() == "client.py: http://127.0.0.1:9/v1: Connection error."


def test_the_script_serves_with_a_key_of_its_own(tmp_path: Path) -> None:
    command = [EXAMPLES / "serve.sh", "--dry-run", "--set", "port=1234"]
    shown = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60) for _ in range(2)]
    assert [done.returncode for done in shown] == [0, 0], shown[0].stderr
    assert "sglang.launch_server" in shown[0].stdout and "--port 1234" in shown[0].stdout
    key = tmp_path / "key"
    assert len(key.read_text()) == 64 and key.stat().st_mode & 0o077 == 0
    assert "$(cat 'key')" in shown[1].stderr and key.read_text() not in shown[1].stdout


@pytest.mark.slow
@pytest.mark.server
def test_the_sdks_of_this_environment_reach_every_turn() -> None:
    words = [sys.executable, "-m", "proof.agents", "--here", "--only", "openai", "--only", "anthropic"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for client, reached in (("openai", "chat 6 of 6, responses 6 of 6"), ("anthropic", "messages 6 of 6")):
        assert f"| {client} | {version(client)} | {reached} |" in done.stdout


def test_a_row_says_what_was_broken_or_is_not_to_be_had() -> None:
    broken = MatrixRow("a", "1", "chat", turns=1, of=3, calls=1, refused=1)
    absent = MatrixRow("b", "b==2", why=["no such version"])
    served = MatrixRow("a", "1", "messages", turns=3, of=3, calls=3)
    assert table([broken, served, absent]).splitlines()[2:] == [
        "| a | 1 | chat 1 of 3 (1 calls, 1 refusals), messages 3 of 3 |",
        "| b | b==2 | not run: no such version |",
    ]
    assert not broken.good and absent.good
