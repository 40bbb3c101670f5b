"""The problems of `eval/problems.jsonl`, which `eval`, `bench` and the demo send."""

from __future__ import annotations

import re

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy.problems import MOST, parse_answer, problems

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def test_every_line_of_a_solution_is_right_and_the_last_result_is_the_answer() -> None:
    for problem in problems(MOST):
        steps = STEP.findall(problem.solution)
        assert 1 <= len(steps) <= 6
        for a, operation, b, result in steps:
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}
            assert exact[operation] == int(result), problem
        assert int(steps[-1][3]) == problem.answer >= 0


def test_a_seed_is_another_order_of_the_same_problems() -> None:
    assert problems(MOST, seed=5) != problems(MOST)
    assert {p.question for p in problems(MOST, seed=5)} == {p.question for p in problems(MOST)}
    assert problems(20, seed=5) == problems(40, seed=5)[:20]
    with pytest.raises(KimiError, match="1001 built-in problems"):
        problems(MOST + 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a\n#### 14", 14),
        ("#### 3 and #### 5", 5),
        ("####-2<|im_end|>", -2),
        ("the answer is 14", None),
        ("#### ", None),
    ],
)
def test_parse_answer(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer
