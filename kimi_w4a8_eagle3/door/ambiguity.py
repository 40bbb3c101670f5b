"""Reject regular expressions that can match one text in ever more ways: xgrammar follows all of them for every token.

The check runs on the automaton of positions (Glushkov's). A loop is ambiguous when two paths through it read the same
text and meet again, or when an inner and an outer repeat lead from one place to the same next place. A counted repeat
is a loop unless it is exact and short: `(\d{1,3}\.){3}`.
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
_MAX_WORK = 20_000  # pairs of positions and edges to examine: about 20 ms
_MAX_DEPTH = 48  # of groups
_SHORT = 64  # letters that an exact repeat may read without being a loop


class TooAmbiguous(ValueError):
    """The pattern can match longer texts in ever more ways, or is too large to check."""


@dataclass
class _Part:
    """A part of the pattern: the positions, as bits, that it may begin and end with, and all its positions.

    length: the number of letters that it reads at most.
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
        """Parse `a|b|c`, up to its closing bracket or the end."""
        parts = [self.sequence()]
        while self.at < len(self.pieces) and self.pieces[self.at] == "|":
            self.at += 1
            parts.append(self.sequence())
        if len(parts) > 1 and all(self._is_letter(part) for part in parts):  # one class, as the compiler makes it
            place = parts[0].first.bit_length() - 1
            for part in parts[1:]:
                self.reads[place] |= self.reads[part.first.bit_length() - 1]
            return parts[0]
        whole = _Part(nullable=any(part.nullable for part in parts), length=max(part.length for part in parts))
        for part in parts:
            whole.first, whole.last = whole.first | part.first, whole.last | part.last
            whole.inside |= part.inside
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
        """Parse one atom or group with its repeats; a `?` that makes a repeat lazy changes nothing."""
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
        """Let the part follow itself."""
        if part.nullable or any(self.follow[place] & part.first for place in _bits(part.last)):
            raise TooAmbiguous
        self.join(part.last, part.first)
        self.loops = [loop for loop in self.loops if not loop & part.inside] + [part.inside]

    def join(self, last: int, first: int) -> None:
        for place in _bits(last):
            self.spend(1)
            self.follow[place] |= first

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise TooAmbiguous

    def require_one_way(self, loop: int) -> None:
        """Raise TooAmbiguous if two paths from one position, over letters that both read, meet at one position."""
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
            return (1 << len(self.letters)) - 1  # Python does not know it: any letter
        return sum(1 << number for number, letter in enumerate(self.letters) if matches(letter))


def require_unambiguous(pattern: str) -> None:
    """Raise TooAmbiguous for a pattern that can match longer texts in ever more ways."""
    pieces = _PIECES.findall(pattern)
    automaton = _Automaton(pieces, tuple(dict.fromkeys((*_LETTERS, *pattern))))
    while automaton.at < len(pieces):  # the compiler refuses an extra bracket
        automaton.alternatives()
        automaton.at += 1
    for loop in automaton.loops:
        automaton.require_one_way(loop)


def _is_repeat(piece: str) -> bool:
    return piece in ("*", "+", "?") or (piece[0] == "{" and len(piece) > 1)


def _counts(piece: str) -> tuple[int, float]:
    """Return the least and the greatest count; infinity where nothing bounds it."""
    if piece[0] != "{":
        return {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1)}[piece]
    low, comma, high = (part.strip() for part in piece[1:-1].partition(","))
    return int(low or 0), float(high or "inf") if comma else int(low or 0)


def _bits(number: int) -> Iterator[int]:
    while number:
        yield (number & -number).bit_length() - 1
        number &= number - 1
