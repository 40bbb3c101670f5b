"""The threads of an engine: their stacks, asked for as the watchdog does, and few that wake while it idles."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.waiting import until

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.engine.watchdog import ask_for_stacks

pytestmark = pytest.mark.server


def test_every_process_of_the_engine_prints_its_stacks_and_goes_on(eagle3: EngineServer, client: EngineClient) -> None:
    before = eagle3.log_path.stat().st_size
    asked = ask_for_stacks(eagle3.pid)
    assert asked >= 3  # HTTP server, scheduler, detokenizer

    def printed() -> int:
        return eagle3.log_path.read_bytes()[before:].count(b"Current thread 0x")

    until(lambda: printed() >= asked)
    assert printed() == asked
    assert client.generate("Tom has 3 apples", max_new_tokens=4).text


def test_a_rank_has_one_thread_that_waits_for_others(eagle3: EngineServer) -> None:
    family = psutil.Process(eagle3.pid).children(recursive=True)
    (scheduler,) = (process.pid for process in family if "sglang::scheduler" in process.cmdline()[0])
    names = [name.read_text() for name in Path(f"/proc/{scheduler}/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop\n") == 1
