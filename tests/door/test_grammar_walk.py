"""The walk through a grammar: where it goes, when it ends, and what it does with what it finds."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from support.door_app import ANYTHING, CHAT, CLOSED

from kimi_w4a8_eagle3.door import trial
from kimi_w4a8_eagle3.door.access import CHECKED
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.rules import RequestRules
from kimi_w4a8_eagle3.door.shares import Shares

BYTES = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
RULES = RequestRules(CLOSED, dict.fromkeys(CHECKED, ANYTHING), ANYTHING, context=100)


def compiled(pattern: str) -> xgrammar.CompiledGrammar:
    return xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False).compile_regex(pattern)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the states at once stand for a mask's time, which is the same on every machine; return what was measured."""
    measured: list[float] = []

    def states(matcher: Any, *_: object) -> float:
        measured.append(len(trial._STATE.findall(matcher._debug_print_internal_state().rpartition("[")[2])))
        return measured[-1]

    monkeypatch.setattr(trial, "_mask_ms", states)
    monkeypatch.setattr(trial, "_WALK_S", 1e9)
    return measured


def test_the_walk_goes_to_the_most_states_first_and_ends_above_the_limit(visits: list[float]) -> None:
    assert trial.costliest_mask(compiled(".*a.{5}"), 5) == (6, "aaaaa")
    assert visits == [1, 2, 3, 4, 5, 6]


def test_a_mask_at_the_limit_does_not_end_the_walk_and_is_repeated(visits: list[float]) -> None:
    assert trial.costliest_mask(compiled(".*a.{5}"), 6) == (6, "a" * trial._SHOWN)
    assert len(visits) == 167  # as many as without a limit


@pytest.mark.parametrize(("idle", "expected"), [(4, 43), (64, 167)])
def test_the_walk_ends_where_nothing_new_was_found_for_long(
    idle: int, expected: int, visits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_IDLE", idle)
    trial.costliest_mask(compiled(".*a.{5}"), 1e9)
    assert len(visits) == expected


def test_the_walk_ends_when_its_time_is_up(visits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_WALK_S", -1.0)
    assert trial.costliest_mask(compiled("[a-c]{3}"), 1e9) == (1, "")  # the first of equal masks is named
    assert len(visits) == 1


def test_one_character_of_each_kind_and_the_last_ones_are_repeated() -> None:
    matcher = xgrammar.GrammarMatcher(compiled("(ab|[0-9])*"))
    assert trial._units(matcher, "xyzab") == ["0", "a", "ab", "zab"]
    assert trial._units(matcher, "b") == ["0", "a"]


@pytest.mark.parametrize(
    ("seconds", "measured", "ms"),
    [
        ([0.01], 1, 10),  # fast enough
        ([0.03125], 1, 31.25),
        ([0.05, 0.04, 0.0625], 3, 40),  # too slow, or disturbed
        ([0.05, 0.01], 2, 10),
        ([0.3125], 1, 312.5),  # nothing disturbs so much
    ],
)
def test_a_mask_that_seems_slow_is_measured_again(
    seconds: list[float], measured: int, ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time for second in seconds for time in (0.0, second)]
    monkeypatch.setattr(trial, "time", SimpleNamespace(thread_time=lambda: clock.pop(0)))
    filled: list[object] = []
    matcher: Any = SimpleNamespace(fill_next_token_bitmask=filled.append)
    assert trial._mask_ms(matcher, "mask", 31.25) == pytest.approx(ms)
    assert filled == ["mask"] * measured


def compile_text(kind: str, text: str) -> Any:
    """Compile as SGLang's backend does, and hold or use memory where the text says so."""
    if text == "broken":
        return SimpleNamespace(error_message="no such class")
    if text == "none":
        return None
    held = b"x" * (40 * 2**20) if text == "large" else b""
    if text == "for a moment":  # the last piece stays, so libc keeps the others until it is told to return them
        pieces = [ctypes.create_string_buffer(b"x" * 1000) for _ in range(60_000)]
        held = pieces.pop()  # type: ignore[assignment]
    return SimpleNamespace(ctx=compiled("[a-c]{3}"), held=held)


@pytest.mark.parametrize(
    ("text", "limit_ms", "expected"),
    [
        ("broken", 1e9, "Failed to compile regex grammar: no such class"),
        ("none", 1e9, ""),
        ("large", 1e9, r"the compiled regex grammar takes 4\d MiB; 32 MiB are allowed"),
        ("for a moment", 1e9, ""),
        ("small", 1e9, ""),
        ("small", 0.0, "this regex grammar is too slow: after '' finding the tokens that may follow takes"),
    ],
)
def test_the_worker_compiles_weighs_and_walks(text: str, limit_ms: float, expected: str) -> None:
    said = []

    async def ask() -> None:
        door = trial.workers(lambda: compile_text, limit_ms, RULES, str.split, Shares(1))
        try:
            for job, value in (
                ("grammar", ("regex", text)),
                ("reading", f"/v1/chat/completions\n{json.dumps(CHAT)}".encode()),
            ):
                try:
                    await door.require(job, value, "field")
                    said.append("")
                except Refusal as refusal:
                    said.append(refusal.message)
        finally:
            os.kill(door.pid, signal.SIGKILL)

    asyncio.run(ask())
    assert re.match(expected or "$", said[0]), said
    assert said[1] == ""
