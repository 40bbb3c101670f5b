"""The gateway's view of its engine: an odd answer is one warning, and the next one counts again."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_eagle3.gateway.config import ENGINE_ARGUMENTS
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.facts import EngineFacts

ODD: list[Any] = [{"data": []}, {"data": None}, {"data": [{}]}, {}]
GOOD = {"data": [{"max_model_len": 100}]}


class Odd:
    """An engine whose first answer about its models is odd."""

    def __init__(self, first: Any) -> None:
        self.models = [first, GOOD]

    async def point(self, *_: str) -> None: ...

    async def ask(self, path: str) -> Any:
        return ENGINE_ARGUMENTS if path == "/server_info" else self.models.pop(0)


@pytest.mark.parametrize("first", ODD, ids=str)
def test_the_gateway_follows_an_engine_after_an_odd_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: Any
) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"phase": "ready", "url": "u", "secret": "s"}))
    facts = EngineFacts(Odd(first), file, 0)  # type: ignore[arg-type]

    async def follow() -> None:
        task = asyncio.create_task(facts.follow())
        for _ in range(600):
            if facts.serving or task.done():
                break
            await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(follow())
    assert facts.serving and facts.room.total == 98
    assert caplog.text.count("the engine's state is unknown: ") == 1 and "Error: " in caplog.text


def test_a_refusal_names_the_phase_and_promises_nothing(tmp_path: Path) -> None:
    facts = EngineFacts(Odd(GOOD), tmp_path / "engine.json", 0)  # type: ignore[arg-type]
    facts.phase = "stalled"
    with pytest.raises(Refusal, match="does not serve now: stalled"):
        _ = facts.room
