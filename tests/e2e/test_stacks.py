"""The stacks of a hanging engine without py-spy, as in a container without capabilities."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.engine import watchdog
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer

pytestmark = pytest.mark.server


def test_every_process_of_the_engine_prints_its_stacks_and_goes_on(
    eagle3: EngineServer, client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog.shutil, "which", lambda *_, **__: None)
    before = eagle3.log_path.stat().st_size
    asked = watchdog.dump_stacks(eagle3.pid, tmp_path, "no progress").read_text().count("asked by SIGUSR1")
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
