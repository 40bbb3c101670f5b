"""Grade-school arithmetic word problems with worked answers: the text on which the built-in model is trained.

A problem is drawn from a seed alone. Its question decides the split: a stable hash puts about one question in
`HELD_OUT_SHARE` on the held-out side, so a held-out question is never a training question, whatever the seeds. Numbers
are small, and every reasoning line does exactly one operation, `12 + 7 = 19`. A model of two million weights can
therefore learn the task on a laptop. One to six operations lead to an answer.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 20  # one question in twenty

NAMES = [
    "Mia", "Leo", "Ana", "Tom", "Zoe", "Ben", "Eva", "Sam", "Ida", "Max",
    "Lily", "Noah", "Ruth", "Omar", "Kim", "Jack", "Nina", "Paul", "Rosa", "Dan",
]  # fmt: skip
ITEMS = [
    "apples", "pens", "books", "cards", "shells", "coins", "stamps", "plums",
    "marbles", "eggs", "cups", "roses", "balls", "toys", "pears", "kites",
]  # fmt: skip
PLACES = ["boxes", "bags", "baskets", "jars", "rows", "shelves", "trays", "tables"]
GOODS = ["cake", "book", "lamp", "ball", "hat", "pen", "cup", "kite", "toy", "bag"]
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]


@dataclass(frozen=True)
class ProblemStep:
    """One operation of a worked answer."""

    before: str
    expression: str
    result: int
    after: str
    level: int  # 0: all its numbers are in the question; n: it needs a result of level n - 1
    operands: tuple[ProblemStep | int, ProblemStep | int]  # the step that found a number, or a number of the question

    @property
    def line(self) -> str:
        """The reasoning line, such as `Now Mia has 12 + 7 = 19 apples.`"""
        return f"{self.before} {self.expression} = {self.result}{self.after}."

    @property
    def sentence(self) -> str:
        """The result without the operation, such as `Now Mia has 19 apples.`"""
        return f"{self.before} {self.result}{self.after}."


@dataclass(frozen=True)
class WordProblem:
    """One word problem. `solution` is the worked answer; its last line is `#### answer`."""

    question: str
    steps: tuple[ProblemStep, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """Every step as a line, then the answer."""
        return "\n".join([*self.lines, f"#### {self.answer}"])

    @property
    def lines(self) -> list[str]:
        return [step.line for step in self.steps]


class _Result(int):
    """A number that a step has found."""

    step: ProblemStep


@dataclass
class Work:
    """Collects the steps to an answer."""

    steps: list[ProblemStep]

    def do(self, before: str, a: int, op: str, b: int, after: str = "") -> int:
        result = _Result({"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[op](a, b))
        assert op != "/" or a % b == 0 or after  # the words after a rounded quotient give the remainder
        left, right = (n.step if isinstance(n, _Result) else n for n in (a, b))
        level = max(n.level + 1 if isinstance(n, ProblemStep) else 0 for n in (left, right))
        result.step = ProblemStep(before, f"{a} {op} {b}", int(result), after, level, (left, right))
        self.steps.append(result.step)
        return result


_Family = Callable[[random.Random, Work], str]


def problems(split: Split, n: int, seed: int = 0) -> list[WordProblem]:
    """Return the first `n` distinct problems of a split: the same list for the same seed, on every machine."""
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    seen: set[str] = set()
    out: list[WordProblem] = []
    stream = problem_stream(split, seed)
    while len(out) < n:
        problem = next(stream)
        if problem.question not in seen:
            seen.add(problem.question)
            out.append(problem)
    return out


def problem_stream(split: Split, seed: int = 0) -> Iterator[WordProblem]:
    """Yield endless problems of one split; repeats are possible but rare."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is 'train' or 'held_out', got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = _draw(rng)
        if split_of(problem.question) == split:
            yield problem


def split_of(question: str) -> Split:
    """Return the split of a question, which depends on its text only."""
    return "held_out" if zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0 else "train"


def _draw(rng: random.Random) -> WordProblem:
    work = Work([])
    question = rng.choice(_FAMILIES)(rng, work)
    return WordProblem(question, tuple(work.steps))


def _story(rng: random.Random, work: Work) -> str:
    """Things come and go: two or three events change one count."""
    (name, friend), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    count = rng.randint(5, 40)
    opening = rng.choice(["{n} has {c} {i}.", "{n} starts with {c} {i}.", "One day {n} has {c} {i}."])
    text = [opening.format(n=name, c=count, i=items)]
    for _ in range(rng.choice([2, 2, 3])):
        if count < 4 or (count < 60 and rng.random() < 0.5):
            change = rng.randint(2, 30)
            gain = rng.choice(["{n} buys {c} more.", "{f} gives {n} {c} more.", "Then {n} finds {c} more."])
            text.append(gain.format(n=name, f=friend, c=change))
            count = work.do(f"Now {name} has", count, "+", change, f" {items}")
        else:
            change = rng.randint(2, min(30, count - 1))
            loss = rng.choice(["{n} gives {c} to {f}.", "Then {n} loses {c}.", "{n} sells {c}."])
            text.append(loss.format(n=name, f=friend, c=change))
            count = work.do(f"Now {name} has", count, "-", change, f" {items}")
    ask = rng.choice(["How many {i} does {n} have now?", "How many {i} does {n} have in the end?"])
    return " ".join([*text, ask.format(n=name, i=items)])


def _containers(rng: random.Random, work: Work) -> str:
    """Equal groups, then some are added or taken away."""
    name, items, places = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    groups, share = rng.randint(2, 9), rng.randint(2, 9)
    openings = ["{n} has {g} {p} with {e} {i} each.", "{n} puts {e} {i} in each of {g} {p}."]
    opening = rng.choice([*openings, "{n} fills {g} {p} with {e} {i} each."])
    text = [opening.format(n=name, g=groups, e=share, p=places, i=items)]
    total = work.do(f"The {places} hold", groups, "*", share, f" {items}")
    if rng.random() < 0.5:
        extra = rng.randint(2, 20)
        text.append(rng.choice(["There are {c} more on the floor.", "{n} finds {c} more."]).format(n=name, c=extra))
        total = work.do("In all there are", total, "+", extra, f" {items}")
        text.append(f"How many {items} are there in all?")
    else:
        lost = rng.randint(2, min(20, total - 1))
        text.append(rng.choice(["Then {c} are sold.", "{n} gives {c} away.", "Then {c} break."]).format(n=name, c=lost))
        total = work.do("That leaves", total, "-", lost, f" {items}")
        text.append(f"How many {items} are left?")
    return " ".join(text)


def _shop(rng: random.Random, work: Work) -> str:
    """Several of one thing, one of another, and perhaps the change."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    good = rng.choice(GOODS)
    number, price, other = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    short = "{n} buys {k} {i} for {p} dollars each and a {g} for {o} dollars."
    opening = rng.choice([short, "In a shop {n} pays {p} dollars for each of {k} {i} and {o} dollars for a {g}."])
    text = [opening.format(n=name, k=number, i=items, p=price, g=good, o=other)]
    total = work.do(f"The {items} cost", number, "*", price, " dollars")
    total = work.do(f"With the {good} that is", total, "+", other, " dollars")
    if rng.random() < 0.5:
        text.append(rng.choice(["How much does {n} pay?", "How many dollars does {n} pay in all?"]).format(n=name))
        return " ".join(text)
    paid = total + rng.randint(1, 30)
    text.append(rng.choice(["{n} has {c} dollars.", "{n} pays with {c} dollars."]).format(n=name, c=paid))
    text.append(rng.choice(["How many dollars are left?", "How much money does {n} have left?"]).format(n=name))
    work.do("That leaves", paid, "-", total, " dollars")
    return " ".join(text)


def _compare(rng: random.Random, work: Work) -> str:
    """One person has more, fewer or a multiple of another's items; then both together."""
    (first, second), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    kind = rng.choice(["more", "fewer", "times"])
    if kind == "times":
        base, factor = rng.randint(3, 9), rng.randint(2, 5)
        word = {2: "two", 3: "three", 4: "four", 5: "five"}[factor]
        middle = f"{second} has {word} times as many."
        other = work.do(f"{second} has", base, "*", factor, f" {items}")
    else:
        base = rng.randint(12, 45)
        gap = rng.randint(2, 30 if kind == "more" else base - 2)
        middle = f"{second} has {gap} {kind} than {first}."
        other = work.do(f"{second} has", base, "+" if kind == "more" else "-", gap, f" {items}")
    opening = rng.choice(["{a} has {b} {i}.", "There are {b} {i} in the bag of {a}."]).format(a=first, b=base, i=items)
    if rng.random() < 0.3:
        return f"{opening} {middle} How many {items} does {second} have?"
    ask = rng.choice(["How many {i} do they have together?", "How many {i} do {a} and {b} have in all?"])
    work.do("Together they have", base, "+", other, f" {items}")
    return f"{opening} {middle} {ask.format(i=items, a=first, b=second)}"


def _daily(rng: random.Random, work: Work) -> str:
    """The same amount every day, towards a goal or from a stock."""
    name, share, days = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 9)
    amount = share * days + rng.randint(2, 40)
    kind = rng.choice(["pages", "miles", "dollars"])
    opening = {
        "pages": f"{name} reads {share} pages a day for {days} days. The book has {amount} pages.",
        "miles": f"{name} walks {share} miles a day for {days} days. The trip is {amount} miles long.",
        "dollars": f"{name} saves {share} dollars a day for {days} days. A lamp costs {amount} dollars.",
    }[kind]
    ask = {
        "pages": rng.choice(["How many pages are left?", "How many pages does {n} still have to read?"]),
        "miles": rng.choice(["How many miles are left?", "How many miles does {n} still have to walk?"]),
        "dollars": rng.choice(["How many dollars are still needed?", "How many more dollars does {n} need?"]),
    }[kind]
    done = work.do(f"In {days} days that is", share, "*", days, f" {kind}")
    work.do("That leaves", amount, "-", done, f" {kind}")
    return f"{opening} {ask.format(n=name)}"


def _share(rng: random.Random, work: Work) -> str:
    """Something is gathered or put aside; the result is shared equally."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    parts, share = rng.randint(2, 9), rng.randint(2, 9)
    total = parts * share
    if rng.random() < 0.5:
        first = rng.randint(1, total - 1)
        opening = rng.choice(["{n} has {a} {i} and buys {b} more.", "{n} picks {a} {i} and then {b} more."])
        text = [opening.format(n=name, a=first, b=total - first, i=items)]
        total = work.do(f"{name} has", first, "+", total - first, f" {items}")
        text.append(rng.choice(["{p} friends share them equally.", "They are shared equally by {p} friends."]))
    else:
        kept = rng.randint(2, 15)
        text = [rng.choice(["{n} has {a} {i} and keeps {b}.", "{n} has {a} {i}, but {b} are broken."])]
        text[0] = text[0].format(n=name, a=total + kept, b=kept, i=items)
        total = work.do("To share there are", total + kept, "-", kept, f" {items}")
        text.append(rng.choice(["{p} friends share the rest equally.", "The rest are shared equally by {p} friends."]))
    text[1] = text[1].format(p=parts)
    ask = rng.choice(["How many {i} does each friend get?", "How many {i} are there for each friend?"])
    work.do("Each gets", total, "/", parts, f" {items}")
    return " ".join([*text, ask.format(i=items)])


def _work_pay(rng: random.Random, work: Work) -> str:
    """Hours on two days, paid by the hour."""
    name, wage = rng.choice(NAMES), rng.randint(3, 9)
    day, other_day = rng.sample(DAYS, 2)
    first = rng.randint(2, 6)
    second = rng.randint(2, 9 - first)
    opening = rng.choice(["{n} earns {w} dollars an hour.", "For each hour of work {n} gets {w} dollars."]).format(
        n=name, w=wage
    )
    middle = f"{name} works {first} hours on {day} and {second} hours on {other_day}."
    hours = work.do(f"{name} works", first, "+", second, " hours")
    total = work.do("That pays", hours, "*", wage, " dollars")
    if rng.random() < 0.5:
        return f"{opening} {middle} How many dollars does {name} earn?"
    spent = rng.randint(2, total - 1)
    spend = f"Then {name} spends {spent} dollars."
    work.do("That leaves", total, "-", spent, " dollars")
    return f"{opening} {middle} {spend} How many dollars are left?"


def _farm(rng: random.Random, work: Work) -> str:
    """Two kinds of things with different counts of parts."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    one, one_each, two, two_each, part = rng.choice(
        [("hens", 2, "cows", 4, "legs"), ("bikes", 2, "cars", 4, "wheels"), ("ducks", 2, "beetles", 6, "legs")]
    )
    place = rng.choice(["On a farm there are", "In a picture {n} sees", "{n} counts"]).format(n=rng.choice(NAMES))
    first = work.do(f"The {one} have", a, "*", one_each, f" {part}")
    second = work.do(f"The {two} have", b, "*", two_each, f" {part}")
    work.do("In all there are", first, "+", second, f" {part}")
    return f"{place} {a} {one} and {b} {two}. How many {part} are there in all?"


def _plain(rng: random.Random, work: Work) -> str:
    """One operation without a story."""
    op = rng.choice("+-*/")
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    if op == "-":
        a, b = max(a, b) + 1, min(a, b)
    elif op == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
    elif op == "/":
        b = rng.randint(2, 9)
        a = b * rng.randint(2, 12)
    work.do("It is", a, op, b)
    word = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[op]
    shape = rng.choice(["What is {a} {o} {b}?", "{a} {o} {b}", "{a} {o} {b} = ?", "What is {a} {w} {b}?"])
    return shape.format(a=a, o=op, b=b, w=word)


def _one(rng: random.Random, work: Work) -> str:
    """A story of one operation."""
    (name, friend), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    kind = rng.choice(["more", "less", "times", "share"])
    if kind == "more":
        a, b = rng.randint(2, 60), rng.randint(2, 40)
        work.do(f"Now {name} has", a, "+", b, f" {items}")
        event = rng.choice(["{n} buys {b} more.", "{f} gives {n} {b} more.", "{n} gets {b} more from {f}."])
        ask = rng.choice(["How many {i} does {n} have now?", "How many {i} does {n} have in all?"])
    elif kind == "less":
        a = rng.randint(6, 60)
        b = rng.randint(2, a - 1)
        work.do(f"Now {name} has", a, "-", b, f" {items}")
        event = rng.choice(["{n} gives {b} to {f}.", "{n} loses {b}.", "Then {n} sells {b}."])
        ask = rng.choice(["How many {i} does {n} have now?", "How many {i} are left?"])
    elif kind == "times":
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        place = rng.choice(PLACES)
        work.do(f"The {place} hold", a, "*", b, f" {items}")
        return f"{name} has {a} {place} with {b} {items} each. How many {items} does {name} have?"
    else:
        b = rng.randint(2, 9)
        a = b * rng.randint(2, 9)
        work.do("Each gets", a, "/", b, f" {items}")
        event, ask = "{b} friends share them equally.", "How many {i} does each friend get?"
    text = f"{{n}} has {{a}} {{i}}. {event} {ask}"
    return text.format(n=name, f=friend, i=items, a=a, b=b)


def _long_story(rng: random.Random, work: Work) -> str:
    """Four to six events; some bring several containers, which is an operation of its own."""
    (name, friend), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    count = rng.randint(5, 40)
    text = [f"{name} has {count} {items}."]
    wanted = rng.choice([4, 5, 6])
    while len(work.steps) < wanted:
        if len(work.steps) < wanted - 1 and count < 90 and rng.random() < 0.3:
            groups, share, place = rng.randint(2, 6), rng.randint(2, 9), rng.choice(PLACES)
            text.append(f"{name} gets {groups} {place} with {share} {items} each.")
            change = work.do(f"The {place} hold", groups, "*", share, f" {items}")
            count = work.do(f"Now {name} has", count, "+", change, f" {items}")
        elif count < 4 or (count < 90 and rng.random() < 0.5):
            change = rng.randint(2, 30)
            text.append(
                rng.choice(["{n} buys {c} more.", "{f} gives {n} {c} more."]).format(n=name, f=friend, c=change)
            )
            count = work.do(f"Now {name} has", count, "+", change, f" {items}")
        else:
            change = rng.randint(2, min(30, count - 1))
            text.append(rng.choice(["{n} gives {c} to {f}.", "{n} sells {c}."]).format(n=name, f=friend, c=change))
            count = work.do(f"Now {name} has", count, "-", change, f" {items}")
    return " ".join([*text, f"How many {items} does {name} have in the end?"])


def _long_shop(rng: random.Random, work: Work) -> str:
    """Three kinds of things at a price each, and perhaps the change."""
    name = rng.choice(NAMES)
    kinds = [(rng.randint(2, 9), rng.randint(2, 9), item) for item in rng.sample(ITEMS, 3)]
    listed = [f"{number} {items} for {price} dollars each" for number, price, items in kinds]
    costs = [work.do(f"The {items} cost", number, "*", price, " dollars") for number, price, items in kinds]
    total = work.do("Together that is", costs[0], "+", costs[1], " dollars")
    total = work.do("In all that is", total, "+", costs[2], " dollars")
    bought = f"{name} buys {listed[0]}, {listed[1]} and {listed[2]}."
    if rng.random() < 0.5:
        return f"{bought} How much does {name} pay?"
    paid = total + rng.randint(1, 40)
    work.do("That leaves", paid, "-", total, " dollars")
    return f"{bought} {name} pays with {paid} dollars. How many dollars are left?"


_FAMILIES: list[_Family] = [
    _plain, _one, _one, _story, _story, _containers, _shop, _compare, _daily, _share, _work_pay, _farm,
    _long_story, _long_story, _long_shop,
]  # fmt: skip
