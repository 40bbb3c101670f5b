"""The walk through a grammar: where it goes, when it ends, and what it does with what it finds."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar

from kimi_w4a8_eagle3.gateway import mask_walk, trial_process

BYTES = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])


def compiled(pattern: str) -> xgrammar.CompiledGrammar:
    return xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False).compile_regex(pattern)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the states at once stand for a mask's time, which is the same on every machine; return what was measured."""
    measured: list[float] = []

    def states(matcher: Any, *_: object) -> float:
        measured.append(len(mask_walk._STATE.findall(matcher._debug_print_internal_state().rpartition("[")[2])))
        return measured[-1]

    monkeypatch.setattr(mask_walk, "_mask_ms", states)
    monkeypatch.setattr(mask_walk, "_WALK_S", 1e9)
    return measured


def test_the_walk_goes_to_the_most_states_first_and_ends_above_the_limit(visits: list[float]) -> None:
    assert mask_walk.costliest_mask(compiled(".*a.{5}"), 5) == (6, "aaaaa")
    assert visits == [1, 2, 3, 4, 5, 6]


def test_a_mask_at_the_limit_does_not_end_the_walk_and_is_repeated(visits: list[float]) -> None:
    assert mask_walk.costliest_mask(compiled(".*a.{5}"), 6) == (6, "a" * mask_walk._SHOWN)
    assert len(visits) == 167  # as many as without a limit


@pytest.mark.parametrize(("idle", "expected"), [(4, 43), (64, 167)])
def test_the_walk_ends_where_nothing_new_was_found_for_long(
    idle: int, expected: int, visits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_walk, "_IDLE", idle)
    mask_walk.costliest_mask(compiled(".*a.{5}"), 1e9)
    assert len(visits) == expected


def test_the_walk_ends_when_its_time_is_up(visits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_walk, "_WALK_S", -1.0)
    assert mask_walk.costliest_mask(compiled("[a-c]{3}"), 1e9) == (1, "")  # the first of equal masks is named
    assert len(visits) == 1


def test_one_character_of_each_kind_and_the_last_ones_are_repeated() -> None:
    matcher = xgrammar.GrammarMatcher(compiled("(ab|[0-9])*"))
    assert mask_walk._units(matcher, "xyzab") == ["0", "a", "ab", "zab"]
    assert mask_walk._units(matcher, "b") == ["0", "a"]


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
    monkeypatch.setattr(mask_walk, "time", SimpleNamespace(thread_time=lambda: clock.pop(0)))
    filled: list[object] = []
    matcher: Any = SimpleNamespace(fill_next_token_bitmask=filled.append)
    assert mask_walk._mask_ms(matcher, "mask", 31.25) == pytest.approx(ms)
    assert filled == ["mask"] * measured


class Compiler:
    """Compiles as xgrammar does, and holds or uses memory where the text says so."""

    held: object = None

    def compile_regex(self, text: str) -> xgrammar.CompiledGrammar:
        if text == "broken":
            raise RuntimeError("no such class")
        if text == "large":
            self.held = b"x" * (40 * 2**20)
        if text == "for a moment":  # the last piece stays, so libc keeps the others until it is told to return them
            pieces = [ctypes.create_string_buffer(b"x" * 1000) for _ in range(60_000)]
            self.held = pieces.pop()
        return compiled("[a-c]{3}")


@pytest.mark.parametrize(
    ("text", "limit_ms", "expected"),
    [
        ("broken", 1e9, "Failed to compile regex grammar: no such class"),
        ("large", 1e9, r"the compiled regex grammar takes 4\d MiB; 32 MiB are allowed"),
        ("for a moment", 1e9, ""),
        ("small", 1e9, ""),
        ("small", 0.0, "this regex grammar is too slow: after '' finding the tokens that may follow takes"),
    ],
)
def test_a_trial_compiles_weighs_and_walks(
    text: str, limit_ms: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    monkeypatch.setattr(trial_process, "_compiler", lambda: compiler)
    monkeypatch.setattr(trial_process, "_bound_memory", lambda more: None)
    monkeypatch.setattr(trial_process, "_prepared", ("", False, 0, limit_ms))
    with pytest.raises(trial_process.Refused, match=expected) if expected else nullcontext():
        assert trial_process.try_grammar("regex", text) == text
