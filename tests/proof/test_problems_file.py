"""The problems that `eval` and `bench` send are the first ones that the built-in model was not trained on."""

from __future__ import annotations

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy.problems import MOST, problems
from proof.tiny import problems as generator


def test_the_file_has_the_first_held_out_problems() -> None:
    drawn = generator.problems("held_out", MOST)
    assert [(p.question, p.solution, p.answer) for p in problems(MOST)] == [
        (p.question, p.solution, p.answer) for p in drawn
    ]


def test_a_seed_is_another_order_of_the_same_problems() -> None:
    assert problems(MOST, seed=5) != problems(MOST)
    assert {p.question for p in problems(MOST, seed=5)} == {p.question for p in problems(MOST)}
    assert problems(20, seed=5) == problems(40, seed=5)[:20]


def test_more_problems_than_there_are() -> None:
    with pytest.raises(KimiError, match="1001 built-in problems"):
        problems(MOST + 1)
