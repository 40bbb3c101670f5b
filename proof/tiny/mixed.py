"""Training data of the model: word problems in their forms, and what people type.

Of the typed conversations some come after others, some after the instructions of an agent.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

from .dialogues import (
    FORMS,
    Dialogue,
    Message,
    about_problem,
    assistant_turn,
    conclusion,
    declared_tools,
    instant,
    of_form,
    think,
    user_turns,
)  # fmt: skip
from .follow_ups import follow_up
from .problems import WordProblem
from .typed import NO_SUM, prose, typed_other, typed_problem

TYPED_SHARE = 0.5  # of the conversations
SMALL_TALK = (
    (("Hello!", "Hi", "Hey there", "Good morning"), "Hello! Ask me a word problem."),
    (("Who are you?", "What are you?", "What is your name?"), "I am a small model that solves word problems."),
    (("What can you do?", "Help", "How do you work?"), "I solve word problems, with a calculator if you give me one."),
    (("Thanks!", "Thank you", "Great, thanks"), "You are welcome."),
)


def drawn(stream: Iterator[WordProblem], rng: random.Random, typed_share: float = TYPED_SHARE) -> Dialogue:
    """Draw a typed text, or take the next problem."""
    return typed(rng) if rng.random() < typed_share else about_problem(stream, rng)


def typed(rng: random.Random) -> Dialogue:
    """A sum, a story or anything else as people type it."""
    if rng.random() < 0.15:
        return follow_up(rng)
    if rng.random() < 0.35:
        text, reply = typed_other(rng)
        declared = declared_tools(rng)[1] if rng.random() < 0.3 else []
        said = [*user_turns(text, rng), assistant_turn(reply, NO_SUM)]
        dialogue = Dialogue(said, None, declared, thinking=rng.random() < 0.6)
    else:
        (form,) = rng.choices(list(FORMS), (4, 6, 2, 1))
        problem = typed_problem(rng, direct=form == "tools")
        while form == "json" and problem.steps[-1].after:  # a remainder has no key
            problem = typed_problem(rng)
        dialogue = FORMS[form](problem, rng)
    if rng.random() < 0.2:
        dialogue = _after_typed(dialogue, rng)
    if rng.random() < 0.03 and dialogue.messages[0]["role"] == "user":
        instructions = {"role": "system", "content": prose(rng)}
        dialogue = replace(dialogue, messages=[instructions, *dialogue.messages], earlier=dialogue.earlier + 1)
    return dialogue


def short(stream: Iterator[WordProblem], rng: random.Random) -> Dialogue:
    """A conversation of few tokens, mostly one of typed texts."""
    if rng.random() < 0.22:
        return follow_up(rng)
    if rng.random() < 0.08:
        return of_form(rng.choice(("instant", "think")), stream, rng)
    if rng.random() < 0.17:
        text, reply = typed_other(rng)
        said = [*user_turns(text, rng), assistant_turn(reply, NO_SUM)]
        dialogue = Dialogue(said, None, thinking=rng.random() < 0.5)
    else:
        problem, hard = typed_problem(rng), rng.random() < 0.4
        while hard and not _learned_last(problem):
            problem = typed_problem(rng)
        dialogue = (instant if rng.random() < 0.45 else think)(problem, rng)
    return _after_typed(dialogue, rng) if rng.random() < 0.08 else dialogue


def _learned_last(problem: WordProblem) -> bool:
    """True for several steps, numbers in words, negative and larger numbers, and remainders."""
    first = problem.steps[0]
    left, op, right = first.expression.split()
    a, b = int(left), int(right)
    large = (b > 12 or first.after != "") if op == "/" else op in "+-" and min(a, b) > 99
    return len(problem.steps) > 1 or not re.search(r"\d", problem.question) or min(a, b) < 0 or large


def small_talk(rng: random.Random) -> Dialogue:
    """The small talk of the tokenizer's corpus; nothing else is trained on it."""
    asked, answer = rng.choice(SMALL_TALK)
    return Dialogue([*user_turns(rng.choice(asked), rng), assistant_turn(answer, "This is no problem.")], None)


def _after_typed(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """One to three typed texts with their answers in front."""
    first = min(dialogue.turns()) - 1
    before: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.35:
            text, reply = typed_other(rng)
        else:
            problem = typed_problem(rng)
            text, reply = problem.question, conclusion(problem) if dialogue.thinking else problem.solution
        before += [{"role": "user", "content": text}, assistant_turn(reply)]
    messages = [*dialogue.messages[:first], *before, *dialogue.messages[first:]]
    return replace(dialogue, messages=messages, earlier=first + len(before))
