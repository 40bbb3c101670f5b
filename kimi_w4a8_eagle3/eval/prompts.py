"""Prompts for the lossless check: easy and hard ones for a draft, and edge cases."""

from __future__ import annotations

from dataclasses import dataclass

from .. import tiny

KINDS = ("chat", "maths", "code", "long", "short", "non-ascii")

_CHAT = (
    "Write the numbers from one to twenty, separated by commas.",
    "What should I cook tonight with rice, eggs and spinach?",
    "Explain in three sentences why the sky is blue.",
    "Give me a polite way to decline a meeting.",
    "List five rivers and the sea that each one reaches.",
    "Repeat this sentence four times: The train leaves at noon.",
    "Write a short story about a lighthouse keeper.",
    "Which is heavier, a kilogram of iron or of feathers? Why?",
)
_CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a SQL query that counts the orders of each customer.",
    "Fix this: for i in range(10) print(i)",
    "Write a Bash one-liner that finds the ten largest files.",
    "Write a C function that reverses a string in place.",
    "def is_prime(n):\n    # complete this function\n",
    'Turn into YAML: {"name": "demo", "ports": [80, 443], "debug": false}',
    "Write a regular expression for an ISO date and explain each part.",
)
_SHORT = ("7", "?", "a", "Hi", "2+2", ".", "no", "0")
_NON_ASCII = (
    "Wie viele Äpfel hat Zoë, wenn sie 3 und 5 hat?",
    "三个苹果加五个苹果等于多少？",
    "Сколько будет семь раз по восемь?",
    "مرحبا، كيف حالك اليوم؟",
    "🍎🍎🍎 + 🍎🍎 = ?",
    "りんごが3つ、みかんが5つあります。全部でいくつですか？",
    "Ça coûte 3 € la pièce; combien coûtent 12 pièces ?",
    "e\u0301 und \u00e9: gleich oder nicht? \u200b\u2028 Ende.",
)
_LONG_QUESTIONS = 40


@dataclass(frozen=True)
class Prompt:
    """One user message and its kind."""

    kind: str
    text: str


def prompts(count: int) -> list[Prompt]:
    """Return `count` different prompts that cycle through the kinds; the list is the same every time."""
    rounds = -(-count // len(KINDS))
    maths = [p.question for p in tiny.problems("held_out", rounds, seed=11)]
    long = [
        " ".join(p.question for p in tiny.problems("held_out", _LONG_QUESTIONS, seed=100 + i)) for i in range(rounds)
    ]
    texts = {
        "chat": [_varied(_CHAT, i) for i in range(rounds)],
        "maths": maths,
        "code": [_varied(_CODE, i) for i in range(rounds)],
        "long": long,
        "short": [_varied(_SHORT, i) for i in range(rounds)],
        "non-ascii": [_varied(_NON_ASCII, i) for i in range(rounds)],
    }
    return [Prompt(kind, texts[kind][i]) for i in range(rounds) for kind in KINDS][:count]


def _varied(texts: tuple[str, ...], index: int) -> str:
    """Return a prompt; once all texts are used, a number is appended so that no prompt repeats."""
    turn, which = divmod(index, len(texts))
    return texts[which] if turn == 0 else f"{texts[which]} ({turn})"
