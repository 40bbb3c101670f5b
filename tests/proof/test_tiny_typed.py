"""Typed texts for the built-in model: the generator for its training, and the texts of its examination."""

from __future__ import annotations

import random
import re

import pytest

from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_laptop import tiny
from proof.tiny import typed as typed_module
from proof.tiny.checkpoint import load_target
from proof.tiny.evaluate import examined
from proof.tiny.follow_ups import follow_up
from proof.tiny.mixed import typed
from proof.tiny.operations import operands, worked
from proof.tiny.problems import Work
from proof.tiny.stories import people
from proof.tiny.tokenizer import load_tokenizer
from proof.tiny.typed import ABOUT, BLIND, REPLIES, Typed, examination, typed_other, typed_problem
from proof.tiny.wordings import chosen, in_words, spelled, wordings

LINE = re.compile(r"It is (-?\d+) ([-+*/]) (-?\d+) = (-?\d+)(?: remainder (\d+))?\.")


def drawn(count: int) -> list[tuple[str, str | None]]:
    rng = random.Random(11)
    return [(typed_problem(rng).question, None) for _ in range(count)] + [typed_other(rng) for _ in range(count)]


def test_every_line_of_a_sum_is_right_and_leads_to_the_answer() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        problem = typed_problem(rng)
        for line in problem.lines:
            found = LINE.fullmatch(line)
            assert found, problem
            a, op, b, result, remainder = found.groups()
            if op == "/":
                assert int(a) == int(b) * int(result) + int(remainder or 0) and int(remainder or 0) < abs(int(b))
            else:
                assert eval(f"{a} {op} ({b})") == int(result), problem
        assert problem.lines[-1].rstrip(".").split(" = ")[1].split()[0] == str(problem.answer)


def test_a_sum_of_symbols_has_the_answer_that_python_gives() -> None:
    rng, seen = random.Random(4), 0
    for _ in range(8000):
        problem = typed_problem(rng)
        text = problem.question.rstrip("=? ")
        if re.fullmatch(r"[-+*()\d ]+", text) and "(-" not in text.replace(" ", ""):
            assert eval(text) == problem.answer, problem
            seen += 1
    assert seen > 40


@pytest.mark.parametrize("op", "+-*/")
def test_an_operation_of_any_operands_is_worked_out(op: str) -> None:
    rng = random.Random(op)
    for _ in range(2000):
        a, b = operands(op, rng)
        assert worked(Work([]), a, op, b) == {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def test_a_calculator_gets_one_operation_without_remainder() -> None:
    rng = random.Random(5)
    assert not any(step.after for _ in range(1000) for step in typed_problem(rng, direct=True).steps)


def test_a_follow_up_needs_the_answer_before_it_and_no_examined_wording() -> None:
    rng, needed = random.Random(9), 0
    for _ in range(500):
        dialogue = follow_up(rng)
        *_, before, asked = (message["content"] for message in dialogue.question())
        result = re.search(r"#### (\d+)$", before)
        assert result and not typed_module.is_examined(asked)
        needed += result[1] in re.findall(r"\d+", dialogue.text().rpartition(asked)[2])
    assert needed > 400  # with another number in place of one, and worked by parts, the answer itself is not in a line


def test_no_text_of_the_examination_is_trained_on() -> None:
    examined = {case.text for case in examination()}
    assert len(examined) == 600 and not examined & {text for text, _ in drawn(4000)}


@pytest.mark.slow
def test_the_blind_test_is_examined_in_turns_and_large_sums_may_be_declined() -> None:
    blind = examination(BLIND)
    assert all(case.first for case in blind if case.kind == "follow-up") and not any(
        case.text in {text for text, _ in drawn(400)} for case in blind if case.kind != "sum"
    )
    target = load_target(tiny.target_path())
    asked = [case for case in blind if case.text in ("6+9", "and times 2?", "999 * 999")]
    replies = examined(target, load_tokenizer(tiny.target_path()), False, asked)
    assert [case.accepts(reply) for case, reply in replies] == [True, True, True]
    assert replies[2][1] == ABOUT and Typed("sum", "?", "998001").accepts(ABOUT) is False


def test_no_held_out_problem_is_trained_on_as_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typed_problem(random.Random(2)).question
    monkeypatch.setattr(typed_module, "_examined", lambda: frozenset({asked}))
    assert typed_problem(random.Random(2)).question != asked
    monkeypatch.undo()
    assert {problem.question for problem in problems(1000)} <= typed_module._examined()


def test_the_wording_of_an_examined_story_is_not_trained_on_with_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typed_problem(random.Random(2)).question
    other = asked.translate(str.maketrans("123456789", "234567891"))
    monkeypatch.setattr(typed_module, "examination", lambda *_: (Typed("story", other.upper(), "7"),))
    typed_module._examined_wordings.cache_clear()
    try:
        assert typed_problem(random.Random(2)).question != asked
    finally:
        typed_module._examined_wordings.cache_clear()


def test_stories_and_other_texts_of_the_examination_have_wordings_of_their_own() -> None:
    shapes = {re.sub(r"\d+", "7", text.lower()) for text, _ in drawn(4000)}
    of_kind = {
        kind: [re.sub(r"\d+", "7", case.text.lower()) for case in examination() if case.kind == kind]
        for kind in ("sum", "story", "other")
    }
    assert [len(texts) for texts in of_kind.values()] == [380, 120, 100]
    assert not shapes & set(of_kind["story"] + of_kind["other"])
    assert sum(shape not in shapes for shape in of_kind["sum"]) >= 150  # "7+7" is an unavoidable wording


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("4", "It is 4.\n#### 4", True),
        ("4", "It is 5.\n#### 5", False),
        ("-7", "It is -7.\n#### -7", True),
        ("3 remainder 1", "It is 3 remainder 1.\n#### 3", True),
        ("3 remainder 1", "It is 3.\n#### 3", False),
        ("4", ABOUT, False),
        (None, ABOUT, True),
        (None, f"Hello! {ABOUT}", True),
        (None, "It is 4.\n#### 4", False),
    ],
)
def test_what_counts_as_right(answer: str | None, reply: str, right: bool) -> None:
    assert Typed("sum", "?", answer).accepts(reply) is right


def test_conversations_are_right_and_some_have_turns_tools_or_instructions() -> None:
    rng = random.Random(6)
    dialogues = [typed(rng) for _ in range(600)]
    for dialogue in dialogues:
        last = dialogue.messages[-1]["content"]
        assert last in REPLIES if dialogue.answer is None else dialogue.accepts(last), dialogue
    declined = [dialogue for dialogue in dialogues if dialogue.answer is None]
    assert any(dialogue.tools for dialogue in declined) and any(dialogue.earlier > 1 for dialogue in declined)
    assert max(len(dialogue.prompt(dialogue.turns()[0])) for dialogue in dialogues) > 1200


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (15, "fifteen"), (42, "forty two"), (-3, "minus three"), (210, "two hundred and ten")],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert spelled(number) == words


def test_numbers_in_words_have_hyphens_or_not() -> None:
    assert spelled(342, "-", " ") == "three hundred forty-two" and spelled(1000) == "one thousand"
    assert {in_words(-142, random.Random(seed)).lower() for seed in range(99)} >= {
        "minus one hundred and forty two", "negative one hundred forty-two", "minus one hundred forty two",
    }  # fmt: skip


def test_one_of_the_alternatives_is_taken_also_within_another() -> None:
    seen = {chosen("[a|b [c|d]|] e", random.Random(seed)) for seed in range(99)}
    assert seen == {"a e", "b c e", "b d e", " e"}


def test_every_template_of_a_story_fills_its_slots() -> None:
    rng = random.Random(7)
    templates = [wording for kind in ("single", "double") for texts in wordings()[kind].values() for wording in texts]
    for template in templates:
        text = people(template, rng, a=12, b=4, c=2)
        assert text and not set("[]{}|") & set(text), template


@pytest.mark.parametrize(
    ("a", "op", "b", "lines"),
    [
        (7, "*", 8, "7 * 8 = 56."),
        (86, "*", 7, "80 * 7 = 560. 6 * 7 = 42. 560 + 42 = 602."),
        (100, "/", 7, "70 / 7 = 10. 100 - 70 = 30. 30 / 7 = 4 remainder 2. 10 + 4 = 14 remainder 2."),
        (306, "+", 197, "306 + 197 = 503."),
    ],
)
def test_larger_products_and_quotients_are_made_of_their_parts(a: int, op: str, b: int, lines: str) -> None:
    work = Work([])
    worked(work, a, op, b)
    assert " ".join(step.line.removeprefix("It is ") for step in work.steps) == lines
    direct = Work([])
    worked(direct, a, op, b, direct=True)
    assert len(direct.steps) == 1
