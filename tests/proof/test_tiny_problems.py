import re
import subprocess
import sys

import pytest

from kimi_w4a8_lab.accuracy.problems import parse_answer
from proof.tiny.problems import HELD_OUT_SHARE, problems, split_of

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def evaluated(a: str, op: str, b: str) -> float:
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[op]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_line_is_right_and_the_last_result_is_the_answer(split):
    for problem in problems(split, 1500):
        steps = STEP.findall(problem.solution)
        assert 1 <= len(steps) <= 6 and len(steps) == len(problem.steps)
        for a, op, b, result in steps:
            assert evaluated(a, op, b) == int(result), problem
        assert int(steps[-1][3]) == problem.answer == parse_answer(problem.solution)
        assert problem.answer >= 0


def test_operands_come_from_the_question_or_from_an_earlier_line():
    words = {"two": "2", "three": "3", "four": "4", "five": "5"}
    parts_of = {"hens": "2", "cows": "4", "bikes": "2", "cars": "4", "ducks": "2", "beetles": "6"}
    for problem in problems("held_out", 1500):
        known = set(re.findall(r"\d+", problem.question))
        known |= {number for word, number in (words | parts_of).items() if re.search(rf"\b{word}\b", problem.question)}
        for a, _, b, result in STEP.findall(problem.solution):
            assert {a, b} <= known, problem
            known.add(result)


def test_no_held_out_question_is_a_training_question_whatever_the_seed():
    held_out = {p.question for seed in range(3) for p in problems("held_out", 1000, seed)}
    train = {p.question for seed in range(3) for p in problems("train", 5000, seed)}
    assert not held_out & train
    assert all(split_of(q) == "held_out" for q in held_out) and all(split_of(q) == "train" for q in train)


def test_held_out_is_about_its_share():
    both = [p.question for p in problems("train", 4000)] + [p.question for p in problems("held_out", 0)]
    assert all(split_of(q) == "train" for q in both)
    other = [re.sub(r"\d", "7", q) for q in both]  # questions that nothing has selected
    share = sum(split_of(q) == "held_out" for q in set(other)) / len(set(other))
    assert 0.5 / HELD_OUT_SHARE < share < 2 / HELD_OUT_SHARE


def test_problems_are_distinct_and_the_same_in_another_process():
    here = problems("held_out", 300, seed=5)
    assert len({p.question for p in here}) == 300
    assert here != problems("held_out", 300, seed=6)
    code = "from proof.tiny.problems import problems; print(problems('held_out', 300, seed=5))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == repr(here)


def test_bad_arguments():
    with pytest.raises(ValueError, match="split"):
        problems("test", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        problems("train", -1)


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
def test_parse_answer(text, answer):
    assert parse_answer(text) == answer
