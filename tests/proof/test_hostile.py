"""The hostile clients are answered as the real gateway answers them, and long calls of an event loop are recorded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import uvicorn
from support.gateway_app import App, ScriptedEngine

from kimi_w4a8_eagle3.gateway.connections import ClientProtocol
from proof.hostile import timed_gateway
from proof.hostile.__main__ import longest_ms
from proof.hostile.clients import ATTACKS


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_its_round_at_the_gateway(name: str) -> None:
    async def one_round() -> int:
        config = uvicorn.Config(App(ScriptedEngine()), port=0, http=ClientProtocol, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await ATTACKS[name](server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.should_exit = True
            await serving

    assert asyncio.run(one_round()) in (1, 10, 30, 50, 200)


def test_a_long_call_is_found_and_a_short_or_an_earlier_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.Handle, "_run", asyncio.Handle._run)  # is put back afterwards
    timed_gateway.record_calls(tmp_path / "1")

    async def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    asyncio.run(compute(0.0))
    assert longest_ms(tmp_path, 0.0) < 25
    asyncio.run(compute(0.03))
    assert longest_ms(tmp_path, 0.0) >= 25
    assert longest_ms(tmp_path, time.monotonic()) == 0
