"""The stacks of a hanging engine, asked for as the watchdog does."""

from __future__ import annotations

import time

import pytest

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.engine.watchdog import ask_for_stacks

pytestmark = pytest.mark.server


def test_every_process_of_the_engine_prints_its_stacks_and_goes_on(eagle3: EngineServer, client: EngineClient) -> None:
    before = eagle3.log_path.stat().st_size
    asked = ask_for_stacks(eagle3.pid)
    assert asked >= 3  # HTTP server, scheduler, detokenizer
    deadline = time.monotonic() + 20

    def printed() -> int:
        with eagle3.log_path.open("rb") as log:
            log.seek(before)
            return log.read().count(b"Current thread 0x")

    while printed() < asked and time.monotonic() < deadline:
        time.sleep(0.1)
    assert printed() == asked
    assert client.generate("Tom has 3 apples", max_new_tokens=4).text
