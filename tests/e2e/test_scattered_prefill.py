"""Input-scattered attention changes no answer of two ranks with EAGLE3, on both releases.

Two requests run at a time, over pictures, prompts of several chunks, and prompts that the prefix cache holds in part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.kimi_checkpoint import seeing
from support.pictures import asking_about
from support.sampled import QUESTIONS, REQUESTS, answers
from support.sglang_program import VERSIONS, environment
from support.tiny_servers import TWO_RANKS, running, tiny_launch

from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import read_once

pytestmark = [pytest.mark.server, pytest.mark.slow]

SETTINGS = (*TWO_RANKS, "disable-radix-cache=false", "chunked-prefill-size=64", "mm-enable-dp-encoder=true")
SWITCH = "enable-attn-tp-input-scattered=true"
LONG = " ".join(QUESTIONS)
MESSAGES = [
    *(asking_about(number) for number in (15, 42, 15)),
    *([{"role": "user", "content": text}] for text in (*QUESTIONS, LONG, f"{LONG} Answer the second.", LONG[:-7])),
]
KINDS = ("greedy", "sampled", "all penalties")


def asked(folder: Path, newest: bool, *settings: str) -> tuple[list[list[tuple[Any, ...]]], str, Reading]:
    """Return a server's answers, its log, and its metrics."""
    eyes = f"model.repo={seeing(folder / 'target')}"
    launch = tiny_launch(settings=(*SETTINGS, eyes, *settings))
    launch = replace(launch, env={**launch.env, "PYTHONPATH": environment(newest)["PYTHONPATH"]})
    bodies = [{"messages": messages, **REQUESTS[kind]} for kind in KINDS for messages in MESSAGES]
    with running(launch.engine(folder / "server.log")) as server:
        found = answers(server.address, bodies, 2)
        return found, (folder / "server.log").read_text(), read_once(*server.address)


@pytest.mark.parametrize("newest", (False, True), ids=VERSIONS)
def test_the_answers_are_the_same_with_and_without_it(newest: bool, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir(), (tmp_path / "with").mkdir()
    without, silent, _ = asked(tmp_path / "without", newest)
    found, said, metrics = asked(tmp_path / "with", newest, SWITCH)
    assert "each rank of 2 computes its share" in said and "computes its share" not in silent
    assert "kimi_missing_feature_info" not in metrics.samples
    assert found == without
