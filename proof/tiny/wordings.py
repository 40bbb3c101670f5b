"""The words of what people type: lists and templates of `wordings.toml`, numbers in words, slips of the fingers."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.toml import tomllib

MOST = 1000  # the largest number of a sum
SYMBOLS = {"+": "+++＋", "-": "----−–", "*": "**xx××·X", "/": "///÷÷:"}
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@cache
def wordings() -> dict[str, Any]:
    """The content of `wordings.toml`."""
    return tomllib.loads(Path(__file__).with_name("wordings.toml").read_text())


def invented(rng: random.Random) -> str:
    """A word that no language has, so that the model copes with words that it has not seen."""
    parts = wordings()["syllables"]
    syllables = ([rng.choice(parts[name]) for name in ("start", "middle", "end")] for _ in range(rng.randint(1, 3)))
    return "".join(chain.from_iterable(syllables))


def spelled(number: int, joint: str = " ", between: str = " and ") -> str:
    """A number up to 1,000 in English words; `joint` stands in forty two, `between` after the hundreds."""
    if number < 0:
        return f"minus {spelled(-number, joint, between)}"
    ones, tens = wordings()["numbers"]["ones"], wordings()["numbers"]["tens"]
    if number == MOST:
        return "one thousand"
    if number >= 100:
        rest = f"{between}{spelled(number % 100, joint)}" if number % 100 else ""
        return f"{ones[number // 100]} hundred{rest}"
    if number < 20:
        return ones[number]
    return tens[number // 10 - 2] + (f"{joint}{ones[number % 10]}" if number % 10 else "")


def in_words(number: int, rng: random.Random) -> str:
    text = spelled(number, rng.choice(" -"), rng.choice((" and ", " and ", " ")))
    if text.startswith("one ") and rng.random() < 0.4:
        text = f"a{text[3:]}"
    if text.startswith("minus ") and rng.random() < 0.3:
        text = f"negative{text[5:]}"
    return text.capitalize() if rng.random() < 0.1 else text


def chosen(text: str, rng: random.Random) -> str:
    """Take one of the alternatives in every pair of brackets, `[x|y]`."""
    while "[" in text:
        text = _ALTERNATIVES.sub(lambda found: rng.choice(found[1].split("|")), text)
    return text


def symbol(op: str, rng: random.Random) -> str:
    """An operator between its usual blanks."""
    blanks = rng.choice((("", ""), (" ", " "), ("", ""), (" ", " "), (" ", " "), ("", " "), (" ", "")))
    return rng.choice(SYMBOLS[op]).join(blanks)


def varied(text: str, rng: random.Random) -> str:
    """Small letters, capitals, missing and additional words and marks, as fingers have them."""
    if rng.random() < 0.05:
        lead = rng.choice(wordings()["lead"]) if rng.random() < 0.7 else invented(rng)
        text = f"{lead}{rng.choice((', ', ' ', ': '))}{text}"
    if rng.random() < 0.05:
        text = f"{text.rstrip('?. ')} {rng.choice(wordings()['tail'])}"
    if rng.random() < 0.04:
        text = _mistyped(text, rng)
    kind = rng.random()
    if kind < 0.1:
        text = text.lower()
    elif kind < 0.13:
        text = text.upper()
    elif kind < 0.2:
        text = text.rstrip("?.! ")
    elif kind < 0.23:
        text += rng.choice(
            ("!", "??", " ", ".", "\n", "?", " " + "".join(rng.choices("?!.=:;>-~)", k=rng.randint(1, 3))))
        )
    elif kind < 0.3:
        text = text[:1].upper() + text[1:]
    return text


def _mistyped(text: str, rng: random.Random) -> str:
    """One small slip of the fingers between two letters, or a double blank."""
    places = [found.start() for found in re.finditer(r"(?<=[a-z])[a-z][a-z]", text)]
    if not places or rng.random() < 0.3:
        return text.replace(" ", "  ", 1)
    at, kind = rng.choice(places), rng.randrange(3)
    pair = text[at : at + 2]
    return text[:at] + (pair[::-1], pair[0], pair[0] + pair)[kind] + text[at + 2 :]
