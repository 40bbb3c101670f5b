"""Prompts for the lossless check: easy and hard ones for a draft, and edge cases."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kimi_w4a8_eagle3.base.installed import operator_dir

from .problems import problems

KINDS = ("chat", "maths", "code", "long", "short", "non-ascii")
_LONG_QUESTIONS = 40


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str


def prompts(count: int) -> list[Prompt]:
    """Return `count` different prompts that cycle through the kinds; the list is the same every time."""
    rounds = -(-count // len(KINDS))
    maths = [p.question for p in problems(rounds, seed=11)]
    long = [" ".join(p.question for p in problems(_LONG_QUESTIONS, seed=100 + i)) for i in range(rounds)]
    written: dict[str, list[str]] = json.loads((operator_dir("eval") / "prompts.json").read_text(encoding="utf-8"))
    texts = {kind: [_varied(found, i) for i in range(rounds)] for kind, found in written.items()}
    texts |= {"maths": maths, "long": long}
    return [Prompt(kind, texts[kind][i]) for i in range(rounds) for kind in KINDS][:count]


def _varied(texts: list[str], index: int) -> str:
    """Return a prompt; once all texts are used, a number is appended so that no prompt repeats."""
    turn, which = divmod(index, len(texts))
    return texts[which] if turn == 0 else f"{texts[which]} ({turn})"
