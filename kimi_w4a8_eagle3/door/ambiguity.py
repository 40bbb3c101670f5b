"""Can a regular expression read one text in ever more ways? xgrammar keeps them all and walks each for every token.

Decided on the automaton of positions (Glushkov's): a loop is ambiguous when two ways through it read the same text and
meet again, or when an inner and an outer repeat lead from one place to the same next one. A counted repeat is a loop,
unless it is exact and short: `(\d{1,3}\.){3}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_PIECES = re.compile(
    r"\\[pP]\{\w*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\((?:\?(?:P?<\w+>|<?[=!]|:))?"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,? ?\d*\}|.",
    re.DOTALL,
)
_EMPTY = frozenset(["^", "$", r"\b", r"\B", r"\A", r"\Z"])
_LETTERS = (*map(chr, range(128)), "é", "Σ", "中", "٣", "\u2003", "€")
_MAX_WORK = 20_000  # pairs of positions and edges that are looked at: 20 ms or so
_MAX_DEPTH = 48  # of groups
_SHORT = 64  # letters that an exact repeat may read and be none of the loops


class TooAmbiguous(ValueError):
    """The pattern reads some texts in more ways the longer they are, or is too large to tell."""


@dataclass
class _Part:
    """A part of the pattern: the positions, as bits, that it may begin and end with, and all of them.

    length: letters that it reads at most.
    """

    first: int = 0
    last: int = 0
    inside: int = 0
    nullable: bool = True
    length: float = 0


@dataclass
class _Automaton:
    pieces: list[str]
    letters: tuple[str, ...]
    at: int = 0
    reads: list[int] = field(default_factory=list)  # by position: the letters, as bits
    follow: list[int] = field(default_factory=list)  # by position: the positions that may come next, as bits
    loops: list[int] = field(default_factory=list)
    depth: int = 0
    work: int = 0

    def alternatives(self) -> _Part:
        """`a|b|c`, to its closing bracket or the end."""
        parts = [self.sequence()]
        while self.at < len(self.pieces) and self.pieces[self.at] == "|":
            self.at += 1
            parts.append(self.sequence())
        if len(parts) > 1 and all(self._is_letter(each) for each in parts):  # one class, as the compiler makes it
            place = parts[0].first.bit_length() - 1
            for each in parts[1:]:
                self.reads[place] |= self.reads[each.first.bit_length() - 1]
            return parts[0]
        whole = _Part(nullable=any(each.nullable for each in parts), length=max(each.length for each in parts))
        for each in parts:
            whole.first, whole.last = whole.first | each.first, whole.last | each.last
            whole.inside |= each.inside
        return whole

    def sequence(self) -> _Part:
        whole = _Part()
        while self.at < len(self.pieces) and self.pieces[self.at] not in ("|", ")"):
            part = self.repeated()
            self.join(whole.last, part.first)
            whole.first |= part.first if whole.nullable else 0
            whole.last = part.last | (whole.last if part.nullable else 0)
            whole.inside |= part.inside
            whole.nullable &= part.nullable
            whole.length += part.length
        return whole

    def repeated(self) -> _Part:
        """One atom or group, with the repeats behind it; one that makes another lazy says nothing of its own."""
        part, repeats = self.single(), 0
        while self.at < len(self.pieces) and _is_repeat(self.pieces[self.at]):
            low, high = _counts(self.pieces[self.at])
            self.at += 1
            repeats += 1
            if repeats > 1 and (low, high) == (0, 1):
                continue
            part.length *= high
            if high > 1 and not (low == high and part.length <= _SHORT and not part.nullable):
                self.loop(part)
            part.nullable |= low == 0
        return part

    def single(self) -> _Part:
        piece = self.pieces[self.at]
        self.at += 1
        if piece[0] == "(":
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise TooAmbiguous
            part = self.alternatives()
            self.depth -= 1
            self.at += 1  # its bracket
            return part
        if piece in _EMPTY:
            return _Part()
        place = len(self.reads)
        self.reads.append(self._letters_of(piece))
        self.follow.append(0)
        return _Part(1 << place, 1 << place, 1 << place, nullable=False, length=1)

    def loop(self, part: _Part) -> None:
        """The part may follow itself."""
        if part.nullable or any(self.follow[place] & part.first for place in _bits(part.last)):
            raise TooAmbiguous
        self.join(part.last, part.first)
        self.loops = [each for each in self.loops if not each & part.inside] + [part.inside]

    def join(self, last: int, first: int) -> None:
        for place in _bits(last):
            self.spend(1)
            self.follow[place] |= first

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise TooAmbiguous

    def require_one_way(self, loop: int) -> None:
        """Two ways from one position, over letters that both read, must not come to one position again."""
        seen: set[tuple[int, int]] = set()
        waiting = [pair for place in _bits(loop) for pair in self._pairs(self.follow[place], self.follow[place], loop)]
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            one, other = (self.follow[place] & loop for place in pair)
            if one & other:
                raise TooAmbiguous
            waiting += self._pairs(one, other, loop)

    def _pairs(self, some: int, others: int, loop: int) -> Iterator[tuple[int, int]]:
        for one in _bits(some & loop):
            for other in _bits(others & loop):
                self.spend(1)
                if one != other and self.reads[one] & self.reads[other]:
                    yield min(one, other), max(one, other)

    def _is_letter(self, part: _Part) -> bool:
        return part.length == 1 and not part.nullable and part.inside.bit_count() == 1

    def _letters_of(self, piece: str) -> int:
        if len(piece) == 1 and piece != ".":
            return 1 << self.letters.index(piece)
        try:
            matches = re.compile(piece).fullmatch
        except re.error:
            return (1 << len(self.letters)) - 1  # unknown here: any
        return sum(1 << number for number, letter in enumerate(self.letters) if matches(letter))


def require_unambiguous(pattern: str) -> None:
    """Raise TooAmbiguous for a pattern that reads some texts in more ways the longer they are."""
    pieces = _PIECES.findall(pattern)
    automaton = _Automaton(pieces, tuple(dict.fromkeys((*_LETTERS, *pattern))))
    while automaton.at < len(pieces):  # a bracket too many is the compiler's to refuse
        automaton.alternatives()
        automaton.at += 1
    for loop in automaton.loops:
        automaton.require_one_way(loop)


def _is_repeat(piece: str) -> bool:
    return piece in ("*", "+", "?") or (piece[0] == "{" and len(piece) > 1)


def _counts(piece: str) -> tuple[int, float]:
    """At least and at most; infinity where nothing bounds it."""
    if piece[0] != "{":
        return {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1)}[piece]
    low, comma, high = (each.strip() for each in piece[1:-1].partition(","))
    return int(low or 0), float(high or "inf") if comma else int(low or 0)


def _bits(number: int) -> Iterator[int]:
    while number:
        yield (number & -number).bit_length() - 1
        number &= number - 1
