"""The releases of SGLang between the two of the suite: each serves with EAGLE3, and the gateway's API is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.acceptance import accepted
from support.sglang_program import NEWEST, environment
from support.tiny_servers import running, tiny_launch

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_lab.accuracy.problems import problems

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif("KIMI_RELEASE_TESTS" not in os.environ, reason="make releases installs and runs them"),
]
QUESTIONS = [problem.question for problem in problems(4, seed=21)]


def greedy(server: FrontedEngine) -> list[tuple[int, ...]]:
    with EngineClient(*server.address) as client:
        return [answer.token_ids for answer in client.chat_all(QUESTIONS, 64, 4)]


@pytest.mark.parametrize("release", ["0.5.21", "0.5.22"])
def test_a_release_serves_with_drafts_and_meets_every_expectation(
    release: str, eagle3: FrontedEngine, tmp_path: Path
) -> None:
    folder = NEWEST.with_name(f"sglang-{release}")
    assert folder.is_dir(), f"`make releases` installs {folder}"
    paths = environment(newest=True)["PYTHONPATH"].replace(str(NEWEST), str(folder))
    launch = tiny_launch()
    launch = replace(launch, env={**launch.env, "PYTHONPATH": paths})
    with running(launch.server(tmp_path / "server.log")) as server:
        assert httpx.get(f"{server.base_url}/server_info").json()["version"] == release
        answers, found = accepted(server.address, 4, partial(greedy, server))
        assert answers == greedy(eagle3)
        assert found is not None and found.length >= 2.5
        words = [sys.executable, "-m", "proof.conformance", server.base_url]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=590)
        assert asked.returncode == 0, asked.stdout[-8000:] + asked.stderr[-2000:]
