"""Typed texts: sums in their usual forms, short stories in other words, and everything else.

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
from pathlib import Path

from kimi_w4a8_lab.accuracy.problems import MOST as MOST_PROBLEMS
from kimi_w4a8_lab.accuracy.problems import parse_answer, problems

from .operations import NAMED, operands, worked
from .problems import WordProblem, Work
from .stories import people, story
from .wordings import MOST, SYMBOLS, chosen, in_words, invented, symbol, varied, wordings

ABOUT = "I am a small model made for tests. I only know sums with whole numbers up to 1,000 and short word problems."
REPLIES = (ABOUT, f"Hello! {ABOUT}", f"You are welcome! {ABOUT}")
NO_SUM = "This is no sum."  # what is thought before a reply
EXAMINATION = Path(__file__).with_name("typed.jsonl")
BLIND = EXAMINATION.with_name("blind.jsonl")
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_CHAINS = (
    "a+b+c", "a+b+c", "a-b+c", "a+b-c", "a-b-c", "a*b+c", "a+b*c", "a*b-c", "a-b*c", "(a+b)*c", "a*(b+c)", "(a-b)*c",
    "a*b*c", "a+b+c+d", "a*b+c*d", "a+b-c+d", "(a+b)*(c+d)", "a*(b-c)", "a-(b+c)",
)  # fmt: skip
_LISTS = {
    "C": "countries", "P": "people", "B": "books", "T": "topics", "U": "topics", "L": "languages", "K": "codes",
    "J": "codes",
}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """One text of an examination. answer: None where no sum is asked for; first: the question before this one.

    kind: sum, story, follow-up, other, or large, which is beyond what the model was made for.
    """

    kind: str
    text: str
    answer: str | None
    first: str = ""

    def accepts(self, reply: str) -> bool:
        """True for the right number, with its remainder, or for a reply that says what the model is."""
        if self.answer is None or (self.kind == "large" and reply in REPLIES):
            return reply in REPLIES
        return parse_answer(reply) == int(self.answer.split()[0]) and self.answer in reply


@cache
def examination(file: Path = EXAMINATION) -> tuple[Typed, ...]:
    """Return the texts of `typed.jsonl`, which the model is not trained on, or of another file."""
    return tuple(Typed(**json.loads(line)) for line in file.read_text().splitlines())


@cache
def _examined() -> frozenset[str]:
    """Texts that are never trained on: those of both examinations, and the held-out problems that a sum may equal."""
    asked = {case.text for case in (*examination(), *examination(BLIND))}
    return frozenset(asked | {problem.question for problem in problems(MOST_PROBLEMS)})


@cache
def _examined_wordings() -> frozenset[str]:
    cases = (*examination(), *examination(BLIND))
    return frozenset(_wording(case.text) for case in cases if case.kind not in ("sum", "large"))


def _wording(text: str) -> str:
    return re.sub(r"\d+", "7", text.lower())


def is_examined(text: str) -> bool:
    """True for a text that is never trained on, or for a story or other text with the wording of one."""
    return text in _examined() or _wording(text) in _examined_wordings()


def typed_problem(rng: random.Random, direct: bool = False) -> WordProblem:
    """Draw a sum or a story; with `direct` every operation is one step, as a calculator works it out."""
    while True:
        work = Work([])
        kind = rng.random()
        if kind < 0.12:
            text = _chain(rng, work, direct)
        else:
            text = (_sum if kind < 0.48 else story)(rng, work, direct)
        if not is_examined(text) and (not direct or not any(step.after for step in work.steps)):
            return WordProblem(text, tuple(work.steps))


def typed_other(rng: random.Random) -> tuple[str, str]:
    """Draw a text that asks for no sum, and the reply to it."""
    while True:
        kind, words = rng.random(), wordings()["other"]
        if kind > 0.6:
            text, reply = _statement(rng) if kind > 0.75 else _wrapped(_too_large(rng), rng), ABOUT
        elif kind < 0.08:
            text, reply = rng.choice(words["greet"]), REPLIES[1]
        elif kind < 0.14:
            text, reply = rng.choice(words["thank"]), REPLIES[2]
        else:
            parts = [rng.choice(words["plain"]) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
            if rng.random() < 0.08:
                parts.insert(0, rng.choice(words["greet"]))
            text, reply = " ".join(parts), ABOUT
        text = varied(_filled(text, rng), rng)
        if not is_examined(text) and text.strip():
            return text, reply


def prose(rng: random.Random) -> str:
    """Some sentences that mean nothing, as long as an agent's instructions."""
    sentences, common = [], wordings()["common"]
    for _ in range(rng.randint(3, 25)):
        parts = [rng.choice(common) if rng.random() < 0.6 else invented(rng) for _ in range(rng.randint(4, 12))]
        sentences.append(f"{' '.join(parts).capitalize()}{rng.choice(('.', '.', ':', '!'))}")
    return rng.choice((" ", "\n", "\n- ")).join(sentences)


def _sum(rng: random.Random, work: Work, direct: bool) -> str:
    op = rng.choice("++--**///")
    a, b = operands(op, rng)
    kind, words = rng.random(), wordings()
    if kind < 0.2:
        return _aside(rng, work, direct)
    texts = _operand_texts(a, b, rng, 0.08 if kind < 0.5 else 0.4)
    if kind < 0.5:
        right = f"({texts['b']})" if b < 0 and rng.random() < 0.5 else texts["b"]
        text = f"{texts['a']}{symbol(op, rng)}{right}"
    elif kind < 0.8:
        text = chosen(rng.choice(words["words"][op]), rng).format(**texts)
    else:
        text = chosen(rng.choice(words["orders"][op]), rng).format(**texts)
    if "difference" in text:
        a, b = max(a, b), min(a, b)
    worked(work, a, op, b, direct)
    if rng.random() < 0.3:
        text = text.removeprefix("the ")
    return varied(text if kind >= 0.8 else _wrapped(text, rng), rng)


def _operand_texts(a: int, b: int, rng: random.Random, share: float) -> dict[str, str]:
    """Both numbers, with probability `share` one or both of them in words."""
    which = rng.choice(("ab", "ab", "ab", "a", "b")) if rng.random() < share and abs(a) + abs(b) <= 2 * MOST else ""
    numbers = {"a": a, "b": b}
    return {name: in_words(n, rng) if name in which and abs(n) <= MOST else str(n) for name, n in numbers.items()}


def _aside(rng: random.Random, work: Work, direct: bool) -> str:
    """A sum asked from its other side, a double, a square, a share, a list, a mean."""
    words = wordings()["asides"]
    kind = rng.choice([*"+---//*", *(name for name in words if name not in "+-*/")])
    a, b = operands(kind if kind in "+-*/" else "*", rng)
    c, share = rng.randint(1, 20), 10
    if kind in NAMED:
        op, b = NAMED[kind]
        a = rng.randint(1, 12 if b == 12 else 100) * (b if op == "/" else 1)
        worked(work, a, op, b, direct)
    elif kind in "+-*/":
        a, b = (max(a, b), min(a, b)) if kind == "-" else (a - a % b, b) if kind == "/" else (a, b)
        worked(work, a, kind, b, direct)
    elif kind == "square":
        a = rng.randint(1, rng.choice((12, 30)))
        worked(work, a, "*", a, direct)
    elif kind == "share":
        share, part = rng.choice(((10, 10), (50, 2), (25, 4), (20, 5)))
        a = part * rng.randint(1, 30)
        worked(work, a, "/", part, direct)
    else:
        a, b = (rng.randint(1, rng.choice((12, 50))) for _ in range(2))
        b += (a + b) % 2 if kind == "mean" else 0
        total = worked(work, a, "+", b, direct)
        worked(work, total, *("/", 2) if kind == "mean" else ("+", c), direct)
    text = chosen(rng.choice(words[kind]), rng).format(a=a, b=b, c=c, p=share)
    return varied(_wrapped(text, rng) if rng.random() < 0.25 else text, rng)


def _chain(rng: random.Random, work: Work, direct: bool) -> str:
    pattern = rng.choice(_CHAINS)
    most = rng.choice((12, 12, 30) if "*" in pattern else (10, 50, 100))
    values = {name: rng.randint(1, most) for name in "abcd"}

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return values[node.id]
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        return worked(work, left, _OPERATORS[type(node.op)], right, direct)

    walk(ast.parse(pattern, mode="eval").body)
    signs = {op: symbol(op, rng) for op in SYMBOLS}
    words = rng.random() < 0.12
    if words:
        signs = {"+": " plus ", "-": " minus ", "*": " times "}
    spell = words and rng.random() < 0.5
    numbers = {name: in_words(value, rng) if spell else str(value) for name, value in values.items()}
    text = "".join(numbers.get(part) or signs.get(part, part) for part in pattern)
    return varied(_wrapped(text, rng), rng)


def _wrapped(expression: str, rng: random.Random) -> str:
    return chosen(rng.choice(wordings()["ask"]), rng).format(e=expression)


def _too_large(rng: random.Random) -> str:
    """An operation with a number above 1,000, or a product of three digits by two or three."""
    op, a, b = rng.choice("+-**/"), *(rng.randint(MOST + 1, 10 ** rng.randint(4, 8)) for _ in range(2))
    if op == "*" and rng.random() < 0.7:
        a, b = rng.sample((rng.randint(101, 999), rng.randint(rng.choice((13, 101)), 999)), 2)
    elif rng.random() < 0.5:
        a, b = rng.sample((a, b % 1000), 2)
    if rng.random() < 0.2:
        return chosen(rng.choice(wordings()["words"][op]), rng).format(a=a, b=b)
    return f"{a}{symbol(op, rng)}{b}" if rng.random() < 0.85 else f"{a:,}{symbol(op, rng)}{b:,}"


def _statement(rng: random.Random) -> str:
    text = rng.choice(wordings()["statement"]["plain"])
    first, second = (rng.randint(1, rng.choice((12, 100, 1000))) for _ in range(2))
    said = people(text, rng, a=first, b=second)
    return said if rng.random() < 0.8 else said.rstrip(".")


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
