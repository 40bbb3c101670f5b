"""Answers with thinking, text and calls, drawn from a seed; their text and arguments mention every marker.

Half of them are well formed, and what is right is known. The others are markers and texts in any order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

MARKERS = (
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
OPEN, CLOSE, SECTION, SECTION_END, BEGIN, ARGUMENTS, END = MARKERS
_WORDS = (
    "a", "the", " ", "\n", "<", "<|", "<|tool", "</th", "Zürich", "東京", "🦉", '"', "\\", "{", "}", "1.5", ":0", "```",
    "|>",
)  # fmt: skip
PARAMETERS = {"search": "query", "get_weather": "city"}


class Said(NamedTuple):
    """An answer as a client sees it. cut: indices of incomplete calls."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]
    cut: tuple[int, ...] = ()


class Transcript(NamedTuple):
    """Text of a model after a prompt that opened thinking or not; said: the right reading, if it is known."""

    written: str
    thinking: bool
    said: Said | None


def transcripts(count: int, seed: int) -> Iterator[Transcript]:
    """Draw answers, well formed and not in turn."""
    rng = random.Random(seed)
    for index in range(count):
        yield _well_formed(rng) if index % 2 else _any_order(rng)


def _text(rng: random.Random, *markers: str) -> str:
    """Words that may mention these markers. White space at the ends is none of a text's between calls."""
    return (
        "x" + "".join(rng.choice((*_WORDS, *markers)) for _ in range(rng.randrange(10))) + rng.choice(("", " y", "\n"))
    )


def _any_order(rng: random.Random) -> Transcript:
    parts = (*MARKERS, *MARKERS, *_WORDS, " functions.search:0 ", "search", "call_2", '{"query": "', '"}', "{}")
    return Transcript("".join(rng.choice(parts) for _ in range(rng.randrange(1, 24))), rng.random() < 0.5, None)


def _well_formed(rng: random.Random) -> Transcript:
    thinking = rng.random() < 0.7
    written = thought = text = ""
    calls: list[tuple[str, str]] = []
    if thinking:
        written = rng.choice(("", OPEN, f"\n{OPEN}"))
        thought = _text(rng, OPEN)
        written += thought
        if rng.random() < 0.3:
            written += _section(rng, calls)
            more = rng.choice(("", _text(rng, OPEN)))
            thought, written = thought + more, written + more
        if calls and rng.random() < 0.5:
            return Transcript(written, True, Said(thought, "", tuple(calls)))
        written += CLOSE
    for _ in range(rng.randrange(3)):
        new = _text(rng, OPEN, CLOSE)
        behind = rng.choice(("", END, ARGUMENTS, SECTION_END, SECTION))
        text, written = text + new, written + new + (_section(rng, calls) if behind == SECTION else behind)
    return Transcript(written, thinking, Said(thought, text, tuple(calls)))


def _section(rng: random.Random, calls: list[tuple[str, str]]) -> str:
    written = SECTION
    for _ in range(rng.randrange(1, 4)):
        name, blank = rng.choice(list(PARAMETERS)), rng.choice(("", "", " ", "\n"))
        values = {PARAMETERS[name]: "".join(rng.choice((*_WORDS, *MARKERS)) for _ in range(rng.randrange(9)))}
        arguments = json.dumps(values, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
        call_id = rng.choice((f"functions.{name}:{len(calls)}", f"{name}:7", name, "call_2", f"{len(calls)}"))
        written += f"{blank}{BEGIN}{blank}{call_id}{ARGUMENTS}{blank}{arguments}{blank}{END}"
        calls.append((name, arguments))
    return written + rng.choice(("", " ")) + SECTION_END
