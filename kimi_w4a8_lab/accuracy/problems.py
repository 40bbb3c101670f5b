"""Grade-school word problems with worked answers, from `eval/problems.jsonl`.

The built-in model was not trained on them (docs/virtual-node.md).
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache

from kimi_w4a8_eagle3.base.errors import UsageError
from kimi_w4a8_eagle3.base.installed import operator_dir

FILE, MOST = "problems.jsonl", 1000  # its lines
_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class MathProblem:
    """One word problem. solution: one operation a line; its last line is `#### answer`."""

    question: str
    solution: str

    @property
    def answer(self) -> int:
        found = parse_answer(self.solution)
        assert found is not None
        return found


def problems(count: int, seed: int = 0) -> list[MathProblem]:
    """Return the first `count` problems in the order of `seed`; seed 0 is the order of the file."""
    found = list(_all())
    if count > len(found):
        raise UsageError(f"{count} built-in problems were requested, there are {len(found)}", expected="a lower number")
    if seed:
        random.Random(seed).shuffle(found)
    return found[:count]


def parse_answer(text: str) -> int | None:
    """Return the number after the last `####` of a solution or of a model's reply, or None."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


@cache
def _all() -> tuple[MathProblem, ...]:
    lines = (operator_dir("eval") / FILE).read_text().splitlines()
    return tuple(MathProblem(row["question"], row["answer"]) for row in map(json.loads, lines))
