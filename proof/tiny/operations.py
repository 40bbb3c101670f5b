"""Operations as the model works them out, line by line, and the numbers that they are drawn with."""

from __future__ import annotations

import random

from .problems import Work
from .wordings import MOST

# Operations with a name of their own, and their second number.
NAMED = {
    "double": ("*", 2),
    "triple": ("*", 3),
    "half": ("/", 2),
    "quarter": ("/", 4),
    "dozen": ("*", 12),
    "next": ("+", 1),
}


def operands(op: str, rng: random.Random) -> tuple[int, int]:
    """Two numbers, most of them small, such that the model can work the operation out."""
    kind = rng.random()
    if op in "+-":
        most = 20 if kind < 0.3 else 100 if kind < 0.7 else MOST
        a, b = rng.randint(0, most), rng.randint(0, most if rng.random() < 0.7 else min(most, 100))
        if op == "-" and a < b and rng.random() < 0.6:
            a, b = b, a
    elif op == "*":
        if kind < 0.45:
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
        b = rng.randint(1, 12) if kind < 0.62 else rng.randint(13, 100 if kind < 0.7 else 36)
        quotient = rng.randint(0, 12) if kind < 0.42 or b > 12 else rng.randint(2, MOST // b)
        a = b * min(quotient, MOST // b)
    else:
        return rng.randint(2, 200), rng.randint(2, 12)
    if kind % 0.05 < 0.008 and max(a, b) <= 100:
        a, b = rng.choice(((-a, b), (a, -b), (-a, -b)))
    return a, b


def worked(work: Work, a: int, op: str, b: int, direct: bool = False) -> int:
    """Take the steps of one operation: larger products and quotients are made of those of their parts."""
    if direct or op in "+-":
        return work.do("It is", a, op, b, f" remainder {a % b}" if op == "/" and a % b else "")
    return _product(work, a, b) if op == "*" else _quotient(work, a, b)


def _leading(number: int) -> int:
    """The first digit with its zeros, such as 400 of 437; with the number's sign."""
    unit = 10 ** (len(str(abs(number))) - 1)
    return abs(number) // unit * unit * (1 if number > 0 else -1)


def _product(work: Work, a: int, b: int) -> int:
    small, large = sorted((abs(a), abs(b)))
    if small < 2 or large <= 12 or (small == 2 and large < 100) or {small, large} & {10, 100}:
        return work.do("It is", a, "*", b)
    if _leading(a) == a and _leading(b) == b:
        return work.do("It is", a, "*", b)
    if abs(a) < abs(b):
        a, b = b, a
    if _leading(b) == b:
        first, second = _product(work, _leading(a), b), _product(work, a - _leading(a), b)
    else:
        first, second = _product(work, a, _leading(b)), _product(work, a, b - _leading(b))
    return work.do("It is", first, "+", second)


def _quotient(work: Work, a: int, b: int) -> int:
    quotient, rest = divmod(a, b)
    after = f" remainder {rest}" if rest else ""
    if quotient <= 12 or b < 2 or _leading(quotient) == quotient:
        return work.do("It is", a, "/", b, after)
    part = b * _leading(quotient)
    first = work.do("It is", part, "/", b)
    return work.do("It is", first, "+", _quotient(work, work.do("It is", a, "-", part), b), after)
