"""Grade-school arithmetic word problems with worked answers: the text on which the built-in model is trained.

A problem is drawn from a seed alone. Its question decides the split: a stable hash sends about one question in
`HELD_OUT_SHARE` to the held-out side, so that no held-out question can ever be a training question, whatever the
seeds. Numbers are small and every reasoning line does exactly one operation, `12 + 7 = 19`, so that a model of two
million weights can learn the task within an hour on a laptop.
"""

from __future__ import annotations

import random
import re
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

_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    """One word problem. `solution` is the worked answer; its last line is `#### answer`."""

    question: str
    solution: str
    answer: int


@dataclass
class _Work:
    """Collects reasoning lines while a family computes the answer."""

    lines: list[str]

    def do(self, before: str, a: int, op: str, b: int, after: str) -> int:
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
        assert op != "/" or a % b == 0
        self.lines.append(f"{before} {a} {op} {b} = {result}{after}.")
        return result


_Family = Callable[[random.Random, _Work], tuple[str, int]]


def problems(split: Split, n: int, seed: int = 0) -> list[Problem]:
    """The first `n` distinct problems of a split: the same list for the same seed, on every machine."""
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    seen: set[str] = set()
    out: list[Problem] = []
    stream = problem_stream(split, seed)
    while len(out) < n:
        problem = next(stream)
        if problem.question not in seen:
            seen.add(problem.question)
            out.append(problem)
    return out


def problem_stream(split: Split, seed: int = 0) -> Iterator[Problem]:
    """Endless problems of one split; repeats are possible but rare."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is 'train' or 'held_out', got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = _draw(rng)
        if split_of(problem.question) == split:
            yield problem


def split_of(question: str) -> Split:
    """Which side of the fence a question lies on: a property of its text only."""
    return "held_out" if zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0 else "train"


def parse_answer(text: str) -> int | None:
    """The number after the last `####` of a solution or of a model's reply, or None."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def _draw(rng: random.Random) -> Problem:
    work = _Work([])
    question, answer = rng.choice(_FAMILIES)(rng, work)
    return Problem(question, "\n".join([*work.lines, f"#### {answer}"]), answer)


def _story(rng: random.Random, work: _Work) -> tuple[str, int]:
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
    return " ".join([*text, ask.format(n=name, i=items)]), count


def _containers(rng: random.Random, work: _Work) -> tuple[str, int]:
    """Equal groups, then some are added or taken away."""
    name, items, places = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    groups, each = rng.randint(2, 9), rng.randint(2, 9)
    opening = rng.choice(
        [
            "{n} has {g} {p} with {e} {i} each.",
            "{n} puts {e} {i} in each of {g} {p}.",
            "{n} fills {g} {p} with {e} {i} each.",
        ]
    )
    text = [opening.format(n=name, g=groups, e=each, p=places, i=items)]
    total = work.do(f"The {places} hold", groups, "*", each, f" {items}")
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
    return " ".join(text), total


def _shop(rng: random.Random, work: _Work) -> tuple[str, int]:
    """Several of one thing, one of another, and perhaps the change."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    good = rng.choice(GOODS)
    number, price, other = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    opening = rng.choice(
        [
            "{n} buys {k} {i} for {p} dollars each and a {g} for {o} dollars.",
            "In a shop {n} pays {p} dollars for each of {k} {i} and {o} dollars for a {g}.",
        ]
    )
    text = [opening.format(n=name, k=number, i=items, p=price, g=good, o=other)]
    total = work.do(f"The {items} cost", number, "*", price, " dollars")
    total = work.do(f"With the {good} that is", total, "+", other, " dollars")
    if rng.random() < 0.5:
        text.append(rng.choice(["How much does {n} pay?", "How many dollars does {n} pay in all?"]).format(n=name))
        return " ".join(text), total
    paid = total + rng.randint(1, 30)
    text.append(rng.choice(["{n} has {c} dollars.", "{n} pays with {c} dollars."]).format(n=name, c=paid))
    text.append(rng.choice(["How many dollars are left?", "How much money does {n} have left?"]).format(n=name))
    return " ".join(text), work.do("That leaves", paid, "-", total, " dollars")


def _compare(rng: random.Random, work: _Work) -> tuple[str, int]:
    """One has more, fewer or a multiple of what another has; then both together."""
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
        return f"{opening} {middle} How many {items} does {second} have?", other
    ask = rng.choice(["How many {i} do they have together?", "How many {i} do {a} and {b} have in all?"])
    total = work.do("Together they have", base, "+", other, f" {items}")
    return f"{opening} {middle} {ask.format(i=items, a=first, b=second)}", total


def _daily(rng: random.Random, work: _Work) -> tuple[str, int]:
    """The same amount every day, towards a goal or from a stock."""
    name, each, days = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 9)
    amount = each * days + rng.randint(2, 40)
    kind = rng.choice(["pages", "miles", "dollars"])
    opening = {
        "pages": f"{name} reads {each} pages a day for {days} days. The book has {amount} pages.",
        "miles": f"{name} walks {each} miles a day for {days} days. The trip is {amount} miles long.",
        "dollars": f"{name} saves {each} dollars a day for {days} days. A lamp costs {amount} dollars.",
    }[kind]
    ask = {
        "pages": rng.choice(["How many pages are left?", "How many pages does {n} still have to read?"]),
        "miles": rng.choice(["How many miles are left?", "How many miles does {n} still have to walk?"]),
        "dollars": rng.choice(["How many dollars are still needed?", "How many more dollars does {n} need?"]),
    }[kind]
    done = work.do(f"In {days} days that is", each, "*", days, f" {kind}")
    return f"{opening} {ask.format(n=name)}", work.do("That leaves", amount, "-", done, f" {kind}")


def _share(rng: random.Random, work: _Work) -> tuple[str, int]:
    """Something is gathered or put aside; the result is shared equally."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    parts, each = rng.randint(2, 9), rng.randint(2, 9)
    total = parts * each
    if rng.random() < 0.5:
        first = rng.randint(1, total - 1)
        opening = rng.choice(["{n} has {a} {i} and buys {b} more.", "{n} picks {a} {i} and then {b} more."])
        text = [opening.format(n=name, a=first, b=total - first, i=items)]
        work.do(f"{name} has", first, "+", total - first, f" {items}")
        text.append(rng.choice(["{p} friends share them equally.", "They are shared equally by {p} friends."]))
    else:
        kept = rng.randint(2, 15)
        text = [rng.choice(["{n} has {a} {i} and keeps {b}.", "{n} has {a} {i}, but {b} are broken."])]
        text[0] = text[0].format(n=name, a=total + kept, b=kept, i=items)
        work.do("To share there are", total + kept, "-", kept, f" {items}")
        text.append(rng.choice(["{p} friends share the rest equally.", "The rest are shared equally by {p} friends."]))
    text[1] = text[1].format(p=parts)
    ask = rng.choice(["How many {i} does each friend get?", "How many {i} are there for each friend?"])
    return " ".join([*text, ask.format(i=items)]), work.do("Each gets", total, "/", parts, f" {items}")


def _work_pay(rng: random.Random, work: _Work) -> tuple[str, int]:
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
        return f"{opening} {middle} How many dollars does {name} earn?", total
    spent = rng.randint(2, total - 1)
    spend = f"Then {name} spends {spent} dollars."
    total = work.do("That leaves", total, "-", spent, " dollars")
    return f"{opening} {middle} {spend} How many dollars are left?", total


def _farm(rng: random.Random, work: _Work) -> tuple[str, int]:
    """Two kinds of things with different counts of parts."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    one, one_each, two, two_each, part = rng.choice(
        [("hens", 2, "cows", 4, "legs"), ("bikes", 2, "cars", 4, "wheels"), ("ducks", 2, "beetles", 6, "legs")]
    )
    place = rng.choice(["On a farm there are", "In a picture {n} sees", "{n} counts"]).format(n=rng.choice(NAMES))
    first = work.do(f"The {one} have", a, "*", one_each, f" {part}")
    second = work.do(f"The {two} have", b, "*", two_each, f" {part}")
    total = work.do("In all there are", first, "+", second, f" {part}")
    return f"{place} {a} {one} and {b} {two}. How many {part} are there in all?", total


_FAMILIES: list[_Family] = [_story, _story, _containers, _shop, _compare, _daily, _share, _work_pay, _farm]
