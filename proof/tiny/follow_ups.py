"""Questions that go on from an answer: `3 + 4`, then `and times 2?`, `half of that`, `with 5 instead of 3?`."""

from __future__ import annotations

import random
from dataclasses import replace

from .dialogues import Dialogue, Message, assistant_turn, conclusion, instant, think, tools
from .operations import NAMED, worked
from .problems import WordProblem, Work
from .typed import is_examined, typed_problem
from .wordings import MOST, chosen, in_words, varied, wordings


def follow_up(rng: random.Random) -> Dialogue:
    """One or two questions and their answers, then one that needs the last answer."""
    form = rng.choices((instant, think, tools), (9, 10, 2))[0]
    asked = [typed_problem(rng)]
    while not 0 <= asked[0].answer <= MOST or asked[0].steps[-1].after:  # no remainder
        asked = [typed_problem(rng)]
    for _ in range(rng.choice((1, 1, 1, 2))):
        asked.append(_next(asked[-1], rng, direct=form is tools))
    dialogue = form(asked.pop(), rng)
    at = min(dialogue.turns()) - 1
    before: list[Message] = []
    for problem in asked:
        text = conclusion(problem) if dialogue.thinking else problem.solution
        before += [{"role": "user", "content": problem.question}, assistant_turn(text)]
    messages = [*dialogue.messages[:at], *before, *dialogue.messages[at:]]
    return replace(dialogue, messages=messages, earlier=at + len(before))


def _next(before: WordProblem, rng: random.Random, direct: bool) -> WordProblem:
    while True:
        kind = rng.choice([*"++--**//", *wordings()["follow"]])
        if not (operation := _operation(kind, before, rng)):
            continue
        a, op, b, slots = operation
        work = Work([])
        answer = worked(work, a, op, b, direct)
        text = varied(chosen(rng.choice(wordings()["follow"][kind]), rng).format(**slots), rng)
        if 0 <= answer <= MOST and not is_examined(text):
            return WordProblem(text, tuple(work.steps))


def _operation(kind: str, before: WordProblem, rng: random.Random) -> tuple[int, str, int, dict[str, str]] | None:
    """Draw a question about the answer of `before`: its operation, and the slots of its words; None if none fits."""
    result, new = before.answer, rng.randint(1, rng.choice((10, 20, 100)))
    a, op, b = result, kind, new
    slots = {"s": rng.choice(wordings()["world"]["names"])}
    if kind in NAMED:
        op, b = NAMED[kind]
    elif kind in "*/":
        b = new = rng.randint(2, 12)
    elif kind == "back":
        new = rng.choice((20, 50, 100, 200, 500, 1000, result + new))
        a, op, b = new, "-", result
    elif kind == "instead":  # `new` takes the place of one number of a single operation
        left, op, right = before.steps[0].expression.split()
        numbers, at = [int(left), int(right)], rng.randrange(2)
        slots["a"] = (left, right)[at]
        numbers[at] = new
        a, b = numbers
        easy = op in "+-/" or max(numbers) <= 12
        if len(before.steps) > 1 or before.question.count(slots["a"]) != 1 or min(numbers) < 1 or not easy:
            return None
    slots["b"] = in_words(new, rng) if rng.random() < 0.1 else str(new)
    return None if op == "/" and a % b else (a, op, b, slots)
