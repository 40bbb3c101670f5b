"""Trials: grammars and pictures in processes that end at their limits, and the next one is tried all the same."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from functools import partial

import psutil
import pytest
from support.pictures import noise
from support.waiting import until

from kimi_w4a8_eagle3.gateway import trials
from kimi_w4a8_eagle3.gateway.conversation import Grammar
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.trials import Trials
from kimi_w4a8_laptop import tiny

ENDLESS = partial(time.sleep, 600)
pytestmark = pytest.mark.slow
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
PICTURE = "data:image/png;base64," + base64.b64encode(noise(8, 8)).decode()
Steps = Callable[[Trials], Awaitable[None]]


def run(steps: Steps, max_mask_ms: float = 1e9) -> None:
    async def with_trials() -> None:
        tried = Trials(tiny.target_path(), trusted=False, vocabulary=640, max_mask_ms=max_mask_ms)
        try:
            await steps(tried)
        finally:
            tried.close()

    asyncio.run(with_trials())


def workers() -> list[psutil.Process]:
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "resource_tracker" not in " ".join(child.cmdline())]


async def refused(trial: Awaitable[object]) -> str:
    with pytest.raises(Refusal) as found:
        await trial
    assert found.value.status == 400
    return found.value.message


def test_wrong_ones_are_refused_and_good_ones_served() -> None:
    async def steps(tried: Trials) -> None:
        good = Grammar("json_schema", SCHEMA)
        assert await tried.grammar(good) == good
        await tried.pictures([PICTURE])
        assert await tried.grammar(Grammar("regex", "[0-9]{3}")) == Grammar("regex", "[0-9]{3}")
        assert "Failed to compile regex" in await refused(tried.grammar(Grammar("regex", "(")))
        assert "is broken" in await refused(tried.pictures(["data:image/png;base64,aGVsbG8="]))
        assert await tried.grammar(Grammar("regex", "[0-9]{3}")) == Grammar("regex", "[0-9]{3}")

    run(steps)


def test_a_grammar_whose_masks_take_too_long_is_refused() -> None:
    async def steps(tried: Trials) -> None:
        assert "too slow" in await refused(tried.grammar(Grammar("regex", "(.*a.{60}|b)*")))

    run(steps, max_mask_ms=0.0)


def test_a_trial_without_end_or_whose_process_dies_refuses_its_own_grammar_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def steps(tried: Trials) -> None:
        assert await tried.grammar(Grammar("regex", "a")) == Grammar("regex", "a")
        monkeypatch.setattr(trials, "TRIAL_S", 1.0)
        assert (await tried._try(ENDLESS, "not in time", "regex")).message == "not in time"
        monkeypatch.setattr(trials, "TRIAL_S", 120.0)
        assert await tried.grammar(Grammar("regex", "b")) == Grammar("regex", "b")
        trial = asyncio.ensure_future(tried._try(ENDLESS, "not in time", "regex"))
        await asyncio.sleep(1.0)
        for process in workers():
            process.kill()
        assert (await trial).message == "not in time"
        for process in workers():  # without a task, as the kernel kills them where memory is short
            process.kill()
        await asyncio.sleep(0.5)
        assert await tried.grammar(Grammar("regex", "d")) == Grammar("regex", "d")

    before = workers()
    run(steps)
    until(lambda: set(workers()) <= set(before), 60.0)
