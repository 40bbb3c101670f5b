"""What people type: sums in their usual forms, short stories in other words, and everything else.

`Problem`s come out like those of `problems.py`, with lines that all begin with `It is`. To everything else belongs one
of three replies, which say what the model is and what it can do. The wordings are in `wordings.toml`.
"""

from __future__ import annotations

import ast
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.toml import tomllib
from kimi_w4a8_eagle3.eval.problems import MOST as MOST_PROBLEMS
from kimi_w4a8_eagle3.eval.problems import parse_answer, problems

from .problems import Problem, Work

ABOUT = "I am a small model made for tests. I only know sums with whole numbers up to 1,000 and short word problems."
REPLIES = (ABOUT, f"Hello! {ABOUT}", f"You are welcome! {ABOUT}")
NO_SUM = "This is no sum."  # what is thought before a reply
EXAMINATION = Path(__file__).with_name("typed.jsonl")
MOST = 1000  # the largest number of a sum
SYMBOLS = {
    "+": ("+", " + ", "+", " + ", "＋"), "-": ("-", " - ", "-", " - ", " − ", "–"),
    "*": ("*", " * ", "x", " x ", "×", " × ", "·", "X", " X "), "/": ("/", " / ", "/", " / ", "÷", " ÷ ", ":", " : "),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_CHAINS = (
    "a+b+c", "a+b+c", "a-b+c", "a+b-c", "a-b-c", "a*b+c", "a+b*c", "a*b-c", "a-b*c", "(a+b)*c", "a*(b+c)", "(a-b)*c",
    "a*b*c", "a+b+c+d", "a*b+c*d", "a+b-c+d", "(a+b)*(c+d)", "a*(b-c)", "a-(b+c)",
)  # fmt: skip
_LISTS = {
    "C": "countries", "P": "people", "B": "books", "T": "topics", "U": "topics", "L": "languages", "K": "codes",
    "J": "codes",
}  # fmt: skip
_PLURAL = re.compile(r"\b(I|[Ww]e|[Yy]ou|[Tt]hey) (has|is|was|carries|\w+[^s]s)\b")
_ASKED_PLURAL = re.compile(r"\b(does|has|is) (I|we|you|they)\b")


@cache
def wordings() -> dict[str, Any]:
    """The content of `wordings.toml`."""
    return tomllib.loads(Path(__file__).with_name("wordings.toml").read_text())


@dataclass(frozen=True)
class Typed:
    """One text of the examination. kind: sum, story or other; answer: None where no sum is asked for."""

    kind: str
    text: str
    answer: str | None

    def accepts(self, reply: str) -> bool:
        """True for the right number, with its remainder, or for a reply that says what the model is."""
        if self.answer is None:
            return reply in REPLIES
        return parse_answer(reply) == int(self.answer.split()[0]) and self.answer in reply


@cache
def examination() -> tuple[Typed, ...]:
    """Return the texts of `typed.jsonl`, which the model is not trained on."""
    return tuple(Typed(**json.loads(line)) for line in EXAMINATION.read_text().splitlines())


@cache
def _examined() -> frozenset[str]:
    """Texts that are never trained on: those of the examination, and the held-out problems that a sum may equal."""
    return frozenset(each.text for each in examination()) | {problem.question for problem in problems(MOST_PROBLEMS)}


def typed_problem(rng: random.Random, direct: bool = False) -> Problem:
    """Draw a sum or a story; with `direct` every operation is one step, as a calculator works it out."""
    while True:
        work = Work([])
        kind = rng.random()
        if kind < 0.12:
            text = _chain(rng, work)
        else:
            text = (_sum if kind < 0.6 else _story)(rng, work, direct)
        if text not in _examined() and (not direct or not any(step.after for step in work.steps)):
            return Problem(text, tuple(work.steps))


def typed_other(rng: random.Random) -> tuple[str, str]:
    """Draw a text that asks for no sum, and the reply to it."""
    while True:
        kind, words = rng.random(), wordings()["other"]
        if kind < 0.08:
            text, reply = rng.choice(words["greet"]), REPLIES[1]
        elif kind < 0.14:
            text, reply = rng.choice(words["thank"]), REPLIES[2]
        else:
            parts = [rng.choice(words["plain"]) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
            if rng.random() < 0.08:
                parts.insert(0, rng.choice(words["greet"]))
            if rng.random() < 0.08:
                parts = [rng.choice(wordings()["ask"]).format(e=_too_large(rng))]
            text, reply = " ".join(parts), ABOUT
        text = _varied(_filled(text, rng), rng)
        if text not in _examined() and text.strip():
            return text, reply


def prose(rng: random.Random) -> str:
    """Some sentences that mean nothing, as long as an agent's instructions."""
    sentences, common = [], wordings()["common"]
    for _ in range(rng.randint(3, 25)):
        parts = [rng.choice(common) if rng.random() < 0.6 else invented(rng) for _ in range(rng.randint(4, 12))]
        sentences.append(f"{' '.join(parts).capitalize()}{rng.choice(('.', '.', ':', '!'))}")
    return rng.choice((" ", "\n", "\n- ")).join(sentences)


def invented(rng: random.Random) -> str:
    """A word that no language has, so that the model copes with words that it has not seen."""
    parts = wordings()["syllables"]
    syllables = ([rng.choice(parts[name]) for name in ("start", "middle", "end")] for _ in range(rng.randint(1, 3)))
    return "".join(chain.from_iterable(syllables))


def spelled(number: int) -> str:
    """A number below 1,000 in English words."""
    if number < 0:
        return f"minus {spelled(-number)}"
    ones, tens = wordings()["numbers"]["ones"], wordings()["numbers"]["tens"]
    if number >= 100:
        rest = f" and {spelled(number % 100)}" if number % 100 else ""
        return f"{ones[number // 100]} hundred{rest}"
    if number < 20:
        return ones[number]
    return tens[number // 10 - 2] + (f" {ones[number % 10]}" if number % 10 else "")


def operands(op: str, rng: random.Random) -> tuple[int, int]:
    """Two numbers, most of them small, such that the model can work the operation out."""
    kind = rng.random()
    if op in "+-":
        most = 20 if kind < 0.3 else 100 if kind < 0.7 else MOST
        a, b = rng.randint(0, most), rng.randint(0, most if rng.random() < 0.7 else min(most, 100))
        if op == "-" and a < b and rng.random() < 0.6:
            a, b = b, a
    elif op == "*":
        if kind < 0.55:
            a, b = rng.randint(0, 12), rng.randint(0, 12)
        elif kind < 0.75:
            a, b = rng.randint(11, 99), rng.randint(2, 9)
        elif kind < 0.88:
            a, b = rng.randint(11, 99), rng.randint(11, 99)
        elif kind < 0.94:
            a, b = rng.randint(100, 500), rng.randint(2, 9)
        else:
            a, b = rng.randint(1, 99), rng.choice((10, 20, 25, 50, 100))
        a, b = rng.sample((a, b), 2)
    elif kind < 0.85:
        b = rng.randint(1, 12) if kind < 0.72 else rng.randint(13, 100)
        quotient = rng.randint(0, 12) if kind < 0.42 or b > 12 else rng.randint(2, MOST // b)
        a = b * min(quotient, MOST // b)
    else:
        return rng.randint(2, 200), rng.randint(2, 12)
    if kind % 0.05 < 0.006 and max(a, b) <= 100:
        a, b = rng.choice(((-a, b), (a, -b), (-a, -b)))
    return a, b


def worked(work: Work, a: int, op: str, b: int, direct: bool = False) -> int:
    """Take the steps of one operation: a product of larger numbers is made of the products of their parts."""
    small, large = sorted((abs(a), abs(b)))
    if op == "/" and a % b:
        return work.do("It is", a, op, b, f" remainder {a % b}")
    round_number = small % 10 == 0 and small < 100 and large < 100
    if direct or op != "*" or small < 2 or large <= 12 or (large < 100 and small < 10) or small == 10 or round_number:
        return work.do("It is", a, op, b)
    sign = 1 if a * b > 0 else -1
    if large > 99:
        large, small = small, large
        unit = 100
    else:
        unit = 10
    first = work.do("It is", large, "*", sign * (small // unit * unit))
    if small % unit == 0:
        return first
    second = work.do("It is", large, "*", sign * (small % unit))
    return work.do("It is", first, "+", second)


def _sum(rng: random.Random, work: Work, direct: bool) -> str:
    op = rng.choice("++--**//")
    a, b = operands(op, rng)
    kind, words = rng.random(), wordings()
    if kind < 0.06:
        return _named(rng, work)
    spell = kind > 0.6 and rng.random() < 0.3 and 0 <= min(a, b) <= max(a, b) <= 100
    texts = {"a": spelled(a) if spell else str(a), "b": spelled(b) if spell else str(b)}
    if kind < 0.6:
        right = f"({b})" if b < 0 and rng.random() < 0.5 else str(b)
        text = f"{a}{rng.choice(SYMBOLS[op])}{right}"
    elif kind < 0.84:
        text = rng.choice(words["words"][op]).format(**texts)
    else:
        text = rng.choice(words["orders"][op]).format(**texts)
    if "difference" in text:
        a, b = max(a, b), min(a, b)
    worked(work, a, op, b, direct)
    return _varied(text if kind >= 0.84 else _wrapped(text, rng), rng)


def _named(rng: random.Random, work: Work) -> str:
    """Doubles, halves and the like."""
    number = rng.randint(1, 100)
    factor, names = rng.choice((
        (2, ("double {}", "twice {}", "two times {}", "the double of {}")), (3, ("triple {}", "three times {}")),
        (-2, ("half of {}", "{} halved", "the half of {}")), (-4, ("a quarter of {}",)),
    ))  # fmt: skip
    if factor > 0:
        work.do("It is", number, "*", factor)
    else:
        number *= -factor
        work.do("It is", number, "/", -factor)
    return _varied(_wrapped(rng.choice(names).format(number), rng), rng)


def _chain(rng: random.Random, work: Work) -> str:
    pattern = rng.choice(_CHAINS)
    most = 12 if "*" in pattern else rng.choice((10, 50, 100))
    values = {name: rng.randint(1, most) for name in "abcd"}

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return values[node.id]
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        return worked(work, left, _OPERATORS[type(node.op)], right)

    walk(ast.parse(pattern, mode="eval").body)
    style = rng.randrange(20)
    text = "".join(
        str(values[each]) if each in values else SYMBOLS[each][style % len(SYMBOLS[each])] if each in SYMBOLS else each
        for each in pattern
    )
    return _varied(_wrapped(text, rng), rng)


def _story(rng: random.Random, work: Work, direct: bool) -> str:
    words, kind = wordings(), rng.random()
    if kind < 0.4:
        return _events(rng, work)
    if kind < 0.88:
        op = rng.choice("+-*/")
        a, b = _story_operands(op, rng)
        text = _people(rng.choice(words["single"][op]), rng, a=a, b=b)
        worked(work, a, op, b, direct)
        return _varied(text, rng)
    op = rng.choice(list(words["double"]))
    a, b = _story_operands(op[0], rng)
    c = rng.randint(2, 20)
    if op == "+/":
        c = rng.choice([d for d in range(1, 13) if (a + b) % d == 0])
    elif op == "*-":
        c = rng.randint(1, a * b)
    text = _people(rng.choice(words["double"][op]), rng, a=a, b=b, c=c)
    worked(work, worked(work, a, op[0], b, direct), op[1], c, direct)
    return _varied(text, rng)


def _events(rng: random.Random, work: Work) -> str:
    """One count that changes once or twice."""
    story, count = wordings()["story"], rng.randint(3, rng.choice((12, 30, 99)))
    text, numbers = rng.choice(story["start"]).replace("{a}", str(count)), rng.choice((1, 1, 1, 2))
    for _ in range(numbers):
        if rng.random() < 0.5 or count < 2:
            change = rng.randint(1, 40)
            event, asked = rng.choice(story["more"]), story["asked"]
            count = work.do("It is", count, "+", change)
        else:
            change = rng.randint(1, count)
            event, asked = rng.choice(story["less"]), story["left"]
            count = work.do("It is", count, "-", change)
        text = text.removesuffix(".") + rng.choice(story["joined"]).format(event.replace("{b}", str(change)))
    if text.startswith(("If", "Suppose")) and rng.random() < 0.5:
        text = text.removesuffix(".") + ", " + rng.choice(asked)
    else:
        text += " " + rng.choice(asked)
    return _varied(_people(text, rng), rng)


def _story_operands(op: str, rng: random.Random) -> tuple[int, int]:
    if op in "+-":
        a, b = sorted((rng.randint(1, rng.choice((12, 50, 200))) for _ in range(2)), reverse=True)
        return (a, b) if op == "-" else (b, a) if rng.random() < 0.5 else (a, b)
    if op == "*":
        return rng.randint(2, 12), rng.randint(2, rng.choice((12, 12, 60)))
    b = rng.randint(2, 12)
    return b * rng.randint(1, rng.choice((12, 12, 40))), b


def _people(text: str, rng: random.Random, **numbers: int) -> str:
    """Fill the slots of a story, and let verbs and sentences begin as they should."""
    world = wordings()["world"]

    def some(name: str) -> str:
        return invented(rng).capitalize() if rng.random() < 0.15 else rng.choice(world[name])

    def somebody() -> str:
        return rng.choice(world["subjects"]) if rng.random() < 0.4 else some("names")

    items = [invented(rng) + "s" if rng.random() < 0.15 else rng.choice(world["items"]) for _ in range(2)]
    things = rng.sample(world["things"], 2)
    spell = rng.random() < 0.12
    texts = {name: spelled(number) if spell else str(number) for name, number in numbers.items()}
    text = text.format(
        s=somebody(), o=some("names"), t=some("names"), i=items[0], j=items[1], n=things[0], m=things[1],
        w=rng.choice(world["places"]), p=rng.choice(world["packs"]), **texts,
    )  # fmt: skip
    text = _PLURAL.sub(lambda found: f"{found[1]} {_base(found[1], found[2])}", text)
    text = _ASKED_PLURAL.sub(lambda found: f"{_base(found[2], found[1])} {found[2]}", text)
    text = re.sub(r" +([.,?])", r"\1", text)
    if rng.random() < 0.85:
        text = re.sub(r"(^|[.?] )([a-z])", lambda found: found[1] + found[2].upper(), text)
    return text


def _base(subject: str, verb: str) -> str:
    known = {"has": "have", "is": "am" if subject == "I" else "are", "was": "was" if subject == "I" else "were"}
    return known.get(verb, {"carries": "carry", "does": "do"}.get(verb, verb.removesuffix("s")))


def _wrapped(expression: str, rng: random.Random) -> str:
    return str(rng.choice(wordings()["ask"])).format(e=expression)


def _too_large(rng: random.Random) -> str:
    a, b = (rng.randint(MOST + 1, 10 ** rng.randint(4, 8)) for _ in range(2))
    return f"{a}{rng.choice(SYMBOLS[rng.choice('+-*/')])}{b if rng.random() < 0.5 else b % 1000}"


def _filled(text: str, rng: random.Random) -> str:
    other, names = wordings()["other"], wordings()["world"]["names"]

    def fill(found: re.Match[str]) -> str:
        slot = found[1]
        if slot in _LISTS or slot == "N":
            unseen = rng.random() < (0.35 if slot in "CPBTUN" else 0.1)
            return invented(rng) if unseen else str(rng.choice(names if slot == "N" else other[_LISTS[slot]]))
        if slot in "fg":
            return f"{rng.uniform(0, 20):.{rng.randint(1, 2)}f}"
        least, most = {"y": (1000, 2030), "h": (10_000, 10**7), "k": (10_000, 10**7)}.get(slot, (2, 99))
        return str(rng.randint(least, most))

    return re.sub(r"\{([A-Za-z])\}", fill, text)


def _varied(text: str, rng: random.Random) -> str:
    """Small letters, capitals, missing and additional words and marks, as fingers have them."""
    if rng.random() < 0.05:
        lead = rng.choice(wordings()["lead"]) if rng.random() < 0.7 else invented(rng)
        text = f"{lead}{rng.choice((', ', ' ', ': '))}{text}"
    if rng.random() < 0.05:
        text = f"{text.rstrip('?. ')} {rng.choice(wordings()['tail'])}"
    kind = rng.random()
    if kind < 0.1:
        text = text.lower()
    elif kind < 0.13:
        text = text.upper()
    elif kind < 0.2:
        text = text.rstrip("?.! ")
    elif kind < 0.23:
        text += rng.choice(("!", "??", " ", ".", "\n", "?"))
    elif kind < 0.3:
        text = text[:1].upper() + text[1:]
    return text
